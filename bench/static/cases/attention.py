"""Paged and sliding-window attention, ``merge_partials`` and ``write_kv``."""

from __future__ import annotations

from typing import Any

from quire import kernels

from ...cases import shapes
from ..case import NUM_SEQS, StaticCase, attention_case, case, floats, ints, longs, meta

NUM_PAGES, NUM_KV_HEADS = 512, 4
E4M3 = "float8_e4m3fn"
CAPPED = {"softcap": 50.0, "sinks": True, "window": 128}
# Each once, in decode and prefill: head_dim, block_size, options.
FEATURES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pages-only": (128, 64, {"in_step": False}),
    "context-only": (128, 64, {"in_step": False, "context_only": True}),
    "apart": (256, 64, {"window": 512, "apart": True}),
    "p16-window": (128, 16, {"window": 1024}),
    "softcap-sinks": (64, 64, CAPPED),
    "group-5-odd-pages": (128, 48, {"group": 5}),
    "group-8": (512, 16, {"group": 8}),
    "fp16": (128, 64, {"dtype": "float16"}),
    "fp8-d32": (32, 64, {"scales": "rows"}),
    "fp8-window": (256, 64, {"scales": "rows", "window": 512}),
    "fp8-softcap-sinks": (64, 64, {"scales": "tensor", **CAPPED}),
    "fp8-number": (128, 64, {"scales": "number"}),
    "fp8-fp16": (128, 64, {"scales": "rows", "dtype": "float16"}),
    "fp8-fp32": (128, 64, {"scales": "rows", "dtype": "float32"}),
}


def cases() -> list[StaticCase]:
    """Each tile shape in both ways of addressing pages, and each feature once."""
    found = []
    for dim in (16, 32, 64, 128, 256, 512):
        for block_size in (16, 128) if dim >= 64 else (16,):
            name = f"d{dim}-p{block_size}"
            for q_len in (1, 8, 16) if dim >= 64 else (1,):
                found.append(attention(f"decode-{name}-q{q_len}", dim, block_size, q_len))
            found.append(attention(f"prefill-{name}", dim, block_size))
        parts = meta(4, NUM_SEQS, 16, dim), floats(4, 16, NUM_SEQS)
        found += [
            attention(f"prefill-d{dim}-window", dim, 128, window=1024),
            attention(f"decode-d{dim}-fp32", dim, 64, 16, dtype="float32"),
            attention(f"prefill-d{dim}-fp32", dim, 64, dtype="float32"),
            case(f"merge-d{dim}", kernels.merge_partials, *parts),
            write(f"write-d{dim}", dim),
        ]
    for dim in (64, 128, 256, 512):
        for block_size in (16, 128) if dim == 128 else (128,):
            name = f"fp8-d{dim}-p{block_size}"
            for q_len in (1, 8, 16):
                decode = f"decode-{name}-q{q_len}"
                found.append(attention(decode, dim, block_size, q_len, scales="rows"))
            found.append(attention(f"prefill-{name}", dim, block_size, scales="rows"))
    for name, (dim, block_size, options) in FEATURES.items():
        found.append(attention(f"decode-{name}", dim, block_size, 1, **options))
        found.append(attention(f"prefill-{name}", dim, block_size, **options))
    found += [write(f"write-fp8-d{dim}", dim, "rows") for dim in (16, 128, 512)]
    return [*found, write("write-fp8-d128-number", 128, "number")]


def attention(
    name: str, head_dim: int, block_size: int, q_len: int | None = None, *,
    dtype: str = "bfloat16", group: int = 4, scales: str | None = None, apart: bool = False,
    sinks: bool = False, window: int | None = None, **options: Any,
) -> StaticCase:  # fmt: skip
    """One call of attention; further arguments as in `attention_case`.

    Args:
        group: query heads of a KV head.
        scales: scales of e4m3 pages: "rows", "tensor" or "number"; None: plain pages.
        apart: True for a pool of values with another distance between rows.
    """
    fp8, heads = scales is not None, NUM_KV_HEADS * group
    shape = shapes.attention(
        "", heads, NUM_KV_HEADS, head_dim, window, None, sinks, block_size, fp8
    )
    options["block_table"] = ints(NUM_SEQS, 256)
    if scales != "rows":
        options |= scales_of(scales, block_size)
    if apart:
        options["k_pages"] = pool(block_size, 2, head_dim, dtype)[:, :, 0]
        options["v_pages"] = pool(block_size, 3, head_dim, dtype)[:, :, 1]
    # Tile shapes of fp32 rows are those of fp32, whatever the pages hold.
    label = E4M3 if fp8 and dtype != "float32" else dtype
    return attention_case(name, shape, q_len, dtype=dtype, label=label, **options)


def write(name: str, head_dim: int, scales: str | None = None) -> StaticCase:
    """One ``write_kv``; scales as in `attention`."""
    dtype, rows = E4M3 if scales else "bfloat16", meta(NUM_SEQS, NUM_KV_HEADS, head_dim)
    arguments = (rows, rows, *pool(64, 2, head_dim, dtype).unbind(2), longs(NUM_SEQS))
    return case(name, kernels.write_kv, *arguments, **scales_of(scales, 64), dtype=dtype)


def pool(block_size: int, tensors: int, head_dim: int, dtype: str) -> Any:
    """Pages of several tensors, whose rows lie side by side."""
    return meta(NUM_PAGES, block_size, tensors, NUM_KV_HEADS, head_dim, dtype=dtype)


def scales_of(kind: str | None, block_size: int) -> dict[str, Any]:
    """k_scale and v_scale; scales of rows lie as in the runner's pool, a head's side by side."""
    k_scale, v_scale = (0.5, 0.25) if kind else (None, None)
    if kind == "rows":
        pages = floats(NUM_PAGES, 2, NUM_KV_HEADS, block_size).transpose(2, 3)
        k_scale, v_scale = pages[:, 0], pages[:, 1]
    elif kind == "tensor":
        k_scale, v_scale = floats(), floats()
    return {"k_scale": k_scale, "v_scale": v_scale}
