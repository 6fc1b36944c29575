"""Decode batches: requests that compute one token each, step after step.

A step that asks for the next token of the same requests, in the same order, costs a few operations
on arrays of the whole batch: what it needs to know of its requests is carried on from the step
before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..arrays import NO_ROWS, ONE, ZERO, Int32, Int64, count_true, slice_of
from ..spec import Layout
from .prefill import BlockTables
from .state import LIVE, StateTables

if TYPE_CHECKING:
    from .decode import Calendar


class Ending(NamedTuple):
    """Requests of a batch that complete a segment in a step.

    Attributes:
        rows, slots: [m] where they are in the batch, and their slots. slot_list: these as ints.
        end: [m] tokens after the step.
    """

    rows: Int64
    slots: Int64
    slot_list: list[int]
    end: Int64


NOBODY = Ending(NO_ROWS, NO_ROWS, [], NO_ROWS)


class DecodeBatch:
    """Requests that compute one token each, or as many as the others, and go on doing so from step
    to step.

    Args:
        slots, start: [n] requests, and their tokens before the step.
        size: tokens that each computes in a step: one, or several, of which some may be rejected
            (see `drafts`).
        last_slots: [num_tables, n] slots of the tokens before these; anything in rows of states.
        state_pages: [num_tables, n] live pages of states, 0 where there are none yet; 0 in other
            rows.
        is_steady: whether all states have live pages.
        columns: [n] flat indices of the first entries of the requests' rows in the fused table.
        alignment: tokens of a segment.

    Attributes:
        counts: [n] `size` each. end: [n] tokens after the step, if none is rejected. longest: the
            largest.
        age: steps since the batch was made.
        tokens: `size`.
        row_of, steps: [n * size] of each token of a step, if there are several: which request's it
            is, and its number there, from 1 on.
        firsts, cu: [n] int64 and [n + 1] int32, where each request's tokens start.
        behind: [size, size] ones where a token (column) is not before another (row), else zeros.
        calendar: what changes in each step, once the batch has lasted a while.
        is_whole: False once a request has left, or gone back.
        quiet_until: age before which no request keeps a boundary.
    """

    def __init__(
        self,
        slots: Int64,
        start: Int64,
        size: int,
        last_slots: Int64,
        state_pages: Int32,
        is_steady: bool,
        columns: Int64,
        alignment: int,
    ) -> None:
        self.slots, self.size = slots, size
        self._key = slots.tobytes()
        self.counts: Int64 = np.full(len(slots), size, dtype=np.int64)
        self._same = self.counts.tobytes()
        self.tokens: Int64 = np.array(size)
        if size > 1:
            self.row_of: Int64 = np.arange(len(slots)).repeat(size)
            self.cu: Int32 = np.arange(0, len(self.row_of) + 1, size, dtype=np.int32)
            self.firsts: Int64 = self.cu[:-1].astype(np.int64)
            self.steps: Int64 = np.arange(1, len(self.row_of) + 1) - self.row_of * size
            self.behind: Int64 = np.tri(size, dtype=np.int64).T.copy()
        self.start, self.end = start, start + self.tokens
        self.longest = int(np.maximum.reduce(self.end))
        self.age = 0
        self.last_slots, self.state_pages, self.is_steady = last_slots, state_pages, is_steady
        self.is_whole = True
        self.columns = columns
        self.calendar: Calendar | None = None
        self.quiet_until = 0
        self._alignment = alignment
        self._segment: Int64 = np.array(alignment)
        self._closing: tuple[Int64, Int64, list[int], list[int]] | None = None
        self._ending: Ending | None = None

    def is_of(self, slots: Int64) -> bool:
        """Whether these are the batch's requests, in its order."""
        return self.is_whole and slots.tobytes() == self._key

    def is_again(self, slots: Int64, counts: Int64) -> bool:
        """Whether a step asks for the next tokens of the batch's requests, and nothing else."""
        return self.is_of(slots) and counts.tobytes() == self._same

    def take(self, end: Int64, last_slots: Int64) -> None:
        """Go to the step after one with drafts, which left each request `end` [n] tokens."""
        self.start, self.end, self.last_slots = end, end + self.tokens, last_slots
        self.longest = int(np.maximum.reduce(self.end))
        self.age += 1
        self._ending = None

    def advance(self, last_slots: Int64) -> None:
        """Go to the step after one of a token each."""
        self.start, self.end, self.last_slots = self.end, self.end + ONE, last_slots
        self.longest += 1
        self.age += 1
        self._ending = None

    @property
    def reaching(self) -> Int64:
        """Rows that may complete a segment in this step, which depends on the drafts that are
        rejected."""
        return (self.end % self._segment < self.tokens).nonzero()[0]

    @property
    def ending(self) -> Ending:
        """Who completes a segment in this step, if each request computes one token."""
        if self._ending is not None:
            return self._ending
        a = self._alignment
        if not self.age:
            rows = (self.end % a == ZERO).nonzero()[0]
            slots = self.slots[rows]
            self._ending = Ending(rows, slots, slots.tolist(), self.end[rows])
            return self._ending
        if self._closing is None:  # requests by when they do, and how many do before each step
            wait = (self.age - self.end) % a
            order = wait.argsort(kind="stable")
            bounds = np.bincount(wait, minlength=a).cumsum().tolist()
            slots = self.slots[order]
            self._closing = order, slots, slots.tolist(), [0, *bounds]
        order, slots, slot_list, bounds = self._closing
        step = self.age % a
        low, high = bounds[step], bounds[step + 1]
        self._ending = NOBODY
        if low < high:
            rows = order[low:high]
            self._ending = Ending(rows, slots[low:high], slot_list[low:high], self.end[rows])
        return self._ending


