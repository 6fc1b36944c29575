"""Jobs: part of a chain to copy from one pool to the other.

A store and a load differ only in direction. Source and target index each have a `TransferEnd` until
the job ends: it locks a path, so that nothing on it is evicted, reads pages of resume points, and
takes the free pages that the copies fill.

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
    """Locked path, pages in use and pages taken of one index, for one transfer.

    Args:
        index: source or target of the transfer.
        run: where the locked path ends.
        used: pages of resume points that are read (repeats and the null page allowed).

    Attributes:
        taken: [n] int32 pages that are in no entry, see `take`.
    """

    def __init__(self, index: PrefixIndex, run: Run, used: Int32 = NO_VALUES) -> None:
        self.index, self.run, self.used = index, run, used
        self.taken: Int32 = NO_VALUES
        index.lock(run)
        index.pool.use_held(used)
        index.transfers[self] = None

    def take(self, num_pages: int) -> Int32:
        """Take free pages; returns them."""
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
        """Release everything; `used`: the path counts as used now."""
        pool = self.index.pool
        del self.index.transfers[self]
        pool.unuse(self.used)
        pool.put(self.taken)
        self.index.unlock(self.run, used=used)

    def adopt(
        self,
        keys: bytes,
        first: int,
        pages: Int32,
        depths: Sequence[int] = (),
        points: Int32 = NO_VALUES,
        contents: Sequence[SegmentContent] | None = None,
    ) -> tuple[int, list[int]]:
        """Make entries of taken pages; those that were cached meanwhile keep theirs.

        Args:
            keys: of segments [0, first + n), 32 bytes each; the locked path has [0, first).
            pages: [n, pages_per_segment] taken pages of segments [first, first + n).
                depths, points: of resume points, at most first + n, and [len(depths),
            pages_per_point] their
                taken pages; points may share some.
            contents: [n] of the segments, for events.

        Returns:
            (segments that were not there, depths of the resume points that were not).
        """
        index = self.index
        assert self.run.depth == first
        index.lock(self.run)
        new = keys[first * KEY_BYTES :]

        def source(begin: int, end: int) -> Int32:
            return pages[begin - first : end - first]

        end, known = index.insert(self.run, new, source)
        if known:
            index.pool.put(pages[:known].ravel())
        if index.event_writer is not None and known < len(pages):
            before = keys[(first + known - 1) * KEY_BYTES : (first + known) * KEY_BYTES]
            new_contents = None if contents is None else contents[known:]
            index.event_writer.adopted(
                new[known * KEY_BYTES :], new_contents, before or None, first + known
            )
        are_new = [index.add_point(end, d, point) for d, point in zip(depths, points, strict=True)]
        added = [d for d, is_new in zip(depths, are_new, strict=True) if is_new]
        if are_new:
            index.pool.hold(points.ravel())
            if len(added) < len(depths):
                index.pool.unhold(points[~np.array(are_new)].ravel())
        if index.event_writer is not None:
            for d in added:
                index.event_writer.point(run_of(end, d), d)
        index.unlock(end)
        return len(pages) - known, added


@dataclass(eq=False, slots=True)
class Job:
    """Pages to copy: page ``sources[i]`` to ``targets[i]``. Call `Tiers.done` after the copies.

    Attributes:
        kind: ``"store"`` (device to host) or ``"load"`` (host to device).
        sources, targets: [n] int32 page ids.
        num_bytes: bytes of these pages.
        num_tokens: length of the prefix that becomes findable in the target.
    """

    kind: Literal["store", "load"]
    sources: Int32
    targets: Int32
    num_bytes: int
    num_tokens: int
    transfer: Transfer = field(repr=False)


@dataclass(eq=False, slots=True)
class Transfer:
    """Entries under way from one index to the other.

    Attributes:
        keys: keys of the chain up to its last segment, 32 bytes each.
        first: number of the first segment to copy.
        segments: [n, pages_per_segment] int32 target pages.
        points, depths: resume points of the source, and their boundaries in segments.
        point_pages: [m, pages_per_point] int32 target pages of these points.
        target, source: end in each index; source is None once the transfer is void.
        contents: tokens of the segments, for events.
    """

    keys: bytes
    first: int
    segments: Int32
    points: list[ResumePoint]
    depths: list[int]
    point_pages: Int32
    target: TransferEnd
    source: TransferEnd | None
    contents: list[SegmentContent] | None = None

    @classmethod
    def begin(
        cls,
        source: PrefixIndex,
        target: PrefixIndex,
        run: Run,
        keys: bytes,
        points: Sequence[ResumePoint],
    ) -> tuple[Transfer, Int32, Int32] | None:
        """Reserve target pages for the missing part of a chain that ends with `run`, and lock it at
        both ends. Returns (transfer, source pages, target pages), or None without room in the
        target: nothing has changed then. Errors of the target's policy are raised.
        """
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
        segments = targets[: dense.size].reshape(dense.shape)
        pages[pages != 0] = targets[dense.size :]
        point_pages = pages[where].reshape(tails.shape)
        transfer = cls(
            keys, first, segments, [*points], [point.depth for point in points], point_pages,
            target_end, source_end,
        )  # fmt: skip
        return transfer, sources, targets

    @property
    def depth(self) -> int:
        """Segments of the chain."""
        return len(self.keys) // KEY_BYTES

    @property
    def first_key(self) -> bytes:
        """Key of the first segment to copy; empty for a resume point alone."""
        return self.keys[self.first * KEY_BYTES : (self.first + 1) * KEY_BYTES]

    @property
    def is_void(self) -> bool:
        """True if its content was forgotten after it began."""
        return self.source is None

    def adopt(self) -> tuple[int, int]:
        """Make entries of the target pages; return the numbers of new segments and points."""
        self.target.taken = NO_VALUES
        segments, added = self.target.adopt(
            self.keys, self.first, self.segments, self.depths, self.point_pages, self.contents
        )
        return segments, len(added)

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
