"""MLA of DeepSeek-V3, and the operators on latent rows of DeepSeek-V4.

V4-Flash has 64 heads and a top-k of 512, Pro 128 and 1024; fewer heads are tensor-parallel shards.
"""

from __future__ import annotations

from typing import Any

from quire import kernels

from . import StaticCase, meta

NUM_SEQS, NUM_PAGES, PREFILL = 16, 512, 1024
HEAD_DIM, ROPE_DIM, WINDOW, INDEX_DIM = 512, 64, 128, 128
FP8 = "uint8"  # the dtype of quantized pages
ROW_BYTES = {"bfloat16": 2 * HEAD_DIM, FP8: 576, "float32": 4 * HEAD_DIM}
SAMPLE = (
    "mla-decode-h16",
    "mla-prefill-h128",
    "compressed-decode-csa-h16-k512",
    "compressed-decode-csa-h64-k512-fp8-pages",
    "compressed-prefill-csa-h64-k512",
    "index-decode-k512-bf16",
    "index-decode-k512-fp8",
    "latent-fp8-p64",
    "latent-heads",
    "compress-csa-fp8-prefill",
    "overlap-compressor",
)


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
        compressed("decode-csa-h8-k512", "csa", 8, 1),
        compressed("decode-csa-h16-k512", "csa", 16, 1),
        compressed("decode-csa-h64-k512", "csa", 64, 1),
        compressed("decode-csa-h128-k1024", "csa", 128, 1, topk=1024),
        compressed("decode-csa-h16-k512-fp8-pages", "csa", 16, 1, FP8, in_step=False),
        compressed("decode-csa-h64-k512-fp8-pages", "csa", 64, 1, FP8, in_step=False),
        compressed("decode-csa-h128-k1024-fp8-pages", "csa", 128, 1, FP8, topk=1024, in_step=False),
        compressed("decode-hca-h8-fp8-q2", "hca", 8, 2, FP8),
        compressed("decode-hca-h16-q2", "hca", 16, 2),
        compressed("decode-hca-h16-fp8-q2", "hca", 16, 2, FP8),
        compressed("decode-csa-h16-k512-fp32", "csa", 16, 1, "float32"),
        compressed("prefill-csa-h16-k512", "csa", 16),
        compressed("prefill-csa-h16-k512-fp8", "csa", 16, pages=FP8),
        compressed("prefill-csa-h64-k512", "csa", 64),
        compressed("prefill-csa-h64-k512-fp8", "csa", 64, pages=FP8),
        compressed("prefill-csa-h128-k1024-fp8", "csa", 128, pages=FP8, topk=1024),
        compressed("prefill-hca-h8", "hca", 8),
        compressed("prefill-hca-h16-fp8", "hca", 16, pages=FP8),
        compressed("prefill-hca-h64-fp32", "hca", 64, pages="float32"),
        flash_mla("slots-h16-k512", 16, "bfloat16"),
        flash_mla("slots-h64-k512-fp8", 64, FP8),
    ]
    for phase, q_len in (("decode", 1), ("prefill", PREFILL)):
        found += [
            index(f"{phase}-k512-bf16", q_len),
            index(f"{phase}-k512-fp8", q_len, FP8),
            index(f"{phase}-k1024-bf16", q_len, topk=1024),
            index(f"{phase}-k1024-fp8", q_len, FP8, topk=1024),
            index(f"{phase}-small-pages", q_len, block_size=2),
            index(f"{phase}-small-pages-fp8", q_len, FP8, block_size=2),
            index(f"{phase}-scores", q_len, scores=True),
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
        heads("heads", HEAD_DIM),
        heads("index-heads", INDEX_DIM, norm=False),
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


def mla(
    name: str,
    num_heads: int,
    q_len: int | None = None,
    block_size: int = 64,
    dtype: str = "bfloat16",
    in_step: bool = True,
    head_dim_v: int = 512,
) -> StaticCase:
    """One ``mla_attention``; q_len: new tokens of a sequence in decode, None: prefill."""
    num_tokens, head_dim = NUM_SEQS * (q_len or PREFILL), head_dim_v + ROPE_DIM

    def call() -> None:
        kernels.mla_attention(
            meta(num_tokens, num_heads, head_dim, dtype=dtype),
            meta(NUM_PAGES, block_size, head_dim, dtype=dtype),
            *batch(),
            max_seqlen_q=q_len or PREFILL,
            num_decodes=NUM_SEQS if q_len else 0,
            softmax_scale=0.1,
            head_dim_v=head_dim_v,
            kv=meta(num_tokens, head_dim, dtype=dtype) if in_step else None,
            lse=meta(num_heads, num_tokens, dtype="float32"),
            impl="triton",
        )

    key_bytes = head_dim * (4 if dtype == "float32" else 2)
    return StaticCase(f"mla-{name}", call, dtype, key_bytes, f"mla-{name}" in SAMPLE)


def compressed(
    name: str,
    kind: str,
    num_heads: int,
    q_len: int | None = None,
    pages: str = "bfloat16",
    topk: int = 512,
    in_step: bool = True,
) -> StaticCase:
    """One ``compressed_attention``.

    Args:
        kind: "csa" (top-k entries, pages of 64), "hca" (all entries, pages of 2) or "window".
        q_len: new tokens of a sequence in decode; None: prefill.
        pages: dtype of the pages.
    """
    num_tokens, dtype = (
        NUM_SEQS * (q_len or PREFILL),
        "float32" if pages == "float32" else "bfloat16",
    )
    name = f"compressed-{name}"

    def call() -> None:
        entries: dict[str, Any] = {}
        if kind != "window":
            entries = {
                "compressed_pages": latent_pages(pages, 2 if kind == "hca" else 64),
                "compressed_table": meta(NUM_SEQS, 4096, dtype="int32"),
                "compress_ratio": 128 if kind == "hca" else 4,
            }
        if kind == "csa":
            entries["topk_indices"] = meta(num_tokens, topk, dtype="int32")
            entries["topk_lens"] = meta(num_tokens, dtype="int32")
        kernels.compressed_attention(
            meta(num_tokens, num_heads, HEAD_DIM, dtype=dtype),
            latent_pages(pages, 64),
            *batch(4),
            sliding_window=WINDOW,
            max_seqlen_q=q_len or PREFILL,
            num_decodes=NUM_SEQS if q_len else 0,
            kv=meta(num_tokens, HEAD_DIM, dtype=dtype) if in_step else None,
            **entries,
            sinks=meta(num_heads, dtype="float32"),
            cos_sin=meta(1 << 20, ROPE_DIM, dtype="float32"),
            lse=meta(num_heads, num_tokens, dtype="float32"),
            impl="triton",
        )

    return StaticCase(name, call, pages, ROW_BYTES[pages], name in SAMPLE)


def flash_mla(name: str, num_heads: int, pages: str) -> StaticCase:
    """One ``flash_mla_with_kvcache`` over lists of rows."""

    def call() -> None:
        cache = meta(NUM_PAGES, 64, 1, 584 if pages == FP8 else HEAD_DIM, dtype=pages)
        kernels.flash_mla_with_kvcache(
            meta(NUM_SEQS, 1, num_heads, HEAD_DIM),
            cache,
            None,
            None,
            HEAD_DIM,
            is_fp8_kvcache=pages == FP8,
            indices=meta(NUM_SEQS, 1, WINDOW, dtype="int32"),
            topk_length=meta(NUM_SEQS, dtype="int32"),
            attn_sink=meta(num_heads, dtype="float32"),
            extra_k_cache=cache,
            extra_indices_in_kvcache=meta(NUM_SEQS, 1, 512, dtype="int32"),
            extra_topk_length=meta(NUM_SEQS, dtype="int32"),
            impl="triton",
        )

    return StaticCase(f"compressed-decode-{name}", call, pages, ROW_BYTES[pages])


def index(
    name: str,
    q_len: int,
    pages: str = "bfloat16",
    topk: int = 512,
    max_seq_len: int = 1 << 17,
    dtype: str = "bfloat16",
    block_size: int = 64,
    scores: bool = False,
) -> StaticCase:
    """One ``index_topk`` with 64 heads, which scores the keys and selects in one or more levels."""
    name, num_tokens = f"index-{name}", NUM_SEQS * q_len

    def call() -> None:
        kernels.index_topk(
            meta(num_tokens, 64, INDEX_DIM, dtype=dtype),
            meta(num_tokens, 64, dtype="float32"),
            index_pages(pages, block_size),
            *batch(max_seq_len // 4 // block_size),
            topk=topk,
            max_seqlen_q=q_len,
            max_seq_len=max_seq_len,
            scores=meta(num_tokens, topk, dtype="float32") if scores else None,
            impl="triton",
        )

    item_bytes = {FP8: 1, "float32": 4}.get(pages, 2)
    return StaticCase(name, call, dtype, INDEX_DIM * item_bytes, name in SAMPLE)


def write(
    name: str, pages: str, dtype: str = "bfloat16", block_size: int = 64, fused: bool = True
) -> StaticCase:
    """One ``write_latent``; fused: with norm and RoPE, and a result."""
    name, rows = f"latent-{name}", 8192

    def call() -> None:
        more: dict[str, Any] = rotation(rows, HEAD_DIM) if fused else {}
        if fused:
            more["out"] = meta(rows, HEAD_DIM, dtype=dtype)
        kernels.write_latent(
            meta(rows, HEAD_DIM, dtype=dtype),
            latent_pages(pages, block_size),
            meta(rows, dtype="int64"),
            impl="triton",
            **more,
        )

    return StaticCase(name, call, dtype, sample=name in SAMPLE)


def heads(name: str, dim: int, norm: bool = True) -> StaticCase:
    """The ``write_latent`` that rotates heads of queries in place."""
    name, rows = f"latent-{name}", 8192

    def call() -> None:
        x = meta(rows * 64, dim)
        options = rotation(rows, dim)
        if not norm:
            options["norm_weight"] = None
        kernels.write_latent(x, None, None, out=x, impl="triton", **options)

    return StaticCase(name, call, sample=name in SAMPLE)


def compress(
    name: str,
    pages: str,
    q_len: int = 1,
    ratio: int = 4,
    block_size: int = 64,
    dtype: str = "float32",
    dim: int = HEAD_DIM,
) -> StaticCase:
    """One ``compress``, with a ring that a decode step of one token fills by one launch."""
    name, overlap_rows = f"compress-{name}", ratio == 4
    num_tokens, channels = NUM_SEQS * q_len, dim * (1 + overlap_rows)

    def call() -> None:
        # Projected side by side, as a model does.
        kv, gate = meta(num_tokens, 2, channels, dtype=dtype).unbind(1)
        kernels.compress(
            kv,
            gate,
            meta(ratio, channels, dtype="float32"),
            meta(NUM_SEQS, ratio * (1 + overlap_rows), 2, channels, dtype="float32"),
            meta(NUM_SEQS, dtype="int32"),
            *batch()[1:],
            ratio=ratio,
            overlap=overlap_rows,
            norm_weight=meta(dim, dtype="float32"),
            cos_sin=meta(1 << 20, ROPE_DIM, dtype="float32"),
            pages=(index_pages if dim == INDEX_DIM else latent_pages)(pages, block_size),
            slot_mapping=meta(num_tokens, dtype="int64"),
            max_seqlen_q=q_len,
            impl="triton",
        )

    return StaticCase(name, call, sample=name in SAMPLE)


def overlap(name: str, width: int) -> StaticCase:
    """One ``copy_overlap`` of a decode step."""
    name, count = f"overlap-{name}", 64

    def call() -> None:
        kv, gate = meta(count, 2, 2 * width, dtype="float32").unbind(1)
        kernels.copy_overlap(
            kv,
            gate,
            meta(4, 2 * width, dtype="float32"),
            meta(count + 1, 8, 2, 2 * width, dtype="float32"),
            meta(NUM_PAGES, 4, 2, width, dtype="float32"),
            from_pages=meta(count, dtype="int64"),
            state_index=meta(count, dtype="int64"),
            state_rows=meta(count, 4, dtype="int64"),
            tokens=meta(count * 4, dtype="int64"),
            to_pages=meta(count * 4, dtype="int64"),
            impl="triton",
        )

    return StaticCase(name, call, "float32", sample=name in SAMPLE)


def batch(table_width: int = 256) -> tuple[Any, Any, Any]:
    """block_table, seq_lens and cu_seqlens_q."""
    return (
        meta(NUM_SEQS, table_width, dtype="int32"),
        meta(NUM_SEQS, dtype="int32"),
        meta(NUM_SEQS + 1, dtype="int32"),
    )


def rotation(rows: int, dim: int) -> dict[str, Any]:
    """The arguments of ``write_latent`` for a norm and RoPE."""
    return {
        "positions": meta(rows, dtype="int64"),
        "cos_sin": meta(1 << 20, ROPE_DIM, dtype="float32"),
        "norm_weight": meta(dim, dtype="float32"),
    }


def latent_pages(dtype: str, block_size: int) -> Any:
    """Pages of latent rows."""
    if dtype == FP8:
        width = kernels.page_bytes(block_size)
        return kernels.LatentPages(meta(NUM_PAGES, width, dtype=FP8), block_size)
    data = meta(NUM_PAGES, block_size, HEAD_DIM, dtype=dtype)
    return kernels.LatentPages(data, block_size)


def index_pages(dtype: str, block_size: int) -> Any:
    """Pages of the indexer's keys."""
    if dtype == FP8:
        width = kernels.page_bytes(block_size, INDEX_DIM + 4)
        return kernels.IndexPages(meta(NUM_PAGES, width, dtype=FP8), block_size)
    data = meta(NUM_PAGES, block_size, INDEX_DIM, dtype=dtype)
    return kernels.IndexPages(data, block_size)
