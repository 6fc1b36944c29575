"""The decode fast path: one token for each request of a batch, for all tables at once.

A step that asks for the next token of the same requests in the same order (`DecodeBatch`) costs a
few operations on arrays of the whole batch: what it needs to know of them is carried on from the
step before. It changes a table entry only where a request starts a block or, in a state table,
completes a segment, of which a snapshot is due. All else is one addition: the slot of a token is
the one after the slot of the token before it (`DecodeBatch.last_slots`).

Each request changes the same entries every `alignment` steps, so that a batch that lasts gets a
*decode calendar* of them. Alignment 8; a dense table in blocks of 4 tokens, a window table in
blocks of 2, a state table; request a has 5 tokens, request b 6, as the batch starts:

    step                0    1    2    3    4    5    6    7
    position of a       5    6    7    8    9    10   11   12
    position of b       6    7    8    9    10   11   12   13
    dense  (p % 4 = 0)  .    .    b    a    .    .    b    a
    window (p % 2 = 0)  b    a    b    a    b    a    b    a
    state  (p % 8 = 7)  .    b    a    .    .    .    .    .

The calendar has one list of entries, sorted by step: [b | a b | b b a | a a | b | a | b b | a a].
Step 2 takes the third slice (dense b, window b, state a), as do steps 10, 18 and so on, in the
columns of later blocks:

    plan     new pages   dense b takes one in any case; window b and the snapshot of a are written
                         over, unless a resume point or another request has the page
    fill     slots       a: last slot + 1; b: page * block_size, the first row of its new block
    commit   entries     the pages are put at the flat indices of the slice, the old ones let go,
                         and the last slots become those of this step

Without a calendar (a batch is new, or would need a large one) `_due_now` finds the same entries
from the positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..arrays import INT32, INT64, NO_FLAGS, NO_ROWS, ONE, ZERO, Int32, Int64, count_true
from ..pages import NULL, UNSHARED, PagePool
from .prefill import BlockTables
from .state import LIVE, NO_COPIES, SNAPSHOT, StateTables, rows_of

# Steps after which a batch gets a calendar: about those in which that saves what it costs.
SETTLED = 16
MOST_ENTRIES = 1 << 18  # of a calendar; each takes 48 bytes
NOWHERE: Int64 = np.array(-1)  # in a slot mapping: not written


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
    """Requests that compute one token each, and go on doing so from step to step.

    Args:
        slots, start: [n] requests, and their tokens before the step.
        last_slots: [num_tables, n] slots of the tokens before these; anything in rows of states.
        state_pages: [num_tables, n] live pages of states, 0 where there are none yet; 0 in other
            rows.
        is_steady: whether all states have live pages.
        columns: [n] flat indices of the first entries of the requests' rows in the fused table.
        alignment: tokens of a segment.
        size: tokens that each computes in a step: one, or several in `drafts.DraftBatch`.

    Attributes:
        counts: [n] `size` each. end: [n] tokens after the step. longest: the largest.
        age: steps since the batch was made.
        calendar: what changes in each step, once the batch has lasted a while.
        is_whole: False once a request has left, or gone back.
        quiet_until: age before which no request keeps a boundary.
    """

    def __init__(
        self,
        slots: Int64,
        start: Int64,
        last_slots: Int64,
        state_pages: Int32,
        is_steady: bool,
        columns: Int64,
        alignment: int,
        size: int = 1,
    ) -> None:
        self.slots, self.size = slots, size
        self._key = slots.tobytes()
        self.counts: Int64 = np.full(len(slots), size, dtype=np.int64)
        self._same = self.counts.tobytes()
        self.start, self.end = start, start + self.counts
        self.longest = int(np.maximum.reduce(self.end))
        self.age = 0
        self.last_slots, self.state_pages, self.is_steady = last_slots, state_pages, is_steady
        self.is_whole = True
        self.columns = columns
        self.calendar: Calendar | None = None
        self.quiet_until = 0
        self.alignment = alignment
        self._closing: tuple[Int64, Int64, list[int], list[int]] | None = None
        self._ending: Ending | None = None

    def is_of(self, slots: Int64) -> bool:
        """Whether these are the batch's requests, in its order."""
        return self.is_whole and slots.tobytes() == self._key

    def is_again(self, slots: Int64, counts: Int64) -> bool:
        """Whether a step asks for the next tokens of the batch's requests, and nothing else."""
        return self.is_of(slots) and counts.tobytes() == self._same

    def advance(self, last_slots: Int64) -> None:
        """Go to the next step."""
        self.start, self.end, self.last_slots = self.end, self.end + ONE, last_slots
        self.longest += 1
        self.age += 1
        self._ending = None

    @property
    def ending(self) -> Ending:
        """Who completes a segment in this step."""
        if self._ending is not None:
            return self._ending
        a = self.alignment
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


