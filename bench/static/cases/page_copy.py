"""``gather_pages`` and ``scatter_pages`` at the pages of DeepSeek-V4-Flash, of one tensor, and of a model of K/V."""

from __future__ import annotations

import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import StaticCase, meta

NUM_COPIES, NUM_ROWS = 64, 512
# Parts of a page, tensors of a part, bytes in each: quantized rows of all layers in one; ten layers of 16 tokens, 8 heads of 128.
POOLS = {"v4": (6, 1, 167936), "kv": (1, 10, 65536)}


def cases() -> list[StaticCase]:
    """Both directions of each pool."""
    return [
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
