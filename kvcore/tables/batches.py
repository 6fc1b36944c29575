"""Which batch a step is of: that of the last step again, or a new one, made of what the last knew.

A batch is new when a request came, went or was taken back, and after steps with chunks.
"""

from __future__ import annotations

import numpy as np

from ..arrays import NO_ROWS, ONE, ZERO, Int32, Int64, count_true
from ..spec import Layout
from .decode import DecodeBatch
from .drafts import DraftBatch
from .prefill import BlockTables
from .state import LIVE, StateTables, rows_of


class Batches:
    """The decode batch of the last step, which the next step may ask for again.

    Args:
        layout: the groups.
        array: [max_requests, num_columns] int32, the fused table.
        blocks, states: the classes of tables.
        most_drafts: tokens of each request in a step with drafts, at most (see `drafts`).

    Attributes:
        newest: that batch; None if the last step had no requests with one token, or drafts.
    """

    def __init__(
        self,
        layout: Layout,
        array: Int32,
        blocks: list[BlockTables],
        states: list[StateTables],
        most_drafts: int,
    ) -> None:
        self._layout, self._states, self.most_drafts = layout, states, most_drafts
        self._flat = array.reshape(-1)
        self.newest: DecodeBatch | None = None
        # Where in it each slot's request is; -1 for those that are not.
        self._row_of: Int64 = np.full(len(array), -1, dtype=np.int64)
        self._state_rows = rows_of(states)
        # First column, width and block size of each table: [num_tables, 1] all, ones for states.
        each: Int64 = np.ones((3, len(layout.tables), 1), dtype=np.int64)
        for b in blocks:
            each[0, b.spec.tables, 0] = b.first
            each[1, b.spec.tables], each[2, b.spec.tables] = b.spec.width, b.spec.block_size
        self._each = tuple(each)  # a tuple is unpacked in less time than an array

    def with_drafts(self, slots: Int64, start: Int64, counts: Int64) -> DraftBatch | None:
        """The requests of a step as a batch, if each computes as many tokens as the others, and few
        enough (see `drafts`)."""
        size = int(counts[0])
        if size > self.most_drafts or count_true(counts == size) < len(counts):
            return None
        batch = self.of(slots, start, size)
        return batch if isinstance(batch, DraftBatch) and batch.is_steady else None

    def of(self, slots: Int64, start: Int64, size: int = 1) -> DecodeBatch | None:
        """A batch of requests that are at `start` [n]: the newest, moved on, or made of it."""
        if not len(slots):
            return None
        old = self.newest
        if old is None:
            shape = len(self._layout.tables), len(slots)
            slots = slots.copy()
            last, live = np.empty(shape, dtype=np.int64), np.zeros(shape, dtype=np.int32)
            rows = np.arange(len(slots))
        elif old.is_of(slots):
            if old.size == size:
                return old
            slots, last, live, rows = old.slots, old.token_slots, old.state_pages, NO_ROWS
        else:
            slots = slots.copy()
            known = self._row_of[slots]
            last = old.token_slots.take(known, axis=1)
            live = old.state_pages.take(known, axis=1)
            rows = (known < ZERO).nonzero()[0]
        if rows.size:
            last[:, rows] = self._last_token_slots(slots[rows], start[rows])
            for state in self._states:
                live[state.spec.tables[:, None], rows] = state.table[slots[rows], :, LIVE].T
        states = live[self._state_rows]
        is_steady = np.count_nonzero(states) == states.size
        row_starts = slots * self._layout.num_columns
        kind = DecodeBatch if size == 1 else DraftBatch
        return kind(slots, start, last, live, is_steady, row_starts, self._layout.alignment, size)

    def _last_token_slots(self, slots: Int64, computed: Int64) -> Int64:
        """Slots of the tokens before positions `computed` [m]: [num_tables, m], one below the next
        slot in an open block.

        What it has in rows of states, and where a block starts, means nothing.
        """
        first, width, size = self._each
        pages = self._flat[slots * self._layout.num_columns + first + computed // size % width]
        last: Int64 = pages * size + (computed % size - ONE)
        return last

    def keep(self, batch: DecodeBatch | None) -> None:
        """Remember the batch of the last step."""
        if batch is not self.newest:
            self._forget()
            if batch is not None:
                self._row_of[batch.slots] = np.arange(len(batch.slots))
            self.newest = batch

    def _forget(self) -> None:
        if self.newest is not None:
            self._row_of[self.newest.slots] = -1
            self.newest = None

    def leave(self, slot: int) -> None:
        """The request of `slot` is not where the batch left it."""
        if self.newest is not None and self._row_of[slot] >= 0:
            self._row_of[slot] = -1
            self.newest.is_whole = False

    def check(self, num_computed: Int64) -> None:
        """Compare what the batch knows of its requests, of which slots have `num_computed` tokens,
        with the tables.

        Raises:
            AssertionError: they differ.
        """
        rows = (self._row_of >= 0).nonzero()[0]
        if self.newest is None:
            assert not rows.size, "rows of no batch"
            return
        batch, known = self.newest, self._row_of[rows]
        assert (batch.slots[known] == rows).all() and (
            batch.start[known] == num_computed[rows]
        ).all()
        assert len(rows) == len(batch.slots) or not batch.is_whole, "a request left unseen"
        is_open = batch.start[known] % self._each[2] > 0
        same = batch.token_slots[:, known] == self._last_token_slots(rows, batch.start[known])
        assert same[is_open].all(), "slots of the last tokens"
        for s in self._states:
            assert (batch.state_pages[s.spec.tables][:, known] == s.table[rows, :, LIVE].T).all()
