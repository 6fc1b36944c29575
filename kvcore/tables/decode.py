"""Decode steps: one token for each request of a batch, planned and committed for all tables at once.

Such a step changes a table entry only where a request starts a block or, in a state table, completes a segment, of which a
snapshot is due. Each request does so every so many steps. A batch that stays the same gets a calendar of the entries that
change in each of the next `alignment` steps, over and over; a step is then a few operations on slices of it, however many
groups there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..pages import NULL, UNSHARED, PagePool
from ..spec import INT32, INT64, Int32, Int64, count_true
from .prefill import NO_ROWS, ZERO, BlockTables
from .state import LIVE, SNAPSHOT, StateTables

ONE: Int64 = np.array(1)
NO_VALUES: Int32 = np.empty(0, dtype=np.int32)
SETTLED = (
    16  # steps after which a batch gets a calendar: about those in which that saves what it costs
)
MOST_ENTRIES = 1 << 18  # of a calendar; each takes 48 bytes


NO_FLAGS: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)


class Part:
    """Entries of one class of tables that change in decode steps.

    Attributes:
        tables: [k] rows of its tables in a slot mapping. first: [k] first columns of their entries in the fused table.
        width: entries of a table, which are used in turns.
        period, at: a request at position p changes an entry where ``p % period == at``.
        block_size: rows of a page.
    """

    def __init__(
        self, tables: Int64, first: Int64, width: int, period: int, at: int, block_size: int
    ) -> None:
        self.tables, self.first, self.width = tables, first, width
        self.period, self.at, self.block_size = period, at, block_size


@dataclass(slots=True, eq=False)
class Decode:
    """Plan of a decode step: the entries that change, part by part, and their pages.

    Attributes:
        places: [m] flat indices in the fused table.
        outputs: [m] flat indices in a slot mapping [num_tables, n]: of the table and the request.
        block_sizes: [m] rows of a page.
        num_dense, num_fresh, num_blocks: entries of dense tables, those that take a new page in any case, and those of blocks.
        pages: [m] pages in the entries; once new ones are given, those. is_new: which entries from `num_fresh` on take new ones.
        num_new: pages needed. fresh: these, once they are given.
    """

    places: Int64
    outputs: Int64
    block_sizes: Int64
    num_dense: int
    num_fresh: int
    num_blocks: int
    pages: Int64
    is_new: npt.NDArray[np.bool_]
    num_new: int
    fresh: Int64


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


class Calendar:
    """Entries that change in each step of a batch.

    Args:
        parts: which entries there are. cuts: how many of them are those of `Decode.num_dense`, `num_fresh`, `num_blocks`.
        origin: [n] positions of the batch's first step.
        columns_of: [n] flat indices of the first entries of the requests' rows in the fused table.
        alignment: steps in which every part comes round.
    """

    def __init__(
        self, parts: list[Part], cuts: list[int], origin: Int64, columns_of: Int64, alignment: int
    ) -> None:
        n, num_parts = len(origin), len(parts)
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
            rows = np.arange(n)
            keys[start:stop].reshape(shape)[:] = (steps * num_parts + i)[:, :, None]
            blocks[start:stop].reshape(shape)[:] = (first[:, None] + turn)[:, :, None]
            columns[start:stop].reshape(shape)[:] = (columns_of[:, None] + part.first)[:, None]
            outputs[start:stop].reshape(shape)[:] = (rows[:, None] + part.tables * n)[:, None]
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
        self._alignment = alignment
        self._number, self._places = -1, self._columns

    def due(self, age: int, snapshots: bool) -> Decode:
        """What changes `age` steps after the batch's first."""
        number, step = divmod(age, self._alignment)
        if number != self._number:
            self._number = number
            self._places = self._columns + (self._blocks + number * self._turns) % self._widths
        low, high, dense, fresh, blocks = self._steps[step]
        if not snapshots:
            high = low + blocks
        return Decode(
            self._places[low:high], self._outputs[low:high], self._sizes[low:high], dense, fresh, blocks,
            NO_ROWS, NO_FLAGS, fresh, NO_ROWS,
        )  # fmt: skip


class DecodeBatch:
    """Requests that compute one token each, or as many as the others, and go on doing so from step to step.

    Args:
        slots, start: [n] requests, and their tokens before the step.
        size: tokens that each computes in a step: one, or several, of which some may be rejected (see `drafts`).
        last_slots: [num_tables, n] slots of the tokens before these; anything in rows of states.
        state_pages: [num_tables, n] live pages of states, 0 where there are none yet; 0 in other rows.
        is_steady: whether all states have live pages.
        columns: [n] flat indices of the first entries of the requests' rows in the fused table.
        alignment: tokens of a segment.

    Attributes:
        counts: [n] `size` each. end: [n] tokens after the step, if none is rejected. longest: the largest.
        age: steps since the batch was made.
        tokens: `size`.
        row_of, steps: [n * size] of each token of a step, if there are several: which request's it is, and its number there, from 1 on.
        firsts, cu: [n] int64 and [n + 1] int32, where each request's tokens start.
        behind: [size, size] ones where a token (column) is not before another (row), else zeros.
        calendar: what changes in each step, once the batch has lasted a while.
        is_whole: False once a request has left, or gone back.
        quiet_until: age before which no request keeps a boundary.
    """

    def __init__(
        self, slots: Int64, start: Int64, size: int, last_slots: Int64, state_pages: Int32, is_steady: bool,
        columns: Int64, alignment: int,
    ) -> None:  # fmt: skip
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
        """Rows that may complete a segment in this step, which depends on the drafts that are rejected."""
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


