"""What a snapshot's arrays must be for them to make an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arrays import Int64
from .events import split_keys
from .prefix.keys import KEY_BYTES

if TYPE_CHECKING:
    from .cache import KVCache

MAX_COUNT = 1 << 48  # ticks and uses: far more than any cache counts, and exact as a float
Array = npt.NDArray[Any]


def check_contents(kv: KVCache, tick: int, arrays: dict[str, Array]) -> None:
    """Refuse contents that make no index, before anything changes."""
    runs, points, dense = arrays["runs"], arrays["points"], arrays["run_pages"]
    total = len(dense)
    _within("parents of runs", runs[:, 0], -1, np.arange(len(runs)) - 1)
    _within("segments of runs", runs[:, 1], 1, total)
    _equal("run_pages", total, sum(runs[:, 1].tolist()))
    _equal("keys", len(arrays["keys"]), total * KEY_BYTES)
    keys = split_keys(arrays["keys"].tobytes())
    _equal("distinct keys", len(set(keys)), total)
    _within("run_pages", dense, 1, kv.num_pages - 1)
    _within("lossy", arrays.get("lossy", dense[:0]), 1, kv.num_pages - 1)
    _equal("distinct run_pages", len(np.unique(dense)), dense.size)
    if "tokens" in arrays:
        _equal("tokens", len(arrays["tokens"]), total)
        _within("tokens", arrays["tokens"], 0, 2**31 - 1)
    _equal("point_pages", len(arrays["point_pages"]), len(points))
    if not kv.hybrid:
        _equal("points of a cache without windows and states", len(points), 0)
    _within("runs of points", points[:, 0], 0, len(runs) - 1)
    for name, table in (("runs", runs), ("points", points)):
        _within(f"last use of {name}", table[:, 2], 0, tick)
        _within(f"uses of {name}", table[:, 3], 0, MAX_COUNT)
    start = np.zeros(len(runs) + 1, dtype=np.int64)  # the last one is the root's end, for parent -1
    depth = start.copy()
    for i, (parent, length) in enumerate(runs[:, :2].tolist()):
        start[i] = depth[parent]
        depth[i] = start[i] + length
    number, boundary = points[:, 0], points[:, 1]
    _within("boundaries of points", boundary, start[number] + 1, depth[number])
    _equal("distinct points", len(np.unique(points[:, :2], axis=0)), len(points))
    _check_tails(kv, boundary * kv.alignment, arrays["point_pages"], dense)


def _check_tails(kv: KVCache, boundaries: Int64, tails: Array, dense: Array) -> None:
    """A resume point has a page for every block that its boundary needs, and a page is one block of
    one table.

    Args:
        boundaries: [n] tokens. tails: [n, pages_per_point] its pages.
    """
    classes = kv.layout.classes
    size = np.repeat([c.block_size for c in classes], [c.num_tables * c.tail for c in classes])
    back = np.concatenate([np.tile(np.arange(c.tail, 0, -1), c.num_tables) for c in classes])
    tables = np.concatenate(
        [np.repeat(c.tail_offset + np.arange(c.num_tables), c.tail) for c in classes]
    )
    blocks = boundaries[:, None] // size - back  # [n, pages_per_point]
    there = (blocks >= 0).astype(np.int64)
    _within("point_pages", tails, there, there * (kv.num_pages - 1))
    held = np.stack([tails, np.broadcast_to(tables, tails.shape), blocks], axis=-1)[tails != 0]
    held = np.unique(held, axis=0)
    _equal("distinct point_pages", len(np.unique(held[:, 0])), len(held))
    _equal("point_pages that are run_pages", int(np.isin(held[:, 0], dense).sum()), 0)


def _within(field: str, values: Array, low: int | Array, high: int | Array) -> None:
    """Refuse values outside low..high, which are the same for all or [rows] or of the shape of
    `values`."""
    wrong = np.flatnonzero((values < low) | (values > high))
    if len(wrong):
        at = wrong[0]
        least, most = (np.broadcast_to(bound, values.shape).ravel()[at] for bound in (low, high))
        raise ValueError(
            f"snapshot: {field}: expected {least}..{most}, got {values.ravel()[at]} at {at}"
        )


def _equal(field: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"snapshot: {field}: expected {expected}, got {got}")
