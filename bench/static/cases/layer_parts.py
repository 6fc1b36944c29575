"""What a layer has around its matrix products and attention: ``residual_norm`` and
``norm_rope``."""

from __future__ import annotations

import functools
from typing import Any

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
        )
        for case, options in table.items()
    ]


def norm_launches(
    arch: int,
    size: int,
    residual: bool = False,
    post: bool = False,
    scalar: bool = False,
    weight: bool = True,
    offset: float = 0.0,
    dtype: str = "bfloat16",
) -> list[Any]:
    """The launch of one ``residual_norm``."""
    from quire.kernels.residual_norm import triton_impl

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
            rows() if weight else None,
        )
    ]


def rope_launches(
    arch: int,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    norm: bool = False,
    norm_v: bool = False,
    has_v: bool = True,
    offset: float = 0.0,
    dtype: str = "bfloat16",
) -> list[Any]:
    """The launch of one ``norm_rope``; heads: of the queries, and of the keys."""
    from quire.kernels.norm_rope import triton_impl

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
