"""MLA of DeepSeek-V3, and the operators on latent rows of DeepSeek-V4.

V4-Flash has 64 heads and a top-k of 512, Pro 128 and 1024; fewer heads are tensor-parallel shards.
"""

from __future__ import annotations

from typing import Any

from quire import kernels

from ...cases.shapes import Shape
from ..case import NUM_SEQS, PREFILL, StaticCase, attention_case, case, floats, ints, longs, meta

NUM_PAGES, NUM_ROWS = 512, 8192
HEAD_DIM, ROPE_DIM, WINDOW, INDEX_DIM, INDEX_HEADS = 512, 64, 128, 128, 64
FP8 = "uint8"  # the dtype of quantized pages


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
        compressed("prefill-csa-h16-fp8-p1", 16, pages=FP8, rows=1),
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
        # Prefill launches the same kernels.
        index("decode-k512-bf16"),
        index("decode-k512-fp8", FP8),
        index("decode-k1024-bf16", topk=1024),
        index("decode-small-pages", rows=2),
        index("decode-small-pages-fp8", FP8, rows=2),
        index("decode-fp32", dtype="float32"),
        index("decode-fp32-fp8", FP8, dtype="float32"),
    ]
    plain, fp32 = meta(NUM_ROWS, HEAD_DIM), floats(NUM_ROWS, HEAD_DIM)
    heads, index_heads = meta(NUM_ROWS * 64, HEAD_DIM), meta(NUM_ROWS * 64, INDEX_DIM)
    fused = {"positions": longs(NUM_ROWS), "cos_sin": angles()}
    norm = {**fused, "norm_weight": floats(HEAD_DIM)}
    return [
        *found,
        write("bf16", plain, pages("bfloat16"), out=plain, **norm),
        write("fp32", fp32, pages("float32"), out=fp32, **norm, dtype="float32"),
        write("fp8-p64", plain, pages(FP8), out=plain, **norm),
        write("fp8-only-write", plain, pages(FP8)),
        write("heads", heads, None, out=heads, **norm),
        write("index-heads", index_heads, None, out=index_heads, **fused),
        compress("csa-bf16-decode", pages("bfloat16")),
        compress("csa-fp8-prefill", pages(FP8), PREFILL),
        compress("csa-fp32-decode", pages("float32")),
        compress("csa-fp8-bf16-rows", pages(FP8), dtype="bfloat16"),
        compress("hca-bf16-decode", pages("bfloat16", 2), ratio=128),
        compress("hca-fp8-prefill", pages(FP8, 2), PREFILL, ratio=128),
        compress("index-bf16-prefill", index_pages("bfloat16"), PREFILL, dim=INDEX_DIM),
        compress("index-fp8-decode", index_pages(FP8), dim=INDEX_DIM),
        overlap("compressor", HEAD_DIM),
    ]


def mla(
    name: str, num_heads: int, q_len: int | None = None, block_size: int = 64,
    head_dim_v: int = 512, **options: Any,
) -> StaticCase:  # fmt: skip
    """One ``mla_attention``; q_len and options as in `attention_case`."""
    sizes = (num_heads, head_dim_v + ROPE_DIM, ROPE_DIM, head_dim_v)
    shape = Shape("", "mla", *sizes, rows=block_size, scale=0.1, fp8=False)
    return attention_case(f"mla-{name}", shape, q_len, **options)


def compressed(
    name: str, num_heads: int, q_len: int | None = None, pages: str = "bfloat16", topk: int = 512,
    in_step: bool = True, rows: int | None = None,
) -> StaticCase:  # fmt: skip
    """One ``compressed_attention``.

    Args:
        name: name of the case, with "csa" (top-k entries) or "hca" (all).
        pages: dtype of the pages.
        rows: rows of a page of entries; None: 64 of csa, 2 of hca.
    """
    kind: dict[str, Any] = {"op": "hca", "ratio": 128, "rows": rows or 2}
    if "csa" in name:
        kind = {"op": "csa", "ratio": 4, "rows": rows or 64, "topk": topk}
    shape = Shape("", num_heads=num_heads, fp8=pages == FP8, **kind)
    options = {} if in_step else {"cos_sin": angles()}
    dtype = "float32" if pages == "float32" else "bfloat16"
    return attention_case(
        f"compressed-{name}", shape, q_len, dtype=dtype, label=pages, in_step=in_step, **options
    )


