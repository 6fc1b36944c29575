"""The two ends of a transfer: the entries and pages that an open job keeps in each index.

A job is not a request: it has no slot and no tables. In an index it locks a path, so that nothing
on it is evicted; it reads pages of resume points; and it takes free pages, which the copies fill.
`TransferEnd.adopt` then makes entries of these:

    segments        0   1   2 | 3   4   5        a job that brings segments 3 to 5 and the resume
    resume points             3           6      point at 6 locks the path to the end of segment 2
    locked          =========
    taken                       --------- --
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import NO_VALUES, Int32
from ..event_writer import SegmentContent
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import Run, run_of


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
        """Make entries of taken pages. Segments and resume points that were cached meanwhile keep
        their pages, and the new pages are free again.

        Args:
            keys: of segments [0, first + n), 32 bytes each; the locked path has [0, first).
            pages: [n, pages_per_segment] taken pages of segments [first, first + n).
            depths: those of resume points, at most first + n.
            points: [len(depths), pages_per_point] their taken pages; points may share some.
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
