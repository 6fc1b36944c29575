"""Tables that only grow, a Python list for each request and group (`KVCache(append_only=True)`).

Entry i is block i and never gets another page; it becomes 0 when no query sees the block any more.
A request of 44 tokens, a dense group and a window of 20, blocks of 8:

    block          0    1    2    3    4    5
    dense        [ 3    7    8   11   15   20 ]
    window       [ 0    0   12   13   16   21 ]     `num_gone` 2: a resume point at 40 needs block 2

Plain ints serve one request at a time in a tenth of the time of arrays of one element.
"""

from __future__ import annotations

import numpy as np

from ..arguments import refusal
from ..arrays import Int32, Int64
from ..pages import PagePool
from ..spec import Layout
from .rows import ClassTables


class LinearTables:
    """The tables of all requests; the same calls as of `Tables` where `Chains` makes them.

    Attributes:
        pages: [slot][table] pages by block.
        num_gone: [slot][table] leading blocks without a page.
        room: [slot] tokens that have pages in all tables.

    Raises:
        ValueError: a state group, or a lookahead.
    """

    def __init__(self, layout: Layout, max_requests: int, pool: PagePool) -> None:
        for g in layout.groups:
            if g.kind == "state" or g.lookahead:
                expected = "dense and window groups with no lookahead where append_only=True"
                raise refusal("groups", expected, g)
        self.layout, self.pool = layout, pool
        self.states: list[ClassTables] = []
        self.snapshot_at: Int64 = np.zeros(max_requests, dtype=np.int64)
        n = len(layout.groups)
        self.pages: list[list[list[int]]] = [[[] for _ in range(n)] for _ in range(max_requests)]
        self.num_gone = [[0] * n for _ in range(max_requests)]
        self.room = [0] * max_requests
        self._sizes = [g.block_size for g in layout.groups]
        self._different_sizes = sorted(set(self._sizes))
        each = [(c, i, t) for c in layout.classes for i, t in enumerate(c.tables.tolist())]
        # (table, blocks of a segment, first column in a segment's pages)
        self._dense = [
            (t, c.per_segment, c.segment_offset + i * c.per_segment)
            for c, i, t in each
            if c.spec.kind == "dense"
        ]
        # (table, block size, tokens before a query that it sees, blocks of a tail and their column)
        self._windows = [
            (t, c.block_size, c.reach, c.tail, c.tail_offset + i * c.tail)
            for c, i, t in each
            if c.spec.kind == "window"
        ]
        self._window_tables = [t for t, *_ in self._windows]
        self._none = [0] * n

    # Blocks come and go.

    def lacking(self, slot: int, end: int) -> list[int]:
        """Blocks up to token `end` that each table of a request lacks."""
        if end <= self.room[slot]:
            return self._none
        each = zip(self._sizes, self.pages[slot], strict=True)
        return [max(0, -(-end // size) - len(table)) for size, table in each]

    def extend(self, slot: int, end: int, counts: list[int]) -> list[list[int]]:
        """Append `counts` free pages to the tables, up to token `end`; returns the new ones."""
        num, tables, at = sum(counts), self.pages[slot], 0
        if not num:
            return [[] for _ in tables]
        taken, given = self.pool.pop(num), []
        for table, n in zip(tables, counts, strict=True):
            new = taken[at : at + n]
            table += new
            given.append(new)
            at += n
        for t in self._window_tables:
            self.pool.use_new(given[t])
        self.room[slot] = min([-(-end // size) * size for size in self._different_sizes])
        return given

    def let_go(self, slot: int, oldest: int, cached: int | None) -> None:
        """Take window blocks that no query from token `oldest` on sees out of the tables. The tail
        of the boundary `cached` stays, as it may become a resume point (None: none)."""
        gone: list[int] = []
        for t, size, reach, tail, _ in self._windows:
            first = (oldest - reach) // size
            if cached is not None:
                first = min(first, cached // size - tail)
            old = self.num_gone[slot][t]
            if first > old:
                table = self.pages[slot][t]
                first = min(first, len(table))
                gone += table[old:first]
                table[old:first] = [0] * (first - old)
                self.num_gone[slot][t] = first
        if gone:
            self.pool.unuse(np.array(gone, dtype=np.int64))

    # What chains ask.

    def fill_dense(self, slot: int, first: int, pages: Int32) -> None:
        assert not first, "a page of these tables is never replaced"
        for t, per_segment, column in self._dense:
            self.pages[slot][t] = pages[:, column : column + per_segment].ravel().tolist()
        self.room[slot] = len(pages) * self.layout.alignment

    def load(self, slot: int, boundary: int, pages: Int32) -> None:
        self.pool.use_held(pages)
        tail = pages.tolist()
        for t, size, _, blocks, column in self._windows:
            stop = boundary // size
            gone = self.num_gone[slot][t] = max(0, stop - blocks)
            live = tail[column + max(0, blocks - stop) : column + blocks]
            self.pages[slot][t] = [0] * gone + live

    def segment_pages(self, slot: int, first: int, end: int) -> Int32:
        pages = np.empty((end - first, self.layout.pages_per_segment), dtype=np.int32)
        for t, per_segment, column in self._dense:
            blocks = self.pages[slot][t][first * per_segment : end * per_segment]
            pages[:, column : column + per_segment] = np.array(blocks).reshape(-1, per_segment)
        return pages

    def tail(self, slot: int, boundary: int) -> Int32 | None:
        """`Tables.tail`; None if some of its pages have left."""
        pages = np.zeros(self.layout.pages_per_point, dtype=np.int32)
        for t, size, _, tail, column in self._windows:
            stop = boundary // size
            low = max(0, stop - tail)
            if low < self.num_gone[slot][t]:
                return None
            pages[column + tail - (stop - low) : column + tail] = self.pages[slot][t][low:stop]
        return pages

    def release(self, slot: int, cached: int, computed: int) -> None:
        own, live = self.held(slot, cached)
        self.pool.put(np.array(own, dtype=np.int64))
        self.pool.unuse(np.array(live, dtype=np.int64))
        self.pages[slot] = [[] for _ in self._sizes]
        self.num_gone[slot] = [0] * len(self._sizes)
        self.room[slot] = 0

    def held(self, slot: int, cached: int) -> tuple[list[int], list[int]]:
        """(dense pages past `cached`, pages of windows) of a request."""
        segments = cached // self.layout.alignment
        own = [p for t, n, _ in self._dense for p in self.pages[slot][t][segments * n :]]
        return own, [p for t, *_ in self._windows for p in self.pages[slot][t] if p]
