"""Jobs: part of a chain that the engine copies from one pool to the other.

A job of a store and one of a load differ only in their direction. The index that it reads and the
index that it fills each keep a `Holding` until it ends:

    segments        0   1   2   3   4   5        the target has segments 0 to 2, so the job brings
    source          =======================      3 to 5 and the resume points at 4 and 6. In the
    resume points                  4       6     source the whole path is locked, in the target
    target          ===========- - - - - - -     that to the end of segment 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..announcer import Noted
from ..arrays import NO_VALUES, Int32
from ..prefix.holdings import Holding
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run


@dataclass(eq=False, slots=True)
class Job:
    """Pages to copy; page ``sources[i]`` goes to ``targets[i]``. Tell `Tiers.done` when they are.

    Attributes:
        kind: ``"store"`` to the host, or ``"load"`` from it.
        sources, targets: [n] int32 page ids, of the device or of the host.
        num_bytes: of all pages.
        num_tokens: of the prefix that becomes findable in the target.
    """

    kind: Literal["store", "load"]
    sources: Int32
    targets: Int32
    num_bytes: int
    num_tokens: int
    brings: Brought = field(repr=False)


@dataclass(eq=False, slots=True)
class Brought:
    """What a job brings, and what it keeps meanwhile.

    Attributes:
        keys: of the chain up to its last segment.
        first: number of its first segment.
        segments: [n, pages_per_segment] pages of the target.
        sources, points: resume points of the source, and [m, pages_per_point] pages of the target
            for them.
        depths: their boundaries.
        holding, reading: of the target and of the source. reading is None once the job is void:
            what it was to bring was forgotten meanwhile, and only its own pages are kept.
        noted: of its segments, for events.
    """

    keys: bytes
    first: int
    segments: Int32
    sources: list[ResumePoint]
    points: Int32
    depths: list[int]
    holding: Holding
    reading: Holding | None
    noted: list[Noted] | None = None

    @property
    def is_void(self) -> bool:
        """Whether it is to bring nothing."""
        return self.reading is None

    @property
    def first_key(self) -> bytes:
        """Key of the first segment; empty where a resume point comes alone."""
        return self.keys[self.first * KEY_BYTES : (self.first + 1) * KEY_BYTES]


def begin(
    source: PrefixIndex,
    target: PrefixIndex,
    run: Run,
    keys: bytes,
    points: Sequence[ResumePoint],
) -> tuple[Brought, Int32, Int32] | None:
    """Reserve pages of the target for what it lacks of a chain, and keep both ends.

    Args:
        run: of the source, in which the chain ends.
        keys: of the chain.
        points: of the chain, to bring too, the shortest first.

    Returns:
        What the job brings, and its source and target pages; or None: there is no room, and nothing
        changed. Errors are those of the target's policy.
    """
    depth = len(keys) // KEY_BYTES
    there, first = target.find(keys, depth)
    dense = source.pages_between(run, first, depth)
    tails = np.array([point.pages for point in points], dtype=np.int32)
    pages, where = np.unique(tails, return_inverse=True)  # points may share blocks of windows
    sources = np.concatenate([dense.ravel(), pages[pages != 0]])
    reading = Holding(source, source.end_at(run, depth), tails.ravel())
    holding = Holding(target, target.end_at(there, first))
    has_room = False
    try:
        lacks = max(0, len(sources) - target.pool.num_available)
        if lacks <= target.num_evictable:
            target.evict(lacks)
            has_room = True
    finally:
        if not has_room:
            holding.end()
            reading.end()
    if not has_room:
        return None
    targets = holding.take(len(sources))
    segments = targets[: dense.size].reshape(dense.shape)
    pages[pages != 0] = targets[dense.size :]
    brought = Brought(
        keys, first, segments, [*points], pages[where].reshape(tails.shape),
        [point.depth for point in points], holding, reading,
    )  # fmt: skip
    return brought, sources, targets


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
    if not brought.is_void:
        stop_reading(brought, used)
    brought.holding.end()


def stop_reading(brought: Brought, used: bool = False) -> None:
    """End what a job keeps of its source; its resume points may be evicted again."""
    reading, brought.reading = brought.reading, None
    assert reading is not None
    reading.end(used=used)
    for point in brought.sources:
        if point.run is not None and point not in reading.index.pins:
            reading.index.offer(point)


def make_void(brought: Brought) -> None:
    """An open job is to bring nothing; it keeps its own pages, which are still written."""
    brought.holding.detach()
    stop_reading(brought)
