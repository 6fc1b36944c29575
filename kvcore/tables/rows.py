"""The fused table, and what happens to the row of one request: a hit, a rollback, a release."""

from __future__ import annotations

import numpy as np

from ..arrays import Int32, Int64
from ..pages import UNSHARED, PagePool
from ..spec import NULL_BLOCK, Layout
from .batches import Batches
from .decode import recycles
from .drafts import DraftTables
from .prefill import BlockTables
from .state import LIVE, SNAPSHOT, StateTables


class RowTables:
    """Block tables of every group, side by side in one array.

    Args:
        layout: the groups.
        max_requests: rows.
        pool: the pages.
        track_deltas: collect changes.

    Attributes:
        array: [max_requests, num_columns] int32, all tables side by side.
        snapshot_at: [max_requests] int64 boundary of each request's newest state snapshot, 0 for
            none.
        blocks: tables of dense and window groups. dense, windows: those of one kind.
        states: tables of state groups.
        drafts: steps with drafts of all of them.
        batches: the decode batch of the last step.
        deltas: (flat indices, pages) of entries that changed since `KVCache.take_deltas`; None if
            they are not tracked.
    """

    def __init__(
        self, layout: Layout, max_requests: int, pool: PagePool, track_deltas: bool
    ) -> None:
        self.layout = layout
        self.pool = pool
        self.array: Int32 = np.zeros((max_requests, layout.num_columns), dtype=np.int32)
        self.snapshot_at: Int64 = np.zeros(max_requests, dtype=np.int64)
        self.blocks = [
            BlockTables(c, self.array, layout.alignment, layout.lookahead, pool)
            for c in layout.classes
            if c.spec.kind != "state"
        ]
        self.dense = [b for b in self.blocks if not b.is_window]
        self.windows = [b for b in self.blocks if b.is_window]
        self.states = [
            StateTables(c, self.array, layout.alignment, pool)
            for c in layout.classes
            if c.spec.kind == "state"
        ]
        self.drafts = DraftTables(
            self.array, self.blocks, self.states, layout.alignment, layout.drafts, pool
        )
        self.batches = Batches(layout, self.array, self.blocks, self.states, self.drafts.most)
        self.deltas: list[tuple[Int64, Int32]] | None = [] if track_deltas else None

    def is_steady(self, slot: int) -> bool:
        """Whether the states of a request have live pages."""
        states = self.states  # which get them in the same step
        return not states or states[0].table.item(slot, 0, LIVE) != NULL_BLOCK

    def needed_by_few(self, slot: int, start: int, num: int, snapshots: bool) -> int:
        """Pages that a request needs for one token, or for drafts, from `start` on, as a decode
        step or one with drafts gives them out.

        Args:
            num: at most `DraftTables.most`. snapshots: whether states are kept at boundaries.
        """
        need, counts = 0, self.pool.counts
        for block in self.blocks:
            spec = block.spec
            if -start % spec.block_size < num:
                if num == 1 and block.is_window and recycles(block):
                    old = block.table[slot, :, start // spec.block_size % spec.width]
                    need += int(np.count_nonzero(counts[old] != UNSHARED))
                else:
                    need += spec.num_tables
        if snapshots and (start + num) % self.layout.alignment < num:
            for state in self.states:
                old = state.table[slot, :, SNAPSHOT]
                need += int(np.count_nonzero(counts[old] != UNSHARED))
        return need

    def load(self, slot: int, boundary: int, pages: Int32) -> None:
        """A hit: the request starts at `boundary` with the resume point's `pages`
        [pages_per_point]."""
        self.pool.use(pages[pages != 0])
        for block in self.windows:
            c = block.spec
            blocks = boundary // c.block_size - np.arange(c.tail, 0, -1)
            valid = blocks >= 0
            where = np.full(int(valid.sum()), slot)
            part = pages[c.tail_offset : c.tail_offset + c.num_tables * c.tail]
            part = part.reshape(c.num_tables, c.tail).T[valid]
            self._delta(block.write(where, blocks[valid], part), part)
        for state in self.states:
            c = state.spec
            state.table[slot, :, SNAPSHOT] = pages[c.tail_offset : c.tail_offset + c.num_tables]
        self.snapshot_at[slot] = boundary

    def tail(self, slot: int, boundary: int) -> Int32:
        """Pages of the tail of `boundary`, which the rings of `slot` still have:
        [pages_per_point]."""
        tails = np.zeros((1, self.layout.pages_per_point), dtype=np.int32)
        slots = np.array([slot])
        for block in self.windows:
            c = block.spec
            blocks = boundary // c.block_size - np.arange(c.tail, 0, -1)
            self._put_tail(tails, block, block.read(slots, blocks[None, :]))
        for state in self.states:
            self._put_tail(tails, state, state.table[slots, :, SNAPSHOT, None])
        row: Int32 = tails[0]
        return row

    def _put_tail(self, tails: Int32, part: BlockTables | StateTables, pages: Int32) -> None:
        """Put the tail pages [m, k, tail] of one class into their columns of `tails`."""
        c = part.spec
        size = c.num_tables * c.tail
        tails[:, c.tail_offset : c.tail_offset + size] = pages.reshape(len(tails), size)

    def segment_pages(self, slot: int, first: int, end: int) -> Int32:
        """Dense pages of the segments [first, end) of a request: [end - first,
        pages_per_segment]."""
        pages = np.empty((end - first, self.layout.pages_per_segment), dtype=np.int32)
        for block in self.dense:
            c = block.spec
            part = block.table[slot, :, first * c.per_segment : end * c.per_segment]
            part = part.reshape(c.num_tables, end - first, c.per_segment).transpose(1, 0, 2)
            columns = slice(c.segment_offset, c.segment_offset + c.num_tables * c.per_segment)
            pages[:, columns] = part.reshape(end - first, -1)
        return pages

    def fill_dense(self, slot: int, first: int, pages: Int32) -> None:
        """Set the dense entries of segments from `first` on to `pages` [n, pages_per_segment]."""
        for block in self.dense:
            c = block.spec
            part = pages[:, c.segment_offset : c.segment_offset + c.num_tables * c.per_segment]
            part = part.reshape(len(pages), c.num_tables, c.per_segment).transpose(0, 2, 1)
            part = part.reshape(-1, c.num_tables)
            blocks = first * c.per_segment + np.arange(len(part))
            where = np.full(len(part), slot)
            self._delta(block.write(where, blocks, part), part)

    def shrink(self, slot: int, old: int, new: int) -> None:
        """Forget the tokens [new, old) of a request; they are in no cached segment."""
        slots = np.array([slot])
        if self.snapshot_at[slot] > new:  # its page holds the state of tokens that are taken back
            self.snapshot_at[slot] = 0
        for block in self.blocks:
            size = block.spec.block_size
            blocks = np.arange(-(-new // size), -(-old // size))
            if len(blocks):
                pages = block.read(slots, blocks[None, :]).ravel()
                if block.is_window:
                    self.pool.unuse(pages)
                else:
                    self.pool.put(pages)
                block.write(np.repeat(slots, len(blocks)), blocks, np.zeros(1, np.int32))
        self.batches.leave(slot)

    def release(self, slot: int, cached: int, computed: int) -> None:
        """Empty the row of a request, whose tokens past `cached` are its own."""
        for block in self.dense:
            size = block.spec.block_size
            own = block.table[slot, :, cached // size : -(-computed // size)]
            self.pool.put(own.ravel())
            block.table[slot, :, : -(-max(cached, computed) // size)] = 0
        for table in [b.table for b in self.windows] + [s.table for s in self.states]:
            pages = table[slot].ravel()
            self.pool.unuse(pages[pages.nonzero()])
            table[slot] = 0
        self.snapshot_at[slot] = 0
        self.batches.leave(slot)

    def _delta(self, indices: Int64, pages: Int32 | Int64 | None) -> None:
        if self.deltas is not None and pages is not None and pages.size:
            self.deltas.append((indices.ravel(), pages.ravel().astype(np.int32)))
