"""MLA of DeepSeek-V3, and the operators on latent rows of DeepSeek-V4.

V4-Flash has 64 heads and a top-k of 512, Pro 128 and 1024; fewer heads are tensor-parallel shards.
"""

from __future__ import annotations

from typing import Any

from quire import kernels

from ...cases.shapes import Case, LatentShape
from . import StaticCase, case, floats, ints, longs, meta, problem_case

NUM_SEQS, NUM_PAGES, PREFILL, CONTEXT, NUM_ROWS = 16, 512, 1024, 1 << 17, 8192
HEAD_DIM, ROPE_DIM, WINDOW, INDEX_DIM, INDEX_HEADS = 512, 64, 128, 128, 64
FP8 = "uint8"  # the dtype of quantized pages
ITEM_BYTES = {"float32": 4, FP8: 1}
ROW_BYTES = {"bfloat16": 2 * HEAD_DIM, FP8: 576, "float32": 4 * HEAD_DIM}


def cases() -> list[StaticCase]:
    """Each tile shape in both kinds of pages, and each feature once."""
    found = []
    for count in (8, 16, 32, 64, 128):
        found += [
            mla(f"decode-h{count}", count, 1),
            mla(f"decode-h{count}-p16-pages-only", count, 1, block_size=16, in_step=False),
            mla(f"prefill-h{count}", count),
        ]
    found += [
        mla("decode-h16-q2", 16, 2),
        mla("decode-h40", 40, 1),
        mla("decode-h16-pages-only", 16, 1, in_step=False),
        mla("decode-h128-fp16", 128, 1, dtype="float16"),
        mla("decode-h16-narrow", 16, 1, head_dim_v=256),
        mla("decode-h16-fp32", 16, 1, dtype="float32"),
        mla("prefill-h16-fp32", 16, dtype="float32"),
        compressed("decode-csa-h8-k512", 8, 1),
        compressed("decode-csa-h16-k512", 16, 1),
        compressed("decode-csa-h64-k512", 64, 1),
        compressed("decode-csa-h128-k1024", 128, 1, topk=1024),
        compressed("decode-csa-h16-k512-fp8-pages", 16, 1, FP8, in_step=False),
        compressed("decode-csa-h64-k512-fp8-pages", 64, 1, FP8, in_step=False),
        compressed("decode-csa-h128-k1024-fp8-pages", 128, 1, FP8, topk=1024, in_step=False),
        compressed("decode-hca-h8-fp8-q2", 8, 2, FP8),
        compressed("decode-hca-h16-q2", 16, 2),
        compressed("decode-hca-h16-fp8-q2", 16, 2, FP8),
        compressed("prefill-csa-h16-fp8-p1", 16, pages=FP8, entry_rows=1),
        compressed("decode-csa-h16-k512-fp32", 16, 1, "float32"),
        compressed("prefill-csa-h16-k512", 16),
        compressed("prefill-csa-h16-k512-fp8", 16, pages=FP8),
        compressed("prefill-csa-h64-k512", 64),
        compressed("prefill-csa-h64-k512-fp8", 64, pages=FP8),
        compressed("prefill-csa-h128-k1024-fp8", 128, pages=FP8, topk=1024),
        compressed("prefill-hca-h8", 8),
        compressed("prefill-hca-h16-fp8", 16, pages=FP8),
        compressed("prefill-hca-h64-fp32", 64, pages="float32"),
        flash_mla("slots-h16-k512", 16, "bfloat16"),
        flash_mla("slots-h64-k512-fp8", 64, FP8),
    ]
    for phase, q_len in (("decode", 1), ("prefill", None)):
        found += [
            index(f"{phase}-k512-bf16", q_len),
            index(f"{phase}-k512-fp8", q_len, FP8),
            index(f"{phase}-k1024-bf16", q_len, topk=1024),
            index(f"{phase}-k1024-fp8", q_len, FP8, topk=1024),
            index(f"{phase}-small-pages", q_len, block_size=2),
            index(f"{phase}-small-pages-fp8", q_len, FP8, block_size=2),
            index(f"{phase}-all-selected", q_len, max_seq_len=1 << 11),
            index(f"{phase}-fp32", q_len, "float32", dtype="float32"),
            index(f"{phase}-fp32-fp8", q_len, FP8, dtype="float32"),
        ]
    return [
        *found,
        write("bf16", "bfloat16"),
        write("fp32", "float32", dtype="float32"),
        write("fp8-p64", FP8),
        write("fp8-p2", FP8, block_size=2),
        write("fp8-only-write", FP8, fused=False),
        rotated_heads("heads", HEAD_DIM),
        rotated_heads("index-heads", INDEX_DIM, norm_weight=None),
        compress("csa-bf16-decode", "bfloat16"),
        compress("csa-fp8-prefill", FP8, PREFILL),
        compress("csa-fp32-decode", "float32"),
        compress("csa-fp8-bf16-rows", FP8, dtype="bfloat16"),
        compress("hca-bf16-decode", "bfloat16", ratio=128, block_size=2),
        compress("hca-fp8-prefill", FP8, PREFILL, ratio=128, block_size=2),
        compress("index-bf16-prefill", "bfloat16", PREFILL, dim=INDEX_DIM),
        compress("index-fp8-decode", FP8, dim=INDEX_DIM),
        overlap("compressor", HEAD_DIM),
        overlap("indexer", INDEX_DIM),
    ]


