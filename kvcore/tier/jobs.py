"""Jobs: part of a chain that the engine copies from one pool to the other.

A job of a store and one of a load differ only in their direction. The index that it reads and the
index that it fills each keep a `Holding` until it ends:

    segments        0   1   2   3   4   5        the target has segments 0 to 2, so the job brings
    source          ====================         3 to 5 and the resume point at 6. In the source the
    resume point                       (6)       whole path is locked, in the target 0 to 2
    target          =========|- - - - - -
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..announcer import Noted
from ..arrays import NO_VALUES, ZERO32, Int32
from ..prefix.holdings import Holding
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run, point_before, run_of


@dataclass(eq=False, slots=True)
class Job:
    """Pages to copy; page ``sources[i]`` goes to ``targets[i]``. Tell `Tiers.done` when they are.

    Attributes:
        kind: ``"store"`` to the host, or ``"load"`` from it.
        sources, targets: [n] int32 page ids, of the device or of the host.
        num_bytes: of all pages.
        num_tokens: of the prefix that becomes findable in the target.
        is_open: neither done nor cancelled yet.
    """

    kind: Literal["store", "load"]
    sources: Int32
    targets: Int32
    num_bytes: int
    num_tokens: int
    brings: Brought = field(repr=False)
    is_open: bool = True


@dataclass(eq=False, slots=True)
class Brought:
    """What a job brings, and what it keeps meanwhile.

    Attributes:
        keys: of the chain up to its last segment.
        first: number of its first segment.
        segments: [n, pages_per_segment] pages of the target.
        depths, points: boundaries of resume points, and [m, pages_per_point] their pages in the
            target.
        entry: that is stored; of a load None.
        holding, reading: of the target and of the source. reading is None once the job is void:
            what it was to bring was forgotten meanwhile, and only its own pages are kept.
        noted: of its segments, for events.
    """

    keys: bytes
    first: int
    segments: Int32
    depths: list[int]
    points: Int32
    entry: Run | ResumePoint | None
    holding: Holding
    reading: Holding | None
    noted: list[Noted] | None = None

    @property
    def first_key(self) -> bytes:
        """Key of the first segment; empty where a resume point comes alone."""
        return self.keys[self.first * KEY_BYTES : (self.first + 1) * KEY_BYTES]


def begin(
    source: PrefixIndex,
    target: PrefixIndex,
    run: Run,
    keys: bytes,
    point: ResumePoint | None,
    entry: Run | ResumePoint | None = None,
) -> tuple[Brought, Int32, Int32] | None:
    """Reserve pages of the target for what it lacks of a chain, and keep both ends.

    Args:
        run: of the source, in which the chain ends.
        keys: of the chain.
        point: to bring too, at the end of the chain.
        entry: as of `Brought`.

    Returns:
        What the job brings, and its source and target pages; or None: there is no room, and nothing
        changed. Errors are those of the target's policy.
    """
    depth = len(keys) // KEY_BYTES
    there, first = target.find(keys, depth)
    dense = source.pages_between(run, first, depth)
    tail = NO_VALUES if point is None else point.pages
    shared = _shared(point, there, first)
    is_new = (tail != ZERO32) & (shared == ZERO32)
    reading = Holding(source, source.end_at(run, depth), tail)
    holding = Holding(target, target.end_at(there, first), shared)
    num_pages = dense.size + int(np.count_nonzero(is_new))
    try:
        has_room = make_room(target, num_pages)
    except BaseException:
        holding.end()
        reading.end()
        raise
    if not has_room:
        holding.end()
        reading.end()
        return None
    targets = holding.take(num_pages)
    segments = targets[: dense.size].reshape(dense.shape)
    pages = shared.copy()
    pages[is_new] = targets[dense.size :]
    depths = [] if point is None else [depth]
    points = pages[None][: len(depths)]
    brought = Brought(keys, first, segments, depths, points, entry, holding, reading)
    return brought, np.concatenate([dense.ravel(), tail[is_new]]), targets


def _shared(point: ResumePoint | None, there: Run, first: int) -> Int32:
    """Pages of the target that hold blocks of `point` already; 0 where none does.

    Resume points less than a window apart share blocks. Where both pools have the point before, the
    target's has a page for each that the source's has; so for those that `point` shares with it.

    Args:
        there: run of the target in which the chain ends, after `first` segments.
    """
    if point is None:
        return NO_VALUES
    pages: Int32 = np.zeros(len(point.pages), dtype=np.int32)
    before = point_before(there, min(first + 1, point.depth))
    if before is not None:
        assert point.run is not None
        same = run_of(point.run, before.depth).points.get(before.depth)
        if same is not None:
            _, own, others = np.intersect1d(point.pages, same.pages, return_indices=True)
            pages[own] = before.pages[others]
    return pages


def make_room(index: PrefixIndex, num_pages: int) -> bool:
    """Evict until `num_pages` are free; False, and nothing changed, where that is not enough."""
    lacks = num_pages - index.pool.num_available
    if lacks > index.num_evictable:
        return False
    if lacks > 0:
        index.evict(lacks)
    return True


def adopt(brought: Brought) -> tuple[int, int]:
    """Make entries of the pages that came; returns how many segments and resume points are new."""
    holding = brought.holding
    holding.taken = NO_VALUES
    segments, points = holding.adopt(
        brought.keys, brought.first, brought.segments, brought.depths, brought.points,
        brought.noted,
    )  # fmt: skip
    return segments, len(points)


def let_go(brought: Brought, used: bool) -> None:
    """End what a job keeps; pages that it took and that were not adopted are free again.

    Args:
        used: what was read counts as used now.
    """
    if brought.reading is not None:
        stop_reading(brought, used)
    brought.holding.end()


def stop_reading(brought: Brought, used: bool = False) -> None:
    """End what a job keeps of its source; the entry that it stores may be evicted again."""
    reading, brought.reading, entry = brought.reading, None, brought.entry
    assert reading is not None
    reading.end(used=used)
    index = reading.index
    if isinstance(entry, ResumePoint) and entry.run is not None and entry not in index.pins:
        index.offer(entry)


def make_void(brought: Brought) -> None:
    """An open job is to bring nothing; it keeps its own pages, which are still written."""
    brought.holding.detach()
    stop_reading(brought)
