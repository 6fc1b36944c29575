"""``copy_overlap`` at DeepSeek-V4 shapes: the compressor of a CSA layer, and its indexer."""

from __future__ import annotations

import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import StaticCase, meta

RATIO, NUM_SEQS, NUM_PAGES = 4, 64, 512
WIDTHS = {"compressor": 512, "indexer": 128}


def cases() -> list[StaticCase]:
    """One case for each width."""
    return [
        StaticCase(
            f"overlap-{name}",
            "overlap",
            functools.partial(launches, width=width),
            dtype="float32",
            sample=name == "compressor",
            operator="copy_overlap",
        )
        for name, width in WIDTHS.items()
    ]


def launches(arch: Arch, width: int) -> list[Any]:
    """The launch of one ``copy_overlap`` of a decode step."""
    from quire.kernels.overlap_copy import triton_impl

    # Projected side by side, as a model does.
    kv, gate = meta(NUM_SEQS, 2, 2 * width, dtype="float32").unbind(1)
    return [
        triton_impl.prepare(
            kv,
            gate,
            meta(RATIO, 2 * width, dtype="float32"),
            meta(NUM_SEQS + 1, 2 * RATIO, 2, 2 * width, dtype="float32"),
            meta(NUM_PAGES, RATIO, 2, width, dtype="float32"),
            meta(NUM_SEQS, dtype="int64"),
            meta(NUM_SEQS, dtype="int64"),
            meta(NUM_SEQS, RATIO, dtype="int64"),
            meta(NUM_SEQS * RATIO, dtype="int64"),
            meta(NUM_SEQS * RATIO, dtype="int64"),
        )
    ]
