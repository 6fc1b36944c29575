"""The decode fast path: one token for each request of a batch, for all tables at once.

A step that asks for the next token of the same requests in the same order (`DecodeBatch`) costs a
few operations on arrays of the whole batch. For most requests it is one addition: the *slot* of a
token (page * block_size + row) is the one after the slot of the token before it. A table entry
changes only where a request starts a block or, in a state table, completes a segment:

    plan     `DecodeTables._due`    which entries of the tables change (`DecodeChanges`), and how
                                    many new pages they need
    fill     slots of the tokens    last slot + 1; where a block starts page * block_size; the
                                    tables stay as they are, so a new page is in no table yet
    commit   the entries            the new pages are put there, the old ones let go, and the slots
                                    of this step become the last ones

Which page a block gets (`pages`: a page that one request reads and no resume point holds has the
count `UNSHARED`; the null page, which stands in empty entries, never has it):

    dense        a new one for each block, of which the request is the only owner, without a count
    recycling    the one that is in the entry: a window's table is a ring, so block b has the column
                 of block b - width, which is out of reach. A new page if the count of the old one
                 is not `UNSHARED`: others need it, or there is none
    releasing    a new one, as the pages of blocks out of reach are given back at once
    snapshot     the one that is in the entry, as in a recycling window

A window's ring has ``width = live + per_segment + lag`` columns: `live` blocks behind the open one
that a query can see, `per_segment` blocks from one boundary to the next, and `lag`, 0 unless a
drafter looks ahead, blocks past a boundary until its segment has a key. A window of 33 tokens in
blocks of 16 has 2 live blocks, and a resume point at a boundary needs as many, its tail. With an
alignment of 32 (per_segment 2, width 4) it recycles: block 6 gets the column, and the page, of
block 2. With an alignment of 256 (per_segment 16, width 18) that would hold pages for no use, and
it releases (`drop_behind`). Boundary 256 is where block 16 starts:

    block that starts    14   15   16   17   18   19   20        31   32
    blocks let go        11   12   13   .    .    16   17   ..   28   29 15 14

Blocks 14 and 15, the tail of 256, stay until the next boundary has its key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..arrays import INT32, INT64, NO_FLAGS, NO_ROWS, ONE, ZERO, Int32, Int64, count_true
from ..pages import NULL, UNSHARED, PagePool
from .calendar import Calendar, Part
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
        slots, start: [n] slots of the requests, and their tokens before the step.
        token_slots: [num_tables, n] slots of their last tokens. A batch that is made (`batches`)
            has them from the tables, ``page of block (start // block_size) * block_size + start %
            block_size - 1``; each step hands on its own. They mean nothing in rows of states, and
            where the step starts a block.
        state_pages: [num_tables, n] live pages of states, 0 where there are none yet; 0 in other
            rows.
        is_steady: whether all states have live pages.
        row_starts: [n] flat indices of the first entries of the requests' rows in the fused table
            (all tables side by side).
        alignment: tokens of a segment.
        size: tokens that each computes in a step: one, or several in `drafts.DraftBatch`.

    Attributes:
        counts: [n] `size` each. end: [n] tokens after the step. longest: the largest.
        age: steps since the batch was made; 0 in the first one.
        calendar: what changes in each step, once the batch has lasted a while.
        is_whole: False once a request has left, or gone back.
        quiet_until: age before which no request keeps a boundary.
    """

    def __init__(
        self,
        slots: Int64,
        start: Int64,
        token_slots: Int64,
        state_pages: Int32,
        is_steady: bool,
        row_starts: Int64,
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
        self.token_slots, self.state_pages, self.is_steady = token_slots, state_pages, is_steady
        self.is_whole = True
        self.row_starts = row_starts
        self.calendar: Calendar | None = None
        self.quiet_until = 0
        self.alignment = alignment
        self._by_step: tuple[Int64, Int64, list[int], list[int]] | None = None
        self._ending: Ending | None = None

    def is_of(self, slots: Int64) -> bool:
        """Whether these are the batch's requests, in its order."""
        return self.is_whole and slots.tobytes() == self._key

    def is_again(self, slots: Int64, counts: Int64) -> bool:
        """Whether a step asks for the next tokens of the batch's requests, and nothing else."""
        return self.is_of(slots) and counts.tobytes() == self._same

    def advance(self, token_slots: Int64) -> None:
        """Go to the next step; `token_slots` are those of this one."""
        self.start, self.end, self.token_slots = self.end, self.end + ONE, token_slots
        self.longest += 1
        self.age += 1
        self._ending = None

    @property
    def ending(self) -> Ending:
        """Who completes a segment in this step: at a boundary, a multiple of the alignment."""
        if self._ending is not None:
            return self._ending
        a = self.alignment
        if not self.age:
            rows = (self.end % a == ZERO).nonzero()[0]
            slots = self.slots[rows]
            self._ending = Ending(rows, slots, slots.tolist(), self.end[rows])
            return self._ending
        if self._by_step is None:  # requests by when they do, and how many do before each step
            wait = (self.age - self.end) % a
            order = wait.argsort(kind="stable")
            bounds = np.bincount(wait, minlength=a).cumsum().tolist()
            slots = self.slots[order]
            self._by_step = order, slots, slots.tolist(), [0, *bounds]
        order, slots, slot_list, bounds = self._by_step
        step = self.age % a
        low, high = bounds[step], bounds[step + 1]
        self._ending = NOBODY
        if low < high:
            rows = order[low:high]
            self._ending = Ending(rows, slots[low:high], slot_list[low:high], self.end[rows])
        return self._ending


class DecodeChanges:
    """What a decode step changes: entries of the tables, and their pages.

    The entries are in this order, cut in three places, and new pages are dealt in it:

        entries             | dense | releasing | recycling | snapshots |
        cuts                0   num_dense    num_always_new   num_blocks   m
        take a new page     | all   | all       | if `is_new`           |
        are counted         |       | UNSHARED                          |
        start a block       | yes                           | no        |

    Args:
        batch: whose step it is.
        entries: three vectors [m]: indices, in the fused table; outputs, indices in a slot mapping
            [num_tables, n] of the table and the request; block_sizes, rows of a page.
        cuts: num_dense, num_always_new and num_blocks.

    Attributes:
        start, end: [n] tokens before and after the step. num_new: pages needed.
        pages: [m] pages in the entries; once new ones are given, those. is_new: [m -
            num_always_new] which entries from there on take new ones.
        new_pages, slot_mapping: once they are given, the new pages and [num_tables, n] the slots
            of the tokens.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        entries: tuple[Int64, Int64, Int64],
        cuts: list[int],
    ) -> None:
        self.batch, self.start, self.end = batch, batch.start, batch.end
        self.indices, self.outputs, self.block_sizes = entries
        self.num_dense, self.num_always_new, self.num_blocks = cuts
        self.num_new = self.num_always_new
        self.pages = self.new_pages = self.slot_mapping = NO_ROWS
        self.is_new = NO_FLAGS


def recycles(tables: BlockTables) -> bool:
    """Whether windows write over the pages that are out of reach, and have nothing to free or take.

    They do where the window takes a good part of the ring; one that is long only because
    boundaries are far apart gives pages back.
    """
    return tables.is_window and tables.spec.per_segment <= 2 * (tables.spec.live + 1)


def drop_behind(tables: BlockTables, slots: Int64, blocks: Int64) -> None:
    """Let go of what releasing windows need no more as `blocks` [m] of the requests `slots` start.

    What stays is in reach of the next queries, or of a resume point at the last boundary.
    """
    spec = tables.spec
    inside = blocks % spec.per_segment  # blocks since the last boundary
    at = (inside == spec.lag % spec.per_segment).nonzero()[0]
    if at.size:  # the segment before the boundary has its key: older tails are settled
        oldest = blocks[at] - spec.lag - spec.live - 1
        reach = np.arange(spec.per_segment)
        tables.drop(slots[at].repeat(spec.per_segment), (oldest[:, None] - reach).ravel())
    # Between boundaries, one block leaves the window; it stays while the last boundary needs it.
    at = (inside > spec.live).nonzero()[0]
    if at.size:
        tables.drop(slots[at], blocks[at] - spec.live - 1)


class DecodeTables:
    """Decode steps of all tables.

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
        self._releasing = [b for b in blocks if b.is_window and not recycles(b)]
        recycling = [b for b in blocks if recycles(b)]
        self._parts = [
            Part(b.spec.tables, b.first, b.spec.width, b.spec.block_size, 0, b.spec.block_size)
            for b in [*dense, *self._releasing, *recycling]
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
        self._cuts = [len(dense), len(dense) + len(self._releasing), len(blocks)]
        self._per_request = sum(len(p.tables) * (alignment // p.period) for p in self._parts)

    def plan(self, batch: DecodeBatch, snapshots: bool) -> DecodeChanges:
        """What the requests of `batch` need; of states only the snapshots, if these are wanted.

        Nothing changes but the batch, which may get its calendar.
        """
        changes = self._due(batch, snapshots)
        fixed = changes.num_always_new
        if len(changes.indices) > fixed:
            changes.pages = self._flat[changes.indices].astype(INT64)
            changes.is_new = self.pool.counts[changes.pages[fixed:]] != UNSHARED
            changes.num_new += count_true(changes.is_new)
        return changes

    def _due(self, batch: DecodeBatch, snapshots: bool) -> DecodeChanges:
        """The entries that change: from the positions, or of a batch that lasts from its calendar."""
        if batch.calendar is None:
            if batch.age < SETTLED or len(batch.slots) * self._per_request > MOST_ENTRIES:
                return self._due_now(batch, snapshots)
            origin = batch.start - batch.age
            batch.calendar = Calendar(
                self._parts, self._cuts, origin, batch.row_starts, batch.alignment
            )
        return DecodeChanges(batch, *batch.calendar.due(batch.age, snapshots))

    def _due_now(self, batch: DecodeBatch, snapshots: bool) -> DecodeChanges:
        due, counts, ends = [NO_ROWS], [], [0]
        for part in self._parts if snapshots else self._parts[: self._cuts[-1]]:
            rows = (batch.start % part.period == part.at).nonzero()[0]
            due += [rows] * len(part.tables)
            counts += [len(rows)] * len(part.tables)
            ends.append(ends[-1] + len(rows) * len(part.tables))
        rows, table = np.concatenate(due), self._every[: len(counts)].repeat(counts)
        first, tables, widths, periods, sizes = self._each.take(table, axis=1)
        indices = batch.row_starts[rows] + first + batch.start[rows] // periods % widths
        entries = indices, tables * len(batch.slots) + rows, sizes
        return DecodeChanges(batch, entries, [ends[i] for i in self._cuts])

    def fill(self, changes: DecodeChanges, new_pages: Int64) -> Int64:
        """Give `new_pages` [num_new] to the changes; returns the slot mapping [num_tables, n]."""
        slots: Int64 = changes.batch.token_slots + ONE
        slots[self._state_rows] = NOWHERE
        fixed, n = changes.num_always_new, changes.num_blocks
        changes.new_pages, changes.slot_mapping = new_pages, slots
        if changes.num_new == len(changes.indices):
            changes.pages = new_pages
        else:
            changes.pages[:fixed] = new_pages[:fixed]
            if changes.num_new > fixed:
                changes.pages[fixed:][changes.is_new] = new_pages[fixed:]
        if n:
            slots.ravel()[changes.outputs[:n]] = changes.pages[:n] * changes.block_sizes[:n]
        return slots

    def commit(self, changes: DecodeChanges) -> Int32:
        """Make the changes real, and move their batch on.

        Returns:
            [m, 2] pages to copy after the step: from live states to the snapshots that are due.
        """
        batch, copies = changes.batch, NO_COPIES
        if changes.num_new:
            self._put_pages(changes)
        if len(changes.indices) > changes.num_blocks:
            self._snapshot_at[batch.ending.slots] = batch.ending.end
            copies = self._pairs[changes.indices[changes.num_blocks :] - ONE]
        batch.advance(changes.slot_mapping)
        return copies

    def _put_pages(self, changes: DecodeChanges) -> None:
        """Put the new pages into their entries, and let the old ones go."""
        batch, fixed = changes.batch, changes.num_always_new
        indices, pages = changes.indices[:fixed], changes.new_pages
        for tables in self._releasing:
            size = tables.spec.block_size
            rows = (batch.start % size == 0).nonzero()[0]
            drop_behind(tables, batch.slots[rows], batch.start[rows] // size)
        if changes.num_new > fixed:
            replaced = self._flat[changes.indices[fixed:][changes.is_new]]
            self.pool.unuse(replaced[replaced != NULL])
            indices, pages = changes.indices, changes.pages
        if changes.num_new > changes.num_dense:
            self.pool.counts[changes.new_pages[changes.num_dense :]] = UNSHARED
        self._flat[indices] = values = pages.astype(INT32)
        if self._deltas is not None:
            self._deltas.append((indices, values))