def batch(shape: LatentShape, q_len: int | None) -> Case:
    """Decode with ``q_len`` new tokens a sequence, or prefill (None)."""
    phase = "decode" if q_len else "prefill"
    return Case(shape, phase, NUM_SEQS, CONTEXT, q_len or PREFILL)


def mla(
    name: str,
    num_heads: int,
    q_len: int | None = None,
    block_size: int = 64,
    dtype: str = "bfloat16",
    in_step: bool = True,
    head_dim_v: int = 512,
) -> StaticCase:
    """One ``mla_attention``; q_len as in `batch`."""
    head_dim = head_dim_v + ROPE_DIM
    shape = LatentShape(
        "", "mla", num_heads, head_dim, ROPE_DIM, head_dim_v, rows=block_size, scale=0.1, fp8=False
    )
    key_bytes = head_dim * (4 if dtype == "float32" else 2)
    return problem_case(f"mla-{name}", batch(shape, q_len), dtype, dtype, key_bytes, in_step)


def compressed(
    name: str,
    num_heads: int,
    q_len: int | None = None,
    pages: str = "bfloat16",
    topk: int = 512,
    in_step: bool = True,
    entry_rows: int | None = None,
) -> StaticCase:
    """One ``compressed_attention``.

    Args:
        name: name of the case, with "csa" (top-k entries) or "hca" (all).
        num_heads: query heads.
        q_len: as in `batch`.
        pages: dtype of the pages.
        topk: entries of a token.
        in_step: True to hand over the step's own rows.
        entry_rows: rows of a page of entries; None: 64 of csa, 2 of hca.
    """
    op = "csa" if "csa" in name else "hca"
    shape = LatentShape(
        "", op, num_heads, ratio=4 if op == "csa" else 128, topk=topk if op == "csa" else 0,
        rows=entry_rows or (64 if op == "csa" else 2), fp8=pages == FP8,
    )  # fmt: skip
    dtype = "float32" if pages == "float32" else "bfloat16"
    changes = {} if in_step else {"cos_sin": angles()}
    name, key_bytes = f"compressed-{name}", ROW_BYTES[pages]
    return problem_case(name, batch(shape, q_len), dtype, pages, key_bytes, in_step, **changes)


def flash_mla(name: str, num_heads: int, pages: str) -> StaticCase:
    """One ``flash_mla_with_kvcache`` over lists of rows."""
    cache = meta(NUM_PAGES, 64, 1, 584 if pages == FP8 else HEAD_DIM, dtype=pages)
    return case(
        f"compressed-decode-{name}",
        kernels.flash_mla_with_kvcache,
        meta(NUM_SEQS, 1, num_heads, HEAD_DIM),
        cache,
        None,
        None,
        HEAD_DIM,
        is_fp8_kvcache=pages == FP8,
        indices=ints(NUM_SEQS, 1, WINDOW),
        topk_length=ints(NUM_SEQS),
        attn_sink=floats(num_heads),
        extra_k_cache=cache,
        extra_indices_in_kvcache=ints(NUM_SEQS, 1, 512),
        extra_topk_length=ints(NUM_SEQS),
        dtype=pages,
        key_bytes=ROW_BYTES[pages],
    )


