"""``write_latent`` and ``compress`` at DeepSeek-V4 shapes."""

from __future__ import annotations

import functools
from typing import Any

from quire.bench.static_cases import StaticCase, meta

NUM_ROWS = 8192
HEAD_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128


def cases() -> list[StaticCase]:
    """Each kind of page, in both page geometries where the layout depends on it; each dtype of rows; each optional step left out."""
    return [
        StaticCase(f"latent-{name}", "write", functools.partial(write_launches, **options))
        for name, options in {
            "bf16": {"kind": "bfloat16"},
            "fp16": {"kind": "float16", "dtype": "float16"},
            "fp32": {"kind": "float32", "dtype": "float32"},
            "fp8-p64": {"kind": "uint8"},
            "fp8-p2": {"kind": "uint8", "block_size": 2},
            "fp8-fp32-rows": {"kind": "uint8", "dtype": "float32"},
            "fp8-only-write": {"kind": "uint8", "fused": False, "out": False},
            "no-pages": {"kind": None},
        }.items()
    ]


def latent_pages(kind: str, block_size: int) -> Any:
    """Pages of latents whose data is of a dtype by name; uint8 is the quantised layout."""
    from quire.kernels.mla.layout import LatentPages, page_bytes

    if kind == "uint8":
        return LatentPages(meta(512, page_bytes(block_size), dtype="uint8"), block_size)
    return LatentPages(meta(512, block_size, HEAD_DIM, dtype=kind), block_size)


def write_launches(
    arch: int,
    kind: str | None,
    dtype: str = "bfloat16",
    block_size: int = 64,
    fused: bool = True,
    out: bool = True,
) -> list[Any]:
    """The launch of one ``write_latent``; fused: with norm and RoPE."""
    from quire.kernels.mla import latent_triton

    return [
        latent_triton.prepare(
            meta(NUM_ROWS, HEAD_DIM, dtype=dtype),
            None if kind is None else latent_pages(kind, block_size),
            None if kind is None else meta(NUM_ROWS, dtype="int64"),
            meta(NUM_ROWS, dtype="int64") if fused else None,
            meta(1 << 20, ROPE_DIM, dtype="float32") if fused else None,
            meta(HEAD_DIM, dtype="float32") if fused else None,
            1e-6,
            meta(NUM_ROWS, HEAD_DIM, dtype=dtype) if out else None,
        )
    ]
