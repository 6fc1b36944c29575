"""Paged and sliding-window attention, ``merge_partials`` and ``write_kv``."""

from __future__ import annotations

from typing import Any

from quire import kernels

from ...cases.shapes import Case, Shape
from . import StaticCase, case, floats, ints, longs, meta, problem_case

NUM_SEQS, NUM_PAGES, NUM_KV_HEADS, PREFILL, CONTEXT = 16, 512, 4, 1024, 4096
E4M3 = "float8_e4m3fn"
CAPPED = {"softcap": 50.0, "sinks": True, "sliding_window": 128}
# Each once, in decode and prefill: head_dim, block_size, options.
FEATURES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pages-only": (128, 64, {"in_step": False}),
    "context-only": (128, 64, {"in_step": False, "context_only": True}),
    "apart": (256, 64, {"sliding_window": 512, "apart": True}),
    "window-ring": (256, 64, {"sliding_window": 512}),
    "p16-window": (128, 16, {"sliding_window": 1024}),
    "softcap-sinks": (64, 64, CAPPED),
    "group-5-odd-pages": (128, 48, {"group": 5}),
    "group-8": (512, 16, {"group": 8}),
    "fp16": (128, 64, {"dtype": "float16"}),
    "fp8-d32": (32, 64, {"scales": "rows"}),
    "fp8-window": (256, 64, {"scales": "rows", "sliding_window": 512}),
    "fp8-softcap-sinks": (64, 64, {"scales": "tensor", **CAPPED}),
    "fp8-number": (128, 64, {"scales": "number"}),
    "fp8-fp16": (128, 64, {"scales": "rows", "dtype": "float16"}),
    "fp8-fp32": (128, 64, {"scales": "rows", "dtype": "float32"}),
}


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
            case(
                f"merge-d{head_dim}",
                kernels.merge_partials,
                meta(4, NUM_SEQS, 16, head_dim),
                floats(4, 16, NUM_SEQS),
            ),
            write(f"write-d{head_dim}", head_dim),
        ]
    for head_dim in (64, 128, 256, 512):
        for block_size in (16, 128) if head_dim == 128 else (128,):
            name = f"fp8-d{head_dim}-p{block_size}"
            found += [
                attention(f"decode-{name}-q{q_len}", head_dim, block_size, q_len, scales="rows")
                for q_len in (1, 8, 16)
            ]
            found.append(attention(f"prefill-{name}", head_dim, block_size, scales="rows"))
    for name, (head_dim, block_size, options) in FEATURES.items():
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
    sliding_window: int | None = None,
    **changes: Any,
) -> StaticCase:
    """One call of attention.

    Args:
        name: name of the case.
        head_dim, block_size: sizes of the pages.
        q_len: new tokens of a sequence in decode; None: prefill.
        dtype: dtype of queries, and of plain pages.
        group: query heads of a KV head.
        in_step: True to hand over the step's own K/V.
        scales: scales of e4m3 pages: "rows", "tensor" or "number"; None: plain pages.
        apart: True for a pool of values with another distance between rows.
        sinks, sliding_window: fields of `Shape`.
        changes: arguments in place of the problem's.
    """
    fp8, heads = scales is not None, NUM_KV_HEADS * group
    shape = Shape(
        "", heads, NUM_KV_HEADS, head_dim, sliding_window, None, sinks, block_size, fp8=fp8
    )
    changes["block_table"] = ints(NUM_SEQS, 256)
    if scales != "rows":
        changes |= scales_of(scales, block_size)
    if apart:
        changes["k_pages"] = pool(block_size, 2, head_dim, dtype)[:, :, 0]
        changes["v_pages"] = pool(block_size, 3, head_dim, dtype)[:, :, 1]
    phase = "decode" if q_len else "prefill"
    batch = Case(shape, phase, NUM_SEQS, CONTEXT, q_len or PREFILL)
    # Tile shapes of fp32 rows are those of fp32, whatever the pages hold.
    label = E4M3 if fp8 and dtype != "float32" else dtype
    key_bytes = 2 * head_dim * (1 if fp8 else 4 if dtype == "float32" else 2)
    return problem_case(name, batch, dtype, label, key_bytes, in_step, **changes)


def write(name: str, head_dim: int, scales: str | None = None) -> StaticCase:
    """One ``write_kv``; scales as in `attention`."""
    dtype = E4M3 if scales else "bfloat16"
    return case(
        name,
        kernels.write_kv,
        meta(NUM_SEQS, NUM_KV_HEADS, head_dim),
        meta(NUM_SEQS, NUM_KV_HEADS, head_dim),
        *pool(64, 2, head_dim, dtype).unbind(2),
        longs(NUM_SEQS),
        **scales_of(scales, 64),
        dtype=dtype,
    )


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
