"""The page pool: free pages, and reference counts of window and state pages.

Dense pages have one owner (a request, or the index) and no count. Window and state pages have
`users` (requests) and `holds` (resume points): without both a page is free, with holds alone it is
evictable. Pages come back from rings and rejected drafts (`StepPlanner`), released requests
(`Tables`), duplicates (`Chains`), eviction (`PrefixIndex`), reservations and jobs of the host tier.
"""

from __future__ import annotations

import numpy as np

from .arrays import Int32, Int64
from .spec import NULL_BLOCK

ONE_HOLD = 1 << 32
NULL: Int64 = np.array(NULL_BLOCK)  # page 0, in the form that numpy compares fastest
# `PagePool.counts` of a page that nothing uses, and of one that one request reads and no resume
# point holds.
UNUSED: Int64 = np.array(0)
UNSHARED: Int64 = np.array(1)


class PagePool:
    """`num_pages` equal pages; page 0, the null page, is never free. Free pages form a stack.

    Attributes:
        users, holds: [num_pages] int32 requests that read a page, and resume points that hold it.
        counts: [num_pages] int64, both at once: users + (holds << 32).
        num_free: pages in the stack. num_held_only: pages that only resume points hold.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: Int64 = np.arange(num_pages - 1, -1, -1)
        self.num_free = num_pages - 1
        self.counts: Int64 = np.zeros(num_pages, dtype="<i8")
        self.users: Int32
        self.holds: Int32
        self.users, self.holds = self.counts.view("<i4").reshape(-1, 2).T
        self.users[NULL_BLOCK] = 1 << 30  # unused cells of tables name it
        self._mark: Int32 = np.empty(num_pages, dtype=np.int32)
        self.num_held_only = 0

    def peek(self, n: int) -> Int64:
        """The n pages that the next `take(n)` hands out, as a copy."""
        assert n <= self.num_free
        return self._stack[self.num_free - n : self.num_free].copy()

    def take(self, n: int) -> None:
        """Remove from the stack the n pages that `peek(n)` showed."""
        assert n <= self.num_free
        self.num_free -= n

    def pop(self, n: int) -> list[int]:
        assert n <= self.num_free
        self.num_free -= n
        pages: list[int] = self._stack[self.num_free : self.num_free + n].tolist()
        return pages

    def put(self, pages: Int32 | Int64) -> None:
        """Give pages back; none may be free already or have users or holds."""
        n = len(pages)
        self._stack[self.num_free : self.num_free + n] = pages
        self.num_free += n

    def use_held(self, pages: Int32) -> None:
        """Begin to use `pages` of resume points (repeats and the null page allowed)."""
        if not len(pages):
            return
        pages = pages[pages.nonzero()].astype(np.int64, copy=False)
        self.num_held_only -= len(self._once(pages[self.users[pages] == 0]))
        np.add.at(self.counts, pages, 1)

    def num_unused(self, pages: Int32) -> int:
        """Number of different `pages` that no request uses (repeats and the null page allowed)."""
        pages = pages[pages.nonzero()].astype(np.int64, copy=False)
        return len(self._once(pages[self.users[pages] == 0]))

    def use_new(self, pages: list[int]) -> None:
        """Begin to use a few newly taken `pages`, none of them null."""
        for page in pages:
            self.counts[page] = 1

    def unuse(self, pages: Int32 | Int64) -> None:
        """Stop using `pages` (repeats and the null page allowed: requests may share pages)."""
        if not len(pages):
            return
        pages = pages.astype(np.int64, copy=False)  # the quick index
        counts = self.counts[pages] - UNSHARED
        if not np.count_nonzero(counts):  # no other user and no hold
            self.counts[pages] = UNUSED
            return self.put(pages)
        users = counts.astype(np.int32)  # the low half
        if not np.count_nonzero(users):  # no other user, so none repeats
            self.counts[pages] = counts
        else:
            named = pages[pages.nonzero()]
            if len(named) < len(pages):
                return self.unuse(named)
            pages = self._unuse_shared(pages)
            counts = self.counts[pages]
        num_held = int(np.count_nonzero(counts))
        self.num_held_only += num_held
        if num_held < len(pages):
            self.put(pages[counts == 0] if num_held else pages)

    def _unuse_shared(self, pages: Int64) -> Int64:
        """Count `pages` down (repeats allowed); return those without users now, each once."""
        np.add.at(self.counts, pages, -1)
        return self._once(pages[self.users[pages] == 0])

    def _once(self, pages: Int64) -> Int64:
        order = np.arange(len(pages), dtype=np.int32)
        self._mark[pages] = order
        once: Int64 = pages[self._mark[pages] == order]
        return once

    def hold(self, pages: Int32) -> None:
        """Hold `pages` for resume points (repeats allowed: points of one chain overlap)."""
        pages = pages.astype(np.int64, copy=False)
        self.num_held_only += len(self._once(pages[self.counts[pages] == UNUSED]))
        np.add.at(self.counts, pages, ONE_HOLD)

    def unhold(self, pages: Int32) -> None:
        """Undo `hold` (repeats allowed)."""
        pages = pages.astype(np.int64, copy=False)
        np.add.at(self.counts, pages, -ONE_HOLD)
        idle = self._once(pages[self.counts[pages] == 0])
        self.num_held_only -= len(idle)
        self.put(idle)

    def free_pages(self) -> Int64:
        return self._stack[: self.num_free].copy()
