"""``gather_pages`` and ``scatter_pages`` at the pages of DeepSeek-V4-Flash, of one tensor, and of a model of K/V, as they are and in e4m3."""

from __future__ import annotations

import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import StaticCase, meta

NUM_COPIES, NUM_ROWS = 64, 512
# Parts of a page, tensors of a part, bytes in each: quantized rows of all layers in one; ten layers of 16 tokens, 8 heads of 128.
POOLS = {"v4": (6, 1, 167936), "kv": (1, 10, 65536)}
# Elements of a row of ten layers of 16 tokens, by dtype: as many bytes in each.
ROWS = {"bfloat16": (64, 128, 256, 512), "float16": (128,), "float32": (128,)}


def cases() -> list[StaticCase]:
    """Both directions of each pool, and of each kind of rows."""
    plain = [
        StaticCase(
            f"{function}-pages-{pool}",
            function,
            functools.partial(launches, pool=pool, gather=function == "gather"),
            dtype="uint8",
            sample=pool == "kv",
            operator=f"{function}_pages",
        )
        for pool in POOLS
        for function in ("gather", "scatter")
    ]
    converted = [
        StaticCase(
            f"{function}-pages-e4m3-{dtype}-d{row_dim}",
            function,
            functools.partial(
                converting, dtype=dtype, row_dim=row_dim, gather=function == "gather"
            ),
            dtype=dtype,
            sample=dtype == "bfloat16",
            operator=f"{function}_pages",
            head_dim=row_dim,
            pages=dtype,
        )
        for dtype, dims in ROWS.items()
        for row_dim in dims
        for function in ("gather", "scatter")
    ]
    return plain + converted


def launches(arch: Arch, pool: str, gather: bool) -> list[Any]:
    """The launch of one call."""
    from quire.kernels.page_copy import triton_impl

    num_parts, num_tensors, page_bytes = POOLS[pool]
    return [
        triton_impl.prepare(
            meta(num_parts * num_tensors, dtype="int64"),
            meta(NUM_COPIES, dtype="int64"),
            meta(NUM_ROWS, num_tensors * page_bytes, dtype="uint8"),
            meta(NUM_COPIES, dtype="int64"),
            num_parts,
            num_tensors,
            page_bytes,
            gather=gather,
            aligned=True,
        )
    ]


def converting(arch: Arch, dtype: str, row_dim: int, gather: bool) -> list[Any]:
    """The launch of one call on a pool with ``e4m3_rows``."""
    import torch

    from quire.kernels import E4m3Rows
    from quire.kernels.page_copy import triton_impl

    num_parts, num_tensors, page_bytes = POOLS["kv"]
    form = E4m3Rows(getattr(torch, dtype), row_dim)
    return [
        triton_impl.prepare_e4m3(
            meta(num_parts * num_tensors, dtype="int64"),
            meta(NUM_COPIES, dtype="int64"),
            meta(NUM_ROWS, num_tensors * form.kept_bytes(page_bytes), dtype="uint8"),
            meta(NUM_COPIES, dtype="int64"),
            num_parts,
            num_tensors,
            page_bytes,
            gather=gather,
            aligned=True,
            form=form,
            arch=arch,
        )
    ]
