"""Prefill chunks: tables of the dense or window groups of one spec, for all requests at once.

A *chunk* is what a request computes in a step if it is more than one token: a prefill chunk, or
uneven speculative tokens (`decode` has the requests with one token, `drafts` those with the same
few). A dense group gets pages for all of its new blocks, a window group only for the blocks that
outlive the chunk: those that the next query can still see, and the tails of boundaries that
retention keeps. All other rows get slot -1 and are never written.

*Survivors-only pages*: a chunk [0, 160) of a window of 33 tokens in blocks of 16. A query at 160
sees the 32 tokens before it, blocks 8 and 9. Retention keeps the boundaries 64, 128 and 160, whose
tails are the two blocks before them:

    tokens      0    16   32   48   64   80   96   112  128  144  160
    block       | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  | 8  | 9  |
    kept for              [   64    ]         [   128   ][   160  ]
    page          -    -   new  new   -    -   new  new  new  new

Six pages instead of ten. What the ring does not need after the chunk (blocks 2, 3, 6 and 7), only
resume points hold: it is evictable. Where the queries of the step read its own rows from pages too
(`KVCache(reads="pages")`), all ten blocks get pages, and the other four are free after the commit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import ZERO, Int32, Int64, ragged_arange
from ..pages import PagePool
from ..spec import GroupClass

FEW = 8  # boundaries of a chunk that are planned one by one


@dataclass
class Chunk:
    """Plan of one class for requests that compute several tokens: the blocks that are written."""

    first: Int64  # [n] block in which each request's tokens start
    span: int  # blocks that the longest of them reaches
    rows: Int64  # [m] request of each block, ascending
    blocks: Int64  # [m] block number, ascending within a request
    is_new: npt.NDArray[np.bool_]  # [m] the block needs a page (else it is the open block)
    num_new: int  # how many are
    pages: Int32 | Int64 | None = None  # [m, num_tables]
    num_left: int = 0  # new pages that no ring took

    @property
    def is_one(self) -> bool:
        """Whether all blocks are neighbours, if they are of one request."""
        n = len(self.blocks)
        return n > 0 and int(self.blocks[-1]) - int(self.blocks[0]) == n - 1


class BlockTables:
    """Tables and open pages of the dense or window groups of one spec.

    Args:
        spec: the class.
        tables: [max_requests, num_columns] int32, the fused table; this class owns a slice of it.
        alignment: tokens of one segment.
        lookahead: tokens past a boundary that the key of its segment covers.
        pool: the pages.
    """

    def __init__(
        self,
        spec: GroupClass,
        tables: Int32,
        alignment: int,
        lookahead: int,
        pool: PagePool,
    ) -> None:
        self.spec = spec
        self.alignment = alignment
        self.lookahead = lookahead
        self.is_window = spec.spec.kind == "window"
        self.pool = pool
        k = spec.num_tables
        columns = tables[:, spec.offset : spec.offset + spec.num_columns]
        self.table = columns.reshape(len(tables), k, spec.width)
        assert np.shares_memory(self.table, tables)
        # One flat index an entry: several times quicker than three, and what a device copy is told.
        self._flat = tables.reshape(-1)
        self._row = tables.shape[1]
        self.first = spec.offset + np.arange(k) * spec.width
        self._size: Int64 = np.array(spec.block_size)
        self._within = np.arange(spec.block_size)

    # Tables.

    def indices(self, slots: Int64, blocks: Int64) -> Int64:
        """Flat indices in the fused table of `blocks` [m] of `slots` [m]: [m, k]."""
        indices: Int64 = (slots * self._row + blocks % self.spec.width)[:, None] + self.first
        return indices

    def write(self, slots: Int64, blocks: Int64, pages: Int32 | Int64) -> Int64:
        """Set the table entries of `blocks` [m] of `slots` [m]; returns their flat indices [m,
        k]."""
        indices = self.indices(slots, blocks)
        self._flat[indices] = pages
        return indices

    def pages(self, slots: Int64, blocks: Int64) -> Int32:
        """Pages of `blocks` [m] of `slots` [m]: [m, k]."""
        return self._flat[self.indices(slots, blocks)]

    def read(self, slots: Int64, blocks: Int64) -> Int32:
        """Pages of `blocks` [m, j] of `slots` [m]: [m, k, j]; 0 for blocks before the sequence."""
        columns = (slots * self._row)[:, None] + blocks % self.spec.width
        pages: Int32 = self._flat[columns[:, None, :] + self.first[:, None]]
        if np.count_nonzero(blocks < 0):
            pages[np.broadcast_to(blocks[:, None, :] < 0, pages.shape)] = 0
        return pages

    def drop(self, slots: Int64, blocks: Int64) -> None:
        """Let go of the pages of `blocks` [m] of `slots` [m] of windows, which leave the table."""
        indices = self.indices(slots, blocks)
        self.pool.unuse(self._flat[indices].ravel())
        self._flat[indices] = 0

    # Chunk steps.

    def plan_chunk(self, start: Int64, end: Int64, kept_rows: Int64, kept: Int64) -> Chunk:
        """Which blocks of [start, end) are written.

        Args:
            start, end: [n] tokens that were written before, and after the step.
            kept_rows, kept: requests and boundaries in (start, end] whose tails must survive,
                sorted.
        """
        if len(start) == 1 and len(kept) <= FEW:
            return self._plan_one(int(start[0]), int(end[0]), kept.tolist())
        spec, size = self.spec, self.spec.block_size
        first, stop = start // size, -(-end // size)
        low = first
        if not spec.holds_all:
            low = np.maximum(first, np.maximum(0, end - spec.reach) // size)
            before = (kept // size - spec.tail < low[kept_rows]).nonzero()[0]
            kept_rows, kept = kept_rows[before], kept[before]
        if spec.holds_all or not kept.size:
            rows, blocks = ragged_arange(low, np.maximum(stop - low, ZERO))
        else:
            tails = kept // size
            rows = np.concatenate([kept_rows, np.arange(len(start))])
            lows = np.concatenate([np.maximum(tails - spec.tail, first[kept_rows]), low])
            highs = np.concatenate([tails, stop])
            if len(start) > 1:
                order = np.lexsort((highs, rows))
                rows, lows, highs = rows[order], lows[order], highs[order]
            # Intervals of a request ascend; each one starts where those before it stopped.
            lows = np.minimum(lows, low[rows])
            lows[1:] = np.where(rows[1:] == rows[:-1], np.maximum(lows[1:], highs[:-1]), lows[1:])
            which, blocks = ragged_arange(lows, np.maximum(highs - lows, 0))
            rows = rows[which]
        is_new = blocks * size >= start[rows]
        span = int((stop - first).max())
        return Chunk(first, span, rows, blocks, is_new, int(np.count_nonzero(is_new)))

    def _plan_one(self, start: int, end: int, kept: list[int]) -> Chunk:
        """`plan_chunk` of one request."""
        spec, size = self.spec, self.spec.block_size
        first, stop = start // size, -(-end // size)
        at, parts = first, []
        if not spec.holds_all:
            low = max(first, max(0, end - spec.reach) // size)
            for boundary in kept:
                tail = boundary // size
                if tail - spec.tail < low:
                    parts.append(np.arange(max(at, tail - spec.tail), tail))
                    at = max(at, tail)
            at = max(at, low)
        blocks = np.arange(at, stop)
        if parts:
            blocks = np.concatenate([*parts, blocks])
        num_new = len(blocks)
        is_new = np.ones(num_new, dtype=np.bool_)
        if start % size and num_new and blocks[0] == first:
            is_new[0] = False
            num_new -= 1
        rows = np.zeros(len(blocks), dtype=np.int64)
        return Chunk(np.array([first]), stop - first, rows, blocks, is_new, num_new)

    def fill_chunk(
        self, plan: Chunk, slots: Int64, start: Int64, offset: Int64, end: Int64, new_pages: Int64
    ) -> tuple[Int64 | slice, Int64]:
        """Give `new_pages` to the plan.

        Args:
            offset: [n] index of each request's first token among the step's tokens.

        Returns:
            (indices of the tokens whose rows are written, their slots [k, t]).
        """
        size, rows = self.spec.block_size, plan.rows
        plan.num_left = len(new_pages)
        new_pages = new_pages.reshape(-1, self.spec.num_tables)
        if plan.num_new == len(plan.blocks):
            plan.pages = new_pages
        else:
            plan.pages = self.pages(slots[rows], plan.blocks)
            plan.pages[plan.is_new] = new_pages
        if len(start) == 1 and plan.is_one:
            begin, first, stop = int(start[0]), int(plan.blocks[0]) * size, int(end[0])
            skipped = max(0, begin - first)
            slots_of = (plan.pages.T * self._size)[:, :, None] + self._within
            where = slots_of.reshape(self.spec.num_tables, -1)[:, skipped : stop - first]
            token = int(offset[0]) + first + skipped - begin
            return slice(token, token + where.shape[1]), where
        low = np.maximum(plan.blocks * size, start[rows])
        high = np.minimum((plan.blocks + 1) * size, end[rows])
        # Where a block's rows would be if its tokens were numbered like the step's.
        base = (
            plan.pages * np.int64(size) + (start[rows] - offset[rows] - plan.blocks * size)[:, None]
        )
        which, tokens = ragged_arange(offset[rows] + low - start[rows], high - low)
        return tokens, base.T[:, which] + tokens

    def commit_dense(
        self, plan: Chunk, slots: Int64, end: Int64, planned: Int64
    ) -> tuple[Int64, Int64, Int32 | Int64]:
        """Make the plan's blocks up to `end` [n], of `planned` [n] tokens, the request's own; free
        the others.

        Returns:
            (requests' rows [m], blocks [m], pages [m, k]) of the table changes.
        """
        rows, blocks, pages = plan.rows, plan.blocks, plan.pages
        assert pages is not None
        if end is not planned and np.count_nonzero(end < planned):
            kept = blocks * self.spec.block_size < end[rows]
            self.pool.put(pages[plan.is_new & ~kept].ravel())
            rows, blocks, pages = rows[kept], blocks[kept], pages[kept]
        if len(slots) > 1:
            self.write(slots[rows], blocks, pages)
        elif len(blocks):
            first = int(blocks[0])
            self.table[int(slots[0]), :, first : first + len(blocks)] = pages.T
        return rows, blocks, pages

    def strip(self, plan: Chunk, slots: Int64, end: Int64, kept: Int64) -> tuple[Int32, Int64]:
        """Pages of a window's blocks before and in the chunk: those of the rings at `end` [n], and
        tails of boundaries `kept` [m].

        To be asked before `commit_window`: the blocks before the chunk are those in the ring.

        Returns:
            ([n, k, j], [n] each request's block in the first column).
        """
        assert plan.pages is not None
        width = self.spec.width
        if len(slots) == 1:
            return self._strip_one(plan, slots, int(end[0]), kept)
        strip = np.zeros((len(slots), self.spec.num_tables, width - 1 + plan.span), dtype=np.int32)
        oldest = plan.first - (width - 1)
        strip[:, :, :width] = self.read(slots, oldest[:, None] + np.arange(width))
        strip[plan.rows, :, plan.blocks - oldest[plan.rows]] = plan.pages
        return strip, oldest

    def _strip_one(self, plan: Chunk, slots: Int64, end: int, kept: Int64) -> tuple[Int32, Int64]:
        """`strip` of one request: a chunk longer than the ring needs nothing of it."""
        assert plan.pages is not None
        size, width, first = self.spec.block_size, self.spec.width, int(plan.first[0])
        base = (end - 1) // size - (width - 1)
        if kept.size:
            base = min(base, int(kept[0]) // size - self.spec.tail)
        strip = np.zeros((1, self.spec.num_tables, first + plan.span - base), dtype=np.int32)
        if base < first:
            before = np.arange(base, first)
            strip[:, :, : first - base] = self.read(slots, before[None, :])
        at = int(plan.blocks.searchsorted(base))
        columns: Int64 | slice = plan.blocks[at:] - base
        if plan.is_one:
            columns = slice(int(plan.blocks[at]) - base, None)
        strip[0][:, columns] = plan.pages[at:].T
        return strip, np.array([base])

    def tails(self, strip: Int32, base: Int64, rows: Int64, boundaries: Int64) -> Int32:
        """Pages of the tails of `boundaries` [m] of the requests `rows` [m] of a strip: [m, k,
        tail]."""
        lows = boundaries // self.spec.block_size - self.spec.tail - base[rows]
        return _windows(strip, rows, lows, self.spec.tail)

    def commit_window(
        self, plan: Chunk, strip: Int32, base: Int64, slots: Int64, end: Int64, planned: Int64
    ) -> tuple[Int64, Int32, Int32]:
        """Turn the rings to `end` [n], of `planned` [n] tokens whose survivors were written.

        Args:
            strip, base: from `strip`.

        Returns:
            (flat indices, pages) of the table changes, and the pages that left the rings: the
            caller calls `pool.unuse` on them once resume points hold what they need.
        """
        if len(slots) == 1:
            return self._turn_one(
                plan, strip[0], int(base[0]), int(slots[0]), int(end[0]), int(planned[0])
            )
        spec, size, width = self.spec, self.spec.block_size, self.spec.width
        oldest = (end - 1) // size - (width - 1)
        blocks = oldest[:, None] + np.arange(width)  # [n, width]
        live = blocks >= (np.maximum(0, planned - spec.reach) // size)[:, None]
        # The last boundary stays resumable, and the last one whose segment has its key.
        for known in {0, self.lookahead}:
            tail_end = ((end - known) // self.alignment * spec.per_segment)[:, None]
            live |= (blocks < tail_end) & (blocks >= tail_end - spec.tail)
        live &= blocks >= 0
        every = np.arange(len(slots))
        pages = _windows(strip, every, oldest - base, width)
        pages *= live[:, None, :]
        columns = (slots * self._row)[:, None] + blocks % width
        indices = columns[:, None, :] + self.first[:, None]
        old = self._flat[indices]
        changed = old != pages
        indices, new, gone = indices[changed], pages[changed], old[changed]
        plan.num_left -= self.pool.use_new(new)
        self._flat[indices] = new
        return indices, new, gone[gone != 0]

    def _turn_one(
        self, plan: Chunk, strip: Int32, base: int, slot: int, end: int, planned: int
    ) -> tuple[Int64, Int32, Int32]:
        """`commit_window` of one request; of its `strip` [k, j], from block `base` on, it
        overwrites what it lets go."""
        spec, size, width = self.spec, self.spec.block_size, self.spec.width
        oldest = (end - 1) // size - (width - 1)
        pages = strip[:, oldest - base : oldest - base + width]
        live = [(max(0, planned - spec.reach) // size, oldest + width)]
        for known in {0, self.lookahead}:
            stop = (end - known) // self.alignment * spec.per_segment
            live.append((stop - spec.tail, stop))
        at = oldest
        for low, high in sorted(live):
            if low > at:
                pages[:, at - oldest : low - oldest] = 0
            at = max(at, high)
        start = slot * self._row + spec.offset
        ring = self._flat[start : start + spec.num_columns]
        old, cut = ring.copy(), oldest % width
        turned = ring.reshape(-1, width)
        turned[:, cut:], turned[:, :cut] = pages[:, : width - cut], pages[:, width - cut :]
        indices = (ring != old).nonzero()[0]
        new, gone = ring[indices], old[indices]
        plan.num_left -= self.pool.use_new(new)
        return indices + start, new, gone[gone != 0]


def _windows(strip: Int32, rows: Int64, columns: Int64, size: int) -> Int32:
    """``strip[rows[i], :, columns[i] : columns[i] + size]`` for each i, as one array [m, k,
    size]."""
    if len(rows) == 1:
        first = int(columns[0])
        return strip[rows, :, first : first + size]
    n, k, j = strip.shape
    row, part, one = strip.strides
    views = np.lib.stride_tricks.as_strided(
        strip, (n, k, j - size + 1, size), (row, part, one, one)
    )
    windows: Int32 = views[rows, :, columns]
    return windows
