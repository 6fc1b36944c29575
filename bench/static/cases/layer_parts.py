"""What a layer has around its matrix products and attention: ``residual_norm``."""

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
