"""What a layer has around its matrix products and attention: ``residual_norm``,
``norm_rope`` and ``gated_product``."""

from __future__ import annotations

import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import StaticCase, meta

NUM_ROWS = 256


def cases() -> list[StaticCase]:
    """Each family's calls at its real sizes; the longest rows; each dtype."""
    norms = {
        "llama": {"size": 4096, "residual": True},
        "first": {"size": 4096},
        "gemma3": {"size": 5376, "residual": True, "post": True, "offset": 1.0},
        "gemma4": {"size": 2560, "residual": True, "post": True, "scalar": True},
        "gemma4-sum": {"size": 2560, "residual": True, "post": True, "weight": False},
        "gemma4-router": {"size": 2816, "out": "float32"},
        "fp16": {"size": 4096, "residual": True, "dtype": "float16"},
        "fp32": {"size": 2880, "residual": True, "dtype": "float32"},
        "longest": {"size": 16384, "residual": True, "post": True, "scalar": True},
    }
    ropes = {
        "llama": {},
        "gpt-oss": {"heads": (64, 8), "head_dim": 64},
        "gemma3": {"heads": (32, 16), "norm": True, "offset": 1.0},
        "gemma4-sliding": {"heads": (8, 2), "head_dim": 256, "norm": True, "norm_v": True},
        "gemma4-full": {
            "heads": (8, 2), "head_dim": 512, "norm": True, "norm_v": True, "has_v": False
        },
        "gemma4-shared": {"heads": (8, 0), "head_dim": 512, "norm": True, "has_v": False},
        "fp16": {"norm": True, "norm_v": True, "dtype": "float16"},
        "fp32": {"norm": True, "norm_v": True, "dtype": "float32"},
    }  # fmt: skip
    products = {
        "llama": {"width": 14336, "activation": "silu"},
        "gemma": {"width": 10240, "activation": "gelu_tanh"},
        "gpt-oss": {"width": 2880, "activation": "silu", "limit": 7.0, "interleaved": True},
        "limit": {"width": 2048, "activation": "silu", "limit": 10.0},
        "fp16": {"width": 14336, "activation": "silu", "dtype": "float16"},
        "fp32": {"width": 14336, "activation": "gelu_tanh", "dtype": "float32"},
    }
    return [
        StaticCase(
            f"{name}-{case}",
            name,
            functools.partial(launches, **options),
            dtype=options.get("dtype", "bfloat16"),
            sample=case in samples,
            operator=operator,
        )
        for name, operator, launches, table, samples in (
            ("residual-norm", "residual_norm", norm_launches, norms, ("gemma4",)),
            ("norm-rope", "norm_rope", rope_launches, ropes, ("llama", "gemma4-sliding")),
            ("gated-product", "gated_product", product_launches, products, ("llama", "gemma")),
        )
        for case, options in table.items()
    ]


def norm_launches(
    arch: Arch,
    size: int,
    residual: bool = False,
    post: bool = False,
    scalar: bool = False,
    weight: bool = True,
    offset: float = 0.0,
    dtype: str = "bfloat16",
    out: str | None = None,
) -> list[Any]:
    """The launch of one ``residual_norm``; out: dtype of the result, None = that of the rows."""
    from quire.kernels.norms import triton_impl

    def rows() -> Any:
        return meta(NUM_ROWS, size, dtype=dtype)

    return [
        triton_impl.prepare(
            rows(),
            meta(size, dtype=dtype) if weight else None,
            1e-6,
            offset,
            rows() if residual else None,
            meta(size, dtype=dtype) if post else None,
            meta(1, dtype=dtype) if scalar else None,
            meta(NUM_ROWS, size, dtype=out or dtype) if weight else None,
        )
    ]


def rope_launches(
    arch: Arch,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    norm: bool = False,
    norm_v: bool = False,
    has_v: bool = True,
    offset: float = 0.0,
    dtype: str = "bfloat16",
) -> list[Any]:
    """The launch of one ``norm_rope``; heads: of the queries, and of the keys."""
    from quire.kernels.rotary import triton_impl

    num_heads, num_kv_heads = heads
    angles = meta(2, NUM_ROWS, head_dim // 2, dtype="float32")
    return [
        triton_impl.prepare(
            meta(NUM_ROWS, num_heads + num_kv_heads * (1 + has_v), head_dim, dtype=dtype),
            angles[0],
            angles[1],
            num_kv_heads,
            has_v,
            meta(head_dim, dtype=dtype) if norm else None,
            meta(head_dim, dtype=dtype) if norm and num_kv_heads else None,
            norm_v,
            1e-6,
            offset,
            meta(NUM_ROWS, num_heads + num_kv_heads * (1 + norm_v), head_dim, dtype=dtype),
        )
    ]


def product_launches(
    arch: Arch,
    width: int,
    activation: str,
    limit: float | None = None,
    interleaved: bool = False,
    dtype: str = "bfloat16",
) -> list[Any]:
    """The launch of one ``gated_product`` over a merged product."""
    from quire.kernels.gating import triton_impl

    merged = meta(NUM_ROWS, 2 * width, dtype=dtype)
    if interleaved:
        gate, up = merged.unflatten(1, (width, 2)).unbind(2)
    else:
        gate, up = merged.chunk(2, 1)
    alpha, up_offset = (1.702, 1.0) if interleaved else (1.0, 0.0)
    out = meta(NUM_ROWS, width, dtype=dtype)
    return [triton_impl.prepare(gate, up, activation, limit, alpha, up_offset, out)]