def index(
    name: str,
    q_len: int | None,
    pages: str = "bfloat16",
    topk: int = 512,
    max_seq_len: int = 1 << 17,
    dtype: str = "bfloat16",
    block_size: int = 64,
) -> StaticCase:
    """One ``index_topk``, which scores the keys and selects in one or two launches."""
    shape = LatentShape(
        "", "index", INDEX_HEADS, INDEX_DIM, ratio=4, topk=topk, rows=block_size, fp8=pages == FP8
    )
    key_bytes, name = INDEX_DIM * ITEM_BYTES.get(pages, 2), f"index-{name}"
    return problem_case(
        name, batch(shape, q_len), dtype, dtype, key_bytes, False, max_seq_len=max_seq_len
    )


def write(
    name: str, pages: str, dtype: str = "bfloat16", block_size: int = 64, fused: bool = True
) -> StaticCase:
    """One ``write_latent``; fused: with norm and RoPE, and a result."""
    return case(
        f"latent-{name}",
        kernels.write_latent,
        meta(NUM_ROWS, HEAD_DIM, dtype=dtype),
        latent_pages(pages, block_size),
        longs(NUM_ROWS),
        **(rotation(HEAD_DIM) | {"out": meta(NUM_ROWS, HEAD_DIM, dtype=dtype)} if fused else {}),
        dtype=dtype,
    )


def rotated_heads(name: str, dim: int, **options: Any) -> StaticCase:
    """The ``write_latent`` that rotates heads of queries in place."""
    x = meta(NUM_ROWS * 64, dim)
    options = rotation(dim) | options
    return case(f"latent-{name}", kernels.write_latent, x, None, None, out=x, **options)


def compress(
    name: str,
    pages: str,
    q_len: int = 1,
    ratio: int = 4,
    block_size: int = 64,
    dtype: str = "float32",
    dim: int = HEAD_DIM,
) -> StaticCase:
    """One ``compress``; a window of ratio 4 overlaps the one before."""
    num_tokens, overlapping = NUM_SEQS * q_len, ratio == 4
    channels, ring = dim * (1 + overlapping), ratio * (1 + overlapping)
    # Projected side by side, as a model does.
    kv, gate = meta(num_tokens, 2, channels, dtype=dtype).unbind(1)
    return case(
        f"compress-{name}",
        kernels.compress,
        kv,
        gate,
        floats(ratio, channels),
        floats(NUM_SEQS, ring, 2, channels),
        ints(NUM_SEQS),
        ints(NUM_SEQS),
        ints(NUM_SEQS + 1),
        ratio=ratio,
        overlap=overlapping,
        norm_weight=floats(dim),
        cos_sin=angles(),
        pages=(index_pages if dim == INDEX_DIM else latent_pages)(pages, block_size),
        slot_mapping=longs(num_tokens),
        max_seqlen_q=q_len,
    )


def overlap(name: str, width: int) -> StaticCase:
    """One ``copy_overlap`` of a decode step."""
    count = 64
    kv, gate = floats(count, 2, 2 * width).unbind(1)
    return case(
        f"overlap-{name}",
        kernels.copy_overlap,
        kv,
        gate,
        floats(4, 2 * width),
        floats(count + 1, 8, 2, 2 * width),
        floats(NUM_PAGES, 4, 2, width),
        from_pages=longs(count),
        state_index=longs(count),
        state_rows=longs(count, 4),
        tokens=longs(count * 4),
        to_pages=longs(count * 4),
        dtype="float32",
    )


def angles() -> Any:
    """cos_sin of RoPE."""
    return floats(1 << 20, ROPE_DIM)


def rotation(dim: int) -> dict[str, Any]:
    """The arguments of ``write_latent`` for a norm and RoPE."""
    return {"positions": longs(NUM_ROWS), "cos_sin": angles(), "norm_weight": floats(dim)}


def latent_pages(dtype: str, block_size: int) -> Any:
    """Pages of latent rows."""
    size = (kernels.page_bytes(block_size),) if dtype == FP8 else (block_size, HEAD_DIM)
    return kernels.LatentPages(meta(NUM_PAGES, *size, dtype=dtype), block_size)


def index_pages(dtype: str, block_size: int) -> Any:
    """Pages of the indexer's keys."""
    size = (block_size, INDEX_DIM)
    if dtype == FP8:
        size = (kernels.page_bytes(block_size, INDEX_DIM + 4),)
    return kernels.IndexPages(meta(NUM_PAGES, *size, dtype=dtype), block_size)
