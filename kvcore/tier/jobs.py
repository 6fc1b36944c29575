"""Jobs: part of a chain to copy from one pool to the other.

A store and a load differ only in direction. Source and target index each have a `TransferEnd` until
the job ends:

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
from ..prefix.tree import ResumePoint, Run
from .ends import TransferEnd


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