class Part(NamedTuple):
    """Entries of one class of tables that change in decode steps.

    Attributes:
        tables: [k] rows of its tables in a slot mapping. first: [k] first columns of their entries
            in the fused table.
        width: entries of a table, which are used in turns.
        period, at: a request at position p changes an entry where ``p % period == at``.
        block_size: rows of a page.
    """

    tables: Int64
    first: Int64
    width: int
    period: int
    at: int
    block_size: int


class Decode:
    """Plan of a decode step: the entries that change, part by part, and their pages.

    Args:
        batch: whose step it is.
        entries: three vectors [m]: indices, in the fused table; outputs, indices in a slot mapping
            [num_tables, n] of the table and the request; block_sizes, rows of a page.
        num_dense, num_always_new, num_blocks: entries of dense tables, those that take a new page
            in any case, and those of blocks.

    Attributes:
        start, end: [n] tokens before and after the step. num_new: pages needed.
        pages: [m] pages in the entries; once new ones are given, those. is_new: which entries from
            `num_always_new` on take new ones.
        new_pages, slot_mapping: once they are given, the new pages and [num_tables, n] the slots
            of the tokens.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        entries: tuple[Int64, Int64, Int64],
        num_dense: int,
        num_always_new: int,
        num_blocks: int,
    ) -> None:
        self.batch, self.start, self.end = batch, batch.start, batch.end
        self.indices, self.outputs, self.block_sizes = entries
        self.num_dense, self.num_always_new = num_dense, num_always_new
        self.num_blocks, self.num_new = num_blocks, num_always_new
        self.pages = self.new_pages = self.slot_mapping = NO_ROWS
        self.is_new = NO_FLAGS


class Calendar:
    """Entries that change in each step of a batch; every `alignment` steps all come round.

    Args:
        parts: which entries there are. cuts: how many of them are those of `Decode.num_dense`,
            `num_always_new`, `num_blocks`.
    """

    def __init__(self, parts: list[Part], cuts: list[int], batch: DecodeBatch) -> None:
        origin, alignment = batch.start - batch.age, batch.alignment
        n, num_parts, rows = len(origin), len(parts), np.arange(len(origin))[:, None]
        turns = [alignment // p.period for p in parts]  # of each part, in `alignment` steps
        sizes = [n * t * len(p.tables) for t, p in zip(turns, parts, strict=True)]
        total = sum(sizes)
        # Two bytes are sorted several times as fast as eight.
        keys = np.empty(total, np.uint16 if alignment * num_parts < 1 << 16 else np.int64)
        blocks = np.empty(total, dtype=np.int32)
        columns, outputs = np.empty((2, total), dtype=np.int64)
        counts = np.empty((alignment, num_parts), dtype=np.int64)  # entries of each step and part
        stop = 0
        for i, part in enumerate(parts):
            start, stop = stop, stop + sizes[i]
            shape = n, turns[i], len(part.tables)
            wait = (part.at - origin) % part.period
            counts[:, i] = np.tile(np.bincount(wait, minlength=part.period) * shape[2], turns[i])
            turn = np.arange(turns[i])
            steps = wait[:, None] + turn * part.period
            first = (origin + wait) // part.period
            keys[start:stop].reshape(shape)[:] = (steps * num_parts + i)[:, :, None]
            blocks[start:stop].reshape(shape)[:] = (first[:, None] + turn)[:, :, None]
            columns[start:stop].reshape(shape)[:] = (batch.columns[:, None] + part.first)[:, None]
            outputs[start:stop].reshape(shape)[:] = (rows + part.tables * n)[:, None]
        order = keys.argsort(kind="stable")
        self._blocks, self._columns, self._outputs = blocks[order], columns[order], outputs[order]
        part_of = np.tile(np.arange(num_parts), alignment).repeat(counts.ravel())
        self._turns = np.array(turns, dtype=np.int32)[part_of]
        self._widths = np.array([p.width for p in parts], dtype=np.int32)[part_of]
        self._sizes = np.array([p.block_size for p in parts])[part_of]
        until = np.zeros((alignment, num_parts + 1), dtype=np.int64)
        counts.cumsum(axis=1, out=until[:, 1:])
        ends = until[:, -1].cumsum()
        bounds = np.stack([ends - until[:, -1], ends, *until[:, cuts].T], axis=1)
        self._steps: list[list[int]] = bounds.tolist()
        self._alignment, self._number, self._indices = alignment, -1, self._columns

    def due(self, batch: DecodeBatch, snapshots: bool) -> Decode:
        """What changes in the step that `batch` is at."""
        number, step = divmod(batch.age, self._alignment)
        if number != self._number:
            self._number = number
            self._indices = self._columns + (self._blocks + number * self._turns) % self._widths
        low, high, *cuts = self._steps[step]
        if not snapshots:
            high = low + cuts[-1]
        due = slice(low, high)
        return Decode(batch, (self._indices[due], self._outputs[due], self._sizes[due]), *cuts)


class DecodeTables:
    """Decode steps of all tables.

    A dense table, and a window's ring so long that it gives pages back, take a new page for each
    block. Other rings keep all their pages, and snapshots theirs: they are written over, unless a
    resume point or another request has the page.

    Args:
        array: [max_requests, num_columns] int32, the fused table.
        blocks, states: the classes of tables. alignment: tokens of a segment. pool: the pages.
        snapshot_at: [max_requests] boundary of each request's newest snapshot.
        deltas: where changes of the fused table go (see `rows`); None if nobody takes them.
    """

    def __init__(
        self,
        array: Int32,
        blocks: list[BlockTables],
        states: list[StateTables],
        alignment: int,
        pool: PagePool,
        snapshot_at: Int64,
        deltas: list[tuple[Int64, Int32]] | None,
    ) -> None:
        self.pool, self._snapshot_at, self._deltas = pool, snapshot_at, deltas
        self._flat = array.reshape(-1)
        assert SNAPSHOT == LIVE + 1  # a live page and its snapshot are neighbours
        self._pairs = sliding_window_view(self._flat, 2)
        dense = [b for b in blocks if not b.is_window]
        self._windows = [b for b in blocks if b.is_window and not b.recycles]
        rings = [b for b in blocks if b.recycles]
        self._parts = [
            Part(b.spec.tables, b.first, b.spec.width, b.spec.block_size, 0, b.spec.block_size)
            for b in [*dense, *self._windows, *rings]
        ]
        self._parts += [
            Part(s.spec.tables, s.first + SNAPSHOT, 1, alignment, alignment - 1, 0) for s in states
        ]
        # The same of each table, part by part.
        each = [
            (first, table, p.width, p.period, p.block_size)
            for p in self._parts
            for first, table in zip(p.first, p.tables, strict=True)
        ]
        self._each: Int64 = np.array(each, dtype=np.int64).T.copy()
        self._every = np.arange(len(each))
        self._state_rows = rows_of(states)
        self._cuts = [len(dense), len(dense) + len(self._windows), len(blocks)]
        self._per_request = sum(len(p.tables) * (alignment // p.period) for p in self._parts)

    def plan(self, batch: DecodeBatch, snapshots: bool) -> Decode:
        """What the requests of `batch` need; of states only the snapshots, if these are wanted.

        Nothing changes but the batch, which may get its calendar.
        """
        plan = self._due(batch, snapshots)
        fixed = plan.num_always_new
        if len(plan.indices) > fixed:
            plan.pages = self._flat[plan.indices].astype(INT64)
            plan.is_new = self.pool.counts[plan.pages[fixed:]] != UNSHARED
            plan.num_new += count_true(plan.is_new)
        return plan

    def _due(self, batch: DecodeBatch, snapshots: bool) -> Decode:
        if batch.calendar is None:
            if batch.age < SETTLED or len(batch.slots) * self._per_request > MOST_ENTRIES:
                return self._due_now(batch, snapshots)
            batch.calendar = Calendar(self._parts, self._cuts, batch)
        return batch.calendar.due(batch, snapshots)

    def _due_now(self, batch: DecodeBatch, snapshots: bool) -> Decode:
        due, counts, ends = [NO_ROWS], [], [0]
        for part in self._parts if snapshots else self._parts[: self._cuts[-1]]:
            rows = (batch.start % part.period == part.at).nonzero()[0]
            due += [rows] * len(part.tables)
            counts += [len(rows)] * len(part.tables)
            ends.append(ends[-1] + len(rows) * len(part.tables))
        rows, table = np.concatenate(due), self._every[: len(counts)].repeat(counts)
        first, tables, widths, periods, sizes = self._each.take(table, axis=1)
        indices = batch.columns[rows] + first + batch.start[rows] // periods % widths
        dense, always_new, blocks = (ends[i] for i in self._cuts)
        entries = indices, tables * len(batch.slots) + rows, sizes
        return Decode(batch, entries, dense, always_new, blocks)

    def fill(self, plan: Decode, new_pages: Int64) -> Int64:
        """Give `new_pages` [num_new] to the plan; returns the slot mapping [num_tables, n]."""
        slots: Int64 = plan.batch.last_slots + ONE
        slots[self._state_rows] = NOWHERE
        fixed, n = plan.num_always_new, plan.num_blocks
        plan.new_pages, plan.slot_mapping = new_pages, slots
        if plan.num_new == len(plan.indices):
            plan.pages = new_pages
        else:
            plan.pages[:fixed] = new_pages[:fixed]
            if plan.num_new > fixed:
                plan.pages[fixed:][plan.is_new] = new_pages[fixed:]
        if n:
            slots.ravel()[plan.outputs[:n]] = plan.pages[:n] * plan.block_sizes[:n]
        return slots

    def commit(self, plan: Decode) -> Int32:
        """Make the plan real, and move its batch on.

        Returns:
            [m, 2] pages to copy after the step: from live states to the snapshots that are due.
        """
        batch, copies = plan.batch, NO_COPIES
        if plan.num_new:
            self._put_pages(plan)
        if len(plan.indices) > plan.num_blocks:
            self._snapshot_at[batch.ending.slots] = batch.ending.end
            copies = self._pairs[plan.indices[plan.num_blocks :] - ONE]
        batch.advance(plan.slot_mapping)
        return copies

    def _put_pages(self, plan: Decode) -> None:
        """Put the new pages into their entries, and let the old ones go."""
        batch, fixed = plan.batch, plan.num_always_new
        indices, pages = plan.indices[:fixed], plan.new_pages
        for block in self._windows:
            rows = (batch.start % block.spec.block_size == 0).nonzero()[0]
            block.drop_behind(batch.slots[rows], batch.start[rows] // block.spec.block_size)
        if plan.num_new > fixed:
            replaced = self._flat[plan.indices[fixed:][plan.is_new]]
            self.pool.unuse(replaced[replaced != NULL])
            indices, pages = plan.indices, plan.pages
        if plan.num_new > plan.num_dense:
            self.pool.counts[plan.new_pages[plan.num_dense :]] = UNSHARED
        self._flat[indices] = values = pages.astype(INT32)
        if self._deltas is not None:
            self._deltas.append((indices, values))