def flash_mla(name: str, num_heads: int, pages: str) -> StaticCase:
    """One ``flash_mla_with_kvcache`` over lists of rows."""
    cache = meta(NUM_PAGES, 64, 1, 584 if pages == FP8 else HEAD_DIM, dtype=pages)
    q = meta(NUM_SEQS, 1, num_heads, HEAD_DIM)
    made = case(
        f"compressed-decode-{name}", kernels.flash_mla_with_kvcache, q, cache, None, None, HEAD_DIM,
        is_fp8_kvcache=pages == FP8, indices=ints(NUM_SEQS, 1, WINDOW), topk_length=ints(NUM_SEQS),
        attn_sink=floats(num_heads), extra_k_cache=cache,
        extra_indices_in_kvcache=ints(NUM_SEQS, 1, 512), extra_topk_length=ints(NUM_SEQS),
        dtype=pages,
    )  # fmt: skip
    return StaticCase(made.name, made.call, pages, 576 if pages == FP8 else 2 * HEAD_DIM)


def index(
    name: str, pages: str = "", topk: int = 512, rows: int = 64, dtype: str = "bfloat16"
) -> StaticCase:
    """One ``index_topk`` of a decode step, which scores the keys and selects."""
    sizes = {"ratio": 4, "topk": topk, "rows": rows, "fp8": pages == FP8}
    shape = Shape("", "index", INDEX_HEADS, INDEX_DIM, **sizes)
    return attention_case(f"index-{name}", shape, 1, dtype=dtype)


def write(name: str, x: Any, pages: Any, dtype: str = "bfloat16", **options: Any) -> StaticCase:
    """One ``write_latent``; without pages it rotates heads of queries in place."""
    slots = None if pages is None else longs(NUM_ROWS)
    arguments = (f"latent-{name}", kernels.write_latent, x, pages, slots)
    return case(*arguments, **options, dtype=dtype)


def compress(
    name: str, pages: Any, q_len: int = 1, ratio: int = 4, dtype: str = "float32",
    dim: int = HEAD_DIM,
) -> StaticCase:  # fmt: skip
    """One ``compress``; a window of ratio 4 overlaps the one before."""
    num_tokens, overlapping = NUM_SEQS * q_len, ratio == 4
    channels, ring = dim * (1 + overlapping), ratio * (1 + overlapping)
    # Projected side by side, as a model does.
    kv, gate = meta(num_tokens, 2, channels, dtype=dtype).unbind(1)
    return case(
        f"compress-{name}", kernels.compress, kv, gate, floats(ratio, channels),
        floats(NUM_SEQS, ring, 2, channels), ints(NUM_SEQS), ints(NUM_SEQS), ints(NUM_SEQS + 1),
        ratio=ratio, overlap=overlapping, norm_weight=floats(dim), cos_sin=angles(), pages=pages,
        slot_mapping=longs(num_tokens), max_seqlen_q=q_len,
    )  # fmt: skip


def overlap(name: str, width: int) -> StaticCase:
    """One ``copy_overlap`` of a decode step."""
    count = 64
    kv, gate = floats(count, 2, 2 * width).unbind(1)
    state, pages = floats(count + 1, 8, 2, 2 * width), floats(NUM_PAGES, 4, 2, width)
    return case(
        f"overlap-{name}", kernels.copy_overlap, kv, gate, floats(4, 2 * width), state, pages,
        from_pages=longs(count), state_index=longs(count), state_rows=longs(count, 4),
        tokens=longs(count * 4), to_pages=longs(count * 4), dtype="float32",
    )  # fmt: skip


def angles() -> Any:
    """cos_sin of RoPE."""
    return floats(1 << 20, ROPE_DIM)


def pages(dtype: str, block_size: int = 64) -> Any:
    """Pages of latent rows."""
    size = (kernels.page_bytes(block_size),) if dtype == FP8 else (block_size, HEAD_DIM)
    return kernels.LatentPages(meta(NUM_PAGES, *size, dtype=dtype), block_size)


def index_pages(dtype: str) -> Any:
    """Pages of the indexer's keys."""
    size = (kernels.page_bytes(64, INDEX_DIM + 4),) if dtype == FP8 else (64, INDEX_DIM)
    return kernels.IndexPages(meta(NUM_PAGES, *size, dtype=dtype), 64)