class Batches:
    """The decode batch of the last step, which the next step may ask for again.

    Args:
        layout: the groups.
        array: [max_requests, num_columns] int32, the fused table.
        blocks, states: the classes of tables.
        most_drafts: tokens of each request in a step with drafts, at most (see `drafts`).

    Attributes:
        newest: that batch; None if the last step had no requests with one token, or drafts.
        state_rows: rows of state tables in a slot mapping.
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
        rows = [t for t, (g, _) in enumerate(layout.tables) if layout.groups[g].kind == "state"]
        self.state_rows = slice_of(rows)
        # First column, width and block size of each table: [num_tables, 1] all, ones for states.
        each: Int64 = np.ones((3, len(layout.tables), 1), dtype=np.int64)
        for b in blocks:
            each[0, b.spec.tables, 0] = b.first
            each[1, b.spec.tables], each[2, b.spec.tables] = b.spec.width, b.spec.block_size
        self._each = tuple(each)  # which is quicker to take apart

    def again(self, slots: Int64, counts: Int64) -> DecodeBatch | None:
        """The decode batch of the last step, moved on, if `slots`, `counts` [n] ask for just
        that."""
        batch = self.newest
        return batch if batch is not None and batch.is_again(slots, counts) else None

    def with_drafts(self, slots: Int64, start: Int64, counts: Int64) -> DecodeBatch | None:
        """The requests of a step as a batch, if each computes as many tokens as the others, and few
        enough (see `drafts`)."""
        size = int(counts[0])
        if size > self.most_drafts or count_true(counts == size) < len(counts):
            return None
        batch = self.of(slots, start, size)
        return batch if batch is not None and batch.is_steady else None

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
            slots, last, live, rows = old.slots, old.last_slots, old.state_pages, NO_ROWS
        else:
            slots = slots.copy()
            known = self._row_of[slots]
            last = old.last_slots.take(known, axis=1)
            live = old.state_pages.take(known, axis=1)
            rows = (known < ZERO).nonzero()[0]
        if rows.size:
            last[:, rows] = self._last_slots(slots[rows], start[rows])
            for state in self._states:
                live[state.spec.tables[:, None], rows] = state.table[slots[rows], :, LIVE].T
        states = live[self.state_rows]
        is_steady = np.count_nonzero(states) == states.size
        columns = slots * self._layout.num_columns
        return DecodeBatch(
            slots, start, size, last, live, is_steady, columns, self._layout.alignment
        )

    def _last_slots(self, slots: Int64, computed: Int64) -> Int64:
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
        same = batch.last_slots[:, known] == self._last_slots(rows, batch.start[known])
        assert same[is_open].all(), "slots of the last tokens"
        for s in self._states:
            assert (batch.state_pages[s.spec.tables][:, known] == s.table[rows, :, LIVE].T).all()