class DecodeTables:
    """Decode steps of all tables.

    A dense table, and a window's ring so long that it gives pages back, take a new page for each block. Other rings keep all
    their pages, and snapshots theirs: they are written over, unless a resume point or another request has the page.

    Args:
        array: [max_requests, num_columns] int32, the fused table.
        blocks, states: the classes of tables. alignment: tokens of a segment. pool: the pages.
    """

    def __init__(
        self, array: Int32, blocks: list[BlockTables], states: list[StateTables], alignment: int, pool: PagePool
    ) -> None:  # fmt: skip
        self.pool = pool
        self._flat = array.reshape(-1)
        # A live page and its snapshot are neighbours.
        assert SNAPSHOT == LIVE + 1
        self._pairs = sliding_window_view(self._flat, 2)
        self._alignment = alignment
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
            (p.first[j], p.tables[j], p.width, p.period, p.block_size)
            for p in self._parts
            for j in range(len(p.tables))
        ]
        self._each: Int64 = np.array(each, dtype=np.int64).T.copy()
        self._every = np.arange(len(each))
        self._cuts = [len(dense), len(dense) + len(self._windows), len(blocks)]
        self._per_request = sum(len(p.tables) * (alignment // p.period) for p in self._parts)

    def plan(self, batch: DecodeBatch, snapshots: bool) -> Decode:
        """What the requests of `batch` need; of states only the snapshots, if these are wanted."""
        plan = self._due(batch, snapshots)
        fixed = plan.num_fresh
        if len(plan.places) > fixed:
            plan.pages = self._flat[plan.places].astype(INT64)
            plan.is_new = self.pool.counts[plan.pages[fixed:]] != UNSHARED
            plan.num_new += count_true(plan.is_new)
        return plan

    def _due(self, batch: DecodeBatch, snapshots: bool) -> Decode:
        if batch.calendar is None:
            if batch.age < SETTLED or len(batch.slots) * self._per_request > MOST_ENTRIES:
                return self._due_now(batch, snapshots)
            origin = batch.start - batch.age
            batch.calendar = Calendar(
                self._parts, self._cuts, origin, batch.columns, self._alignment
            )
        return batch.calendar.due(batch.age, snapshots)

    def _due_now(self, batch: DecodeBatch, snapshots: bool) -> Decode:
        due, counts, ends = [NO_ROWS], [], [0]
        for part in self._parts if snapshots else self._parts[: self._cuts[-1]]:
            rows = (batch.start % part.period == part.at).nonzero()[0]
            due += [rows] * len(part.tables)
            counts += [len(rows)] * len(part.tables)
            ends.append(ends[-1] + len(rows) * len(part.tables))
        dense, fresh, blocks = (ends[i] for i in self._cuts)
        rows, table = np.concatenate(due), self._every[: len(counts)].repeat(counts)
        first, tables, widths, periods, sizes = self._each.take(table, axis=1)
        places = batch.columns[rows] + first + batch.start[rows] // periods % widths
        return Decode(
            places, tables * len(batch.slots) + rows, sizes, dense, fresh, blocks, NO_ROWS, NO_FLAGS, fresh,
            NO_ROWS,
        )  # fmt: skip

    def fill(self, plan: Decode, fresh: Int64, slots: Int64) -> None:
        """Give `fresh` pages [num_new] to the plan, and write the slots of the blocks' first rows into `slots` [num_tables, n]."""
        fixed, n = plan.num_fresh, plan.num_blocks
        plan.fresh = fresh
        if plan.num_new == len(plan.places):
            plan.pages = fresh
        else:
            plan.pages[:fixed] = fresh[:fixed]
            if plan.num_new > fixed:
                plan.pages[fixed:][plan.is_new] = fresh[fixed:]
        if n:
            slots.ravel()[plan.outputs[:n]] = plan.pages[:n] * plan.block_sizes[:n]

    def commit(self, plan: Decode, batch: DecodeBatch) -> tuple[Int64, Int32]:
        """Make the plan real; returns the entries that changed and their pages."""
        fixed = plan.num_fresh
        places, pages = plan.places[:fixed], plan.fresh
        if not plan.num_new:
            return places, NO_VALUES
        for block in self._windows:
            rows = (batch.start % block.spec.block_size == 0).nonzero()[0]
            block.drop_behind(batch.slots[rows], batch.start[rows] // block.spec.block_size)
        if plan.num_new > fixed:
            replaced = self._flat[plan.places[fixed:][plan.is_new]]
            self.pool.unuse(replaced[replaced != NULL])
            places, pages = plan.places, plan.pages
        if plan.num_new > plan.num_dense:
            self.pool.counts[plan.fresh[plan.num_dense :]] = UNSHARED
        values = pages.astype(INT32)
        self._flat[places] = values
        return places, values

    def snapshots(self, plan: Decode) -> Int32:
        """Pages to copy after a committed step [m, 2]: from live states to the snapshots that are due."""
        copies: Int32 = self._pairs[plan.places[plan.num_blocks :] - ONE]
        return copies

    def demand(self, plan: Decode, num_tables: int, num_requests: int) -> list[int]:
        """Pages that each table needs."""
        fixed = plan.num_fresh
        outputs = np.concatenate([plan.outputs[:fixed], plan.outputs[fixed:][plan.is_new]])
        found: list[int] = np.bincount(outputs // num_requests, minlength=num_tables).tolist()
        return found
