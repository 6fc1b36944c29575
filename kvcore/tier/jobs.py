"""Jobs: part of a chain to copy from one pool to the other.

A store and a load differ only in direction. Each index has a `TransferEnd` until the job ends:

    segments        0   1   2   3   4   5        the target has segments 0 to 2, so the job copies
    source          =======================      3 to 5 and the resume points at 4 and 6. The whole
    resume points                  4       6     path is locked in the source, segments 0 to 2 are
    target          ===========- - - - - - -     locked in the target
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..arrays import NO_VALUES, Int32
from ..event_writer import SegmentContent
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run, run_of


class TransferEnd:
    """Locked path to `run`, pages in use and pages taken of one index, for one job.

    Attributes:
        used: pages of resume points that are read (repeats and the null page allowed).
        taken: [n] int32 pages that are in no entry, see `take`.
    """

    def __init__(self, index: PrefixIndex, run: Run, used: Int32 = NO_VALUES) -> None:
        self.index, self.run, self.used = index, run, used
        self.taken: Int32 = NO_VALUES
        index.lock(run)
        index.pool.use_held(used)
        index.transfers[self] = None

    def take(self, num_pages: int) -> Int32:
        pool = self.index.pool
        self.taken = pool.peek(num_pages).astype(np.int32)
        pool.take(num_pages)
        return self.taken

    def detach(self) -> None:
        """Keep the pages that were taken alone."""
        index = self.index
        index.pool.unuse(self.used)
        run, self.run, self.used = self.run, index.root, NO_VALUES
        index.unlock(run, used=False)

    def end(self, *, used: bool = False) -> None:
        """Release everything; `used`: count the path as used now."""
        pool = self.index.pool
        del self.index.transfers[self]
        pool.unuse(self.used)
        pool.put(self.taken)
        self.index.unlock(self.run, used=used)


@dataclass(eq=False, slots=True)
class Job:
    """Pages to copy: page ``sources[i]`` to ``targets[i]``. Call `Tiers.done` after the copies.

    Attributes:
        kind: ``"store"`` (device to host) or ``"load"`` (host to device).
        sources, targets: [n] int32 page ids.
        num_bytes: bytes of these pages.
        num_tokens: length of the prefix that becomes findable in the target.
        keys, first: keys of the chain, 32 bytes a segment; number of the first segment to copy.
        segments: [n, pages_per_segment] int32 target pages.
        points, depths: resume points of the source, and their boundaries in segments.
        point_pages: [m, pages_per_point] int32 target pages of these points.
        target, source: ends in both indexes; source is None once the job is void.
        contents: tokens of the segments, for events.
    """

    kind: Literal["store", "load"]
    sources: Int32
    targets: Int32
    num_bytes: int
    num_tokens: int
    keys: bytes = field(repr=False)
    first: int = field(repr=False)
    segments: Int32 = field(repr=False)
    points: list[ResumePoint] = field(repr=False)
    depths: list[int] = field(repr=False)
    point_pages: Int32 = field(repr=False)
    target: TransferEnd = field(repr=False)
    source: TransferEnd | None = field(repr=False)
    contents: list[SegmentContent] | None = field(default=None, repr=False)

    @property
    def first_key(self) -> bytes:
        """Key of the first segment to copy; empty for a resume point alone."""
        return self.keys[self.first * KEY_BYTES : (self.first + 1) * KEY_BYTES]

    @property
    def is_void(self) -> bool:
        """True if its content was forgotten after it began."""
        return self.source is None

    def adopt(self) -> tuple[int, int]:
        """Make entries of the target pages that are not cached meanwhile; returns the numbers of
        new segments and points."""
        end, first, pages = self.target, self.first, self.segments
        index, end.taken = end.index, NO_VALUES
        assert end.run.depth == first
        index.lock(end.run)
        new = self.keys[first * KEY_BYTES :]
        run, known = index.insert(end.run, new, lambda a, b: pages[a - first : b - first])
        if known:
            index.pool.put(pages[:known].ravel())
        if index.event_writer is not None and known < len(pages):
            before = self.keys[(first + known - 1) * KEY_BYTES : (first + known) * KEY_BYTES]
            assert self.contents is not None
            index.event_writer.adopted(
                new[known * KEY_BYTES :], self.contents[known:], before or None, first + known
            )
        are_new = [
            index.add_point(run, *p) is not None
            for p in zip(self.depths, self.point_pages, strict=True)
        ]
        if are_new:
            index.pool.hold(self.point_pages.ravel())
            index.pool.unhold(self.point_pages[~np.array(are_new)].ravel())
        if index.event_writer is not None:
            for depth, is_new in zip(self.depths, are_new, strict=True):
                if is_new:
                    index.event_writer.point(run_of(run, depth), depth)
        index.unlock(run)
        return len(pages) - known, sum(are_new)

    def void(self) -> None:
        """Forget the content. The target pages stay reserved, as copies still write them."""
        self.target.detach()
        self._end_source(used=False)

    def end(self, *, used: bool) -> None:
        """Release both ends; reserved pages that were not adopted become free."""
        if not self.is_void:
            self._end_source(used)
        self.target.end()

    def _end_source(self, used: bool) -> None:
        source, self.source = self.source, None
        assert source is not None
        source.end(used=used)
        for point in self.points:
            if point.run is not None and point not in source.index.pins:
                source.index.offer(point)


def begin_job(
    kind: Literal["store", "load"],
    source: PrefixIndex,
    target: PrefixIndex,
    run: Run,
    keys: bytes,
    points: Sequence[ResumePoint],
    page_bytes: int,
    alignment: int,
) -> Job | None:
    """Reserve target pages for the missing part of a chain that ends with `run`, and lock both.
    None without room in the target, and nothing has changed."""
    depth = len(keys) // KEY_BYTES
    there, first = target.find(keys, depth)
    dense = source.pages_between(run, first, depth)
    tails = np.array([point.pages for point in points], dtype=np.int32)
    pages, where = np.unique(tails, return_inverse=True)  # points may share window blocks
    sources = np.concatenate([dense.ravel(), pages[pages != 0]])
    source_end = TransferEnd(source, source.end_at(run, depth), tails.ravel())
    target_end = TransferEnd(target, target.end_at(there, first))
    has_room = False
    try:
        lacks = max(0, len(sources) - target.pool.num_free)
        if lacks <= target.num_evictable:
            target.evict(lacks)
            has_room = True
    finally:
        if not has_room:
            target_end.end()
            source_end.end()
    if not has_room:
        return None
    targets = target_end.take(len(sources))
    pages[pages != 0] = targets[dense.size :]
    return Job(
        kind, sources, targets, len(sources) * page_bytes, depth * alignment, keys, first,
        targets[: dense.size].reshape(dense.shape), [*points], [point.depth for point in points],
        pages[where].reshape(tails.shape), target_end, source_end,
    )  # fmt: skip
