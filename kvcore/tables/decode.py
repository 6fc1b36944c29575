"""The decode fast path: one token for each request of a batch, for all tables at once.

Such a step changes a table entry only where a request starts a block or, in a state table,
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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..arrays import INT32, INT64, NO_FLAGS, NO_ROWS, NO_VALUES, ONE, Int32, Int64, count_true
from ..pages import NULL, UNSHARED, PagePool
from .batch import DecodeBatch
from .prefill import BlockTables
from .state import LIVE, SNAPSHOT, StateTables

# Steps after which a batch gets a calendar: about those in which that saves what it costs.
SETTLED = 16
MOST_ENTRIES = 1 << 18  # of a calendar; each takes 48 bytes


class Part:
    """Entries of one class of tables that change in decode steps.

    Attributes:
        tables: [k] rows of its tables in a slot mapping. first: [k] first columns of their entries
            in the fused table.
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
        indices: [m] flat indices in the fused table.
        outputs: [m] flat indices in a slot mapping [num_tables, n]: of the table and the request.
        block_sizes: [m] rows of a page.
        num_dense, num_always_new, num_blocks: entries of dense tables, those that take a new page
            in any case, and those of blocks.
        pages: [m] pages in the entries; once new ones are given, those. is_new: which entries from
            `num_always_new` on take new ones.
        num_new: pages needed. new_pages: these, once they are given.
    """

    indices: Int64
    outputs: Int64
    block_sizes: Int64
    num_dense: int
    num_always_new: int
    num_blocks: int
    pages: Int64
    is_new: npt.NDArray[np.bool_]
    num_new: int
    new_pages: Int64


class Calendar:
    """Entries that change in each step of a batch.

    Args:
        parts: which entries there are. cuts: how many of them are those of `Decode.num_dense`,
            `num_always_new`, `num_blocks`.
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
        self._number, self._indices = -1, self._columns

    def due(self, age: int, snapshots: bool) -> Decode:
        """What changes `age` steps after the batch's first."""
        number, step = divmod(age, self._alignment)
        if number != self._number:
            self._number = number
            self._indices = self._columns + (self._blocks + number * self._turns) % self._widths
        low, high, dense, always_new, blocks = self._steps[step]
        if not snapshots:
            high = low + blocks
        return Decode(
            self._indices[low:high],
            self._outputs[low:high],
            self._sizes[low:high],
            dense,
            always_new,
            blocks,
            NO_ROWS,
            NO_FLAGS,
            always_new,
            NO_ROWS,
        )


class DecodeTables:
    """Decode steps of all tables.

    A dense table, and a window's ring so long that it gives pages back, take a new page for each
    block. Other rings keep all their pages, and snapshots theirs: they are written over, unless a
    resume point or another request has the page.

    Args:
        array: [max_requests, num_columns] int32, the fused table.
        blocks, states: the classes of tables. alignment: tokens of a segment. pool: the pages.
    """

    def __init__(
        self,
        array: Int32,
        blocks: list[BlockTables],
        states: list[StateTables],
        alignment: int,
        pool: PagePool,
    ) -> None:
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
        dense, always_new, blocks = (ends[i] for i in self._cuts)
        rows, table = np.concatenate(due), self._every[: len(counts)].repeat(counts)
        first, tables, widths, periods, sizes = self._each.take(table, axis=1)
        indices = batch.columns[rows] + first + batch.start[rows] // periods % widths
        return Decode(
            indices,
            tables * len(batch.slots) + rows,
            sizes,
            dense,
            always_new,
            blocks,
            NO_ROWS,
            NO_FLAGS,
            always_new,
            NO_ROWS,
        )

    def fill(self, plan: Decode, new_pages: Int64, slots: Int64) -> None:
        """Give `new_pages` [num_new] to the plan, and write the slots of the blocks' first rows
        into `slots` [num_tables, n]."""
        fixed, n = plan.num_always_new, plan.num_blocks
        plan.new_pages = new_pages
        if plan.num_new == len(plan.indices):
            plan.pages = new_pages
        else:
            plan.pages[:fixed] = new_pages[:fixed]
            if plan.num_new > fixed:
                plan.pages[fixed:][plan.is_new] = new_pages[fixed:]
        if n:
            slots.ravel()[plan.outputs[:n]] = plan.pages[:n] * plan.block_sizes[:n]

    def commit(self, plan: Decode, batch: DecodeBatch) -> tuple[Int64, Int32]:
        """Make the plan real; returns the entries that changed and their pages."""
        fixed = plan.num_always_new
        indices, pages = plan.indices[:fixed], plan.new_pages
        if not plan.num_new:
            return indices, NO_VALUES
        for block in self._windows:
            rows = (batch.start % block.spec.block_size == 0).nonzero()[0]
            block.drop_behind(batch.slots[rows], batch.start[rows] // block.spec.block_size)
        if plan.num_new > fixed:
            replaced = self._flat[plan.indices[fixed:][plan.is_new]]
            self.pool.unuse(replaced[replaced != NULL])
            indices, pages = plan.indices, plan.pages
        if plan.num_new > plan.num_dense:
            self.pool.counts[plan.new_pages[plan.num_dense :]] = UNSHARED
        values = pages.astype(INT32)
        self._flat[indices] = values
        return indices, values

    def snapshots(self, plan: Decode) -> Int32:
        """Pages to copy after a committed step [m, 2]: from live states to the snapshots that are
        due."""
        copies: Int32 = self._pairs[plan.indices[plan.num_blocks :] - ONE]
        return copies

    def demand(self, plan: Decode, num_tables: int, num_requests: int) -> list[int]:
        """Pages that each table needs."""
        fixed = plan.num_always_new
        outputs = np.concatenate([plan.outputs[:fixed], plan.outputs[fixed:][plan.is_new]])
        found: list[int] = np.bincount(outputs // num_requests, minlength=num_tables).tolist()
        return found
