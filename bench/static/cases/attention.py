"""Paged and sliding-window attention, ``merge_partials`` and ``write_kv``."""

from __future__ import annotations

from typing import Any

from quire import kernels

from . import StaticCase, meta

NUM_SEQS, NUM_PAGES = 16, 512
E4M3 = "float8_e4m3fn"
SAMPLE = (
    "decode-d128-p128-q1",
    "prefill-d128-p128",
    "merge-d128",
    "write-d128",
    "decode-fp8-d128-p128-q1",
    "prefill-fp8-d128-p128",
    "write-fp8-d128",
)


def cases() -> list[StaticCase]:
    """Each tile shape in both ways of addressing pages, and each feature once."""
    found = []
    for head_dim in (16, 32, 64, 128, 256, 512):
        for block_size in (16, 128) if head_dim >= 64 else (16,):
            name = f"d{head_dim}-p{block_size}"
            for q_len in (1, 8, 16) if head_dim >= 64 else (1,):
                found.append(attention(f"decode-{name}-q{q_len}", head_dim, block_size, q_len))
            found.append(attention(f"prefill-{name}", head_dim, block_size))
        found += [
            attention(f"prefill-d{head_dim}-window", head_dim, 128, sliding_window=1024),
            attention(f"decode-d{head_dim}-fp32", head_dim, 64, 16, dtype="float32"),
            attention(f"prefill-d{head_dim}-fp32", head_dim, 64, dtype="float32"),
            merge(head_dim),
            write(f"write-d{head_dim}", head_dim),
        ]
    for head_dim in (64, 128, 256, 512):
        for block_size in (16, 128) if head_dim == 128 else (128,):
            name = f"fp8-d{head_dim}-p{block_size}"
            for q_len in (1, 8, 16):
                found.append(
                    attention(f"decode-{name}-q{q_len}", head_dim, block_size, q_len, scales="rows")
                )
            found.append(attention(f"prefill-{name}", head_dim, block_size, scales="rows"))
    capped: dict[str, Any] = {"softcap": 50.0, "sinks": True, "sliding_window": 128}
    features: dict[str, tuple[int, int, dict[str, Any]]] = {
        "pages-only": (128, 64, {"in_step": False}),
        "context-only": (128, 64, {"in_step": False, "context_only": True}),
        "apart": (256, 64, {"sliding_window": 512, "apart": True}),
        "window-ring": (256, 64, {"sliding_window": 512}),
        "p16-window": (128, 16, {"sliding_window": 1024}),
        "softcap-sinks": (64, 64, capped),
        "group-5-odd-pages": (128, 48, {"group": 5}),
        "fp16": (128, 64, {"dtype": "float16"}),
        "fp8-d32": (32, 64, {"scales": "rows"}),
        "fp8-window": (256, 64, {"scales": "rows", "sliding_window": 512}),
        "fp8-softcap-sinks": (64, 64, {"scales": "tensor", **capped}),
        "fp8-number": (128, 64, {"scales": "number"}),
        "fp8-fp16": (128, 64, {"scales": "rows", "dtype": "float16"}),
        "fp8-fp32": (128, 64, {"scales": "rows", "dtype": "float32"}),
    }
    for name, (head_dim, block_size, options) in features.items():
        found.append(attention(f"decode-{name}", head_dim, block_size, 1, **options))
        found.append(attention(f"prefill-{name}", head_dim, block_size, **options))
    found += [write(f"write-fp8-d{head_dim}", head_dim, "rows") for head_dim in (16, 128, 512)]
    return [*found, write("write-fp8-d128-number", 128, "number")]


def attention(
    name: str,
    head_dim: int,
    block_size: int,
    q_len: int | None = None,
    *,
    dtype: str = "bfloat16",
    group: int = 4,
    in_step: bool = True,
    scales: str | None = None,
    apart: bool = False,
    sinks: bool = False,
    **options: Any,
) -> StaticCase:
    """One call of attention.

    Args:
        q_len: new tokens of a sequence in decode; None: prefill.
        group: query heads of a KV head.
        scales: of e4m3 pages: "rows", "tensor" or "number"; None: pages of ``dtype``.
        apart: whether rows of the values' pool are further apart than those of the keys'.
        options: further arguments of the operator.
    """
    num_kv_heads, num_tokens = 4, NUM_SEQS * (q_len or 1024)

    def call() -> None:
        page_dtype = E4M3 if scales else dtype
        k_pages, v_pages = pool(block_size, 2, head_dim, page_dtype).unbind(2)
        if apart:
            v_pages = pool(block_size, 3, head_dim, page_dtype)[:, :, 1]
        k_scale, v_scale = scales_of(scales, block_size)
        num_heads = num_kv_heads * group
        rows = [meta(num_tokens, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        operator = kernels.paged_attention
        if "sliding_window" in options:
            operator = kernels.sliding_window_attention
        operator(
            meta(num_tokens, num_heads, head_dim, dtype=dtype),
            k_pages,
            v_pages,
            meta(NUM_SEQS, 256, dtype="int32"),
            meta(NUM_SEQS, dtype="int32"),
            meta(NUM_SEQS + 1, dtype="int32"),
            max_seqlen_q=q_len or 1024,
            num_decodes=NUM_SEQS if q_len else 0,
            k=rows[0] if in_step else None,
            v=rows[1] if in_step else None,
            sinks=meta(num_heads, dtype="float32") if sinks else None,
            lse=meta(num_heads, num_tokens, dtype="float32"),
            k_scale=k_scale,
            v_scale=v_scale,
            impl="triton",
            **options,
        )

    # Rows of fp32 are compared with those of fp32, whatever the pages have.
    key_dtype = E4M3 if scales and dtype != "float32" else dtype
    item_bytes = 1 if scales else 4 if dtype == "float32" else 2
    return StaticCase(name, call, key_dtype, 2 * head_dim * item_bytes, name in SAMPLE)


def merge(head_dim: int) -> StaticCase:
    """One ``merge_partials`` of four parts."""

    def call() -> None:
        kernels.merge_partials(
            meta(4, NUM_SEQS, 16, head_dim), meta(4, 16, NUM_SEQS, dtype="float32"), impl="triton"
        )

    name = f"merge-d{head_dim}"
    return StaticCase(name, call, sample=name in SAMPLE)


def write(name: str, head_dim: int, scales: str | None = None) -> StaticCase:
    """One ``write_kv``; scales: as of ``attention``."""

    def call() -> None:
        rows = (meta(NUM_SEQS, 4, head_dim) for _ in range(2))
        pages = pool(64, 2, head_dim, E4M3 if scales else "bfloat16").unbind(2)
        k_scale, v_scale = scales_of(scales, 64)
        slots = meta(NUM_SEQS, dtype="int64")
        kernels.write_kv(*rows, *pages, slots, k_scale=k_scale, v_scale=v_scale, impl="triton")

    return StaticCase(name, call, E4M3 if scales else "bfloat16", sample=name in SAMPLE)


def pool(block_size: int, tensors: int, head_dim: int, dtype: str) -> Any:
    """Pages of several tensors, whose rows lie side by side."""
    return meta(NUM_PAGES, block_size, tensors, 4, head_dim, dtype=dtype)


def scales_of(kind: str | None, block_size: int) -> tuple[Any, Any]:
    """k_scale and v_scale; those of rows lie as in the runner's pool, rows of a head side by side."""
    if kind == "rows":
        scales = meta(NUM_PAGES, 2, 4, block_size, dtype="float32").transpose(2, 3)
        return scales[:, 0], scales[:, 1]
    if kind == "tensor":
        return meta(dtype="float32"), meta(dtype="float32")
    return (0.5, 0.25) if kind else (None, None)
