"""Steps with drafts: each request of a batch computes the same few tokens.

Some of them may be rejected. There are no more tokens than rows in the smallest page, so that a
request starts at most one block in each table and passes at most one boundary. What it needs is
then two things: the slot of its last token, which the batch knows, and for the few requests that
start a block a page and the token at which they do. All rows are written, of window groups too. A
new block always takes a new page: what a ring still has in its column may be needed if the tokens
of the block are rejected.

A request with 6 tokens computes three (one and two drafts), blocks of 4, pages 1 and then 3:

    token             4    5  | 6    7  | 8  | 9   10
    block             |  1              |  2
    slot              4    5  | 6    7  | 12 |             page 1 * 4 + row, page 3 * 4 + row
    step 1            computed| x    x    x  |             block 2 starts `after` 2 of its tokens
      one accepted            | 6  |                       page 3 goes back; the request has 7
    step 2                         | x    x    x  |        slots 7, 12, 13; `after` 1
      all accepted                 | 7    8    9  |        page 3 stays in the table
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..arrays import INT32, NO_FLAGS, NO_ROWS, NO_VALUES, ONE, ZERO, Int32, Int64, count_true
from ..pages import UNSHARED, PagePool
from .decode import NOWHERE, DecodeBatch, drop_behind, recycles
from .prefill import BlockTables
from .state import LIVE, NO_INDICES, SNAPSHOT, StateTables, rows_of


class DraftBatch(DecodeBatch):
    """Requests that compute as many tokens as the others, of which some may be rejected.

    Args:
        size: tokens that each computes in a step, more than one. The others: as of `DecodeBatch`.

    Attributes:
        end: [n] tokens after the step, if none is rejected.
        tokens: `size`.
        row_of, steps: [n * size] of each token of a step: which request's it is, and its number
            there, from 1 on.
        firsts, cu: [n] int64 and [n + 1] int32, where each request's tokens start.
        behind: [size, size] ones where a token (column) is not before another (row), else zeros.
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
        size: int,
    ) -> None:
        super().__init__(
            slots, start, token_slots, state_pages, is_steady, row_starts, alignment, size
        )
        self.tokens: Int64 = np.array(size)
        self.row_of: Int64 = np.arange(len(slots)).repeat(size)
        self.cu: Int32 = np.arange(0, len(self.row_of) + 1, size, dtype=np.int32)
        self.firsts: Int64 = self.cu[:-1].astype(np.int64)
        self.steps: Int64 = np.arange(1, len(self.row_of) + 1) - self.row_of * size
        self.behind: Int64 = np.tri(size, dtype=np.int64).T.copy()
        self._segment: Int64 = np.array(alignment)

    def take(self, end: Int64, token_slots: Int64) -> None:
        """Go to the next step; this one left each request `end` [n] tokens."""
        self.start, self.end, self.token_slots = end, end + self.tokens, token_slots
        self.longest = int(np.maximum.reduce(self.end))
        self.age += 1

    @property
    def reaching(self) -> Int64:
        """Rows that may complete a segment in this step, which depends on the drafts that are
        rejected."""
        return (self.end % self._segment < self.tokens).nonzero()[0]


@dataclass(slots=True, eq=False)
class Drafts:
    """Plan of a step with drafts: the blocks that start in it, and the snapshots that may be due
    after it.

    Attributes:
        batch: whose step it is.
        at: [m] new blocks, by their columns in `DraftTables.columns_of`. lines: [m] the same in a
            slot mapping [num_tables * n, size].
        rows, indices: [m] their requests, and their flat indices in the fused table.
        after: [m] tokens of the request before the block's first. sizes: [m] rows of a page.
        num_dense: blocks of dense tables, which come first.
        snapshot_rows, snapshot_indices: [s] requests that may end at a boundary, and [s, state
            tables] flat indices of their snapshots.
        is_new: [s, state tables] which of these need new pages, because others hold the old ones
            too.
        num_new: pages needed. pages: [num_new] these, once they are given; first those of blocks.
        slot_mapping: [num_tables, n * size] slots of the tokens, once pages are given.
    """

    batch: DraftBatch
    at: Int64
    lines: Int64
    rows: Int64
    indices: Int64
    after: Int64
    sizes: Int64
    num_dense: int
    snapshot_rows: Int64
    snapshot_indices: Int64
    is_new: npt.NDArray[np.bool_]
    num_new: int
    pages: Int64
    slot_mapping: Int64


class DraftTables:
    """Steps with drafts of all tables.

    Args:
        array: [max_requests, num_columns] int32, the fused table.
        blocks, states: the classes of tables. alignment: tokens of a segment. drafts: most tokens
            that a step may reject. pool: the pages.

    Attributes:
        most: tokens of a request in a step, at most; steps with more are chunks.
    """

    def __init__(
        self,
        array: Int32,
        blocks: list[BlockTables],
        states: list[StateTables],
        alignment: int,
        drafts: int,
        pool: PagePool,
    ) -> None:
        self.pool = pool
        self._flat = array.reshape(-1)
        # A live page and its snapshot are neighbours.
        assert SNAPSHOT == LIVE + 1
        self._pairs = sliding_window_view(self._flat, 2)
        self._segment: Int64 = np.array(alignment)
        self._state_rows = rows_of(states)
        ordered = sorted(blocks, key=lambda b: b.is_window)
        sizes = sorted({b.spec.block_size for b in blocks})
        self.most = min([drafts + 1, alignment, *sizes])
        self._sizes: Int64 = np.array(sizes, dtype=np.int64)[:, None]
        # Of each table: which size it has, its row in a slot mapping, its first column, its width
        # and its block size.
        each = [
            (sizes.index(b.spec.block_size), table, first, b.spec.width, b.spec.block_size)
            for b in ordered
            for table, first in zip(b.spec.tables.tolist(), b.first.tolist(), strict=True)
        ]
        self._size_of, *columns = np.array(each, dtype=np.int64).reshape(-1, 5).T.copy()
        self._table_of, self._first_of, self._width_of, self._block_of = columns
        self._num_dense = sum(b.spec.num_tables for b in blocks if not b.is_window)
        at = self._num_dense  # releasing windows, and the index of their first table
        self._releasing: list[tuple[BlockTables, int]] = []
        for b in ordered:
            if b.is_window:
                if not recycles(b):
                    self._releasing.append((b, at))
                at += b.spec.num_tables
        indices = [s.first + SNAPSHOT for s in states]
        self._snapshots: Int64 = np.concatenate(indices) if indices else np.empty(0, dtype=np.int64)
        tables = [s.spec.tables for s in states]
        self._state_tables: Int64 = np.concatenate(tables) if tables else self._snapshots
        self._batch: DraftBatch | None = None
        self._columns: Int64 = np.empty((5, 0), dtype=np.int64)  # of the batch, see `columns_of`

    def columns_of(self, batch: DraftBatch) -> Int64:
        """What blocks may start in, [5, tables of blocks * n]: request, line in a slot mapping,
        first column, width, block size."""
        if batch is not self._batch:
            shape = 5, len(self._table_of), len(batch.slots)
            columns: Int64 = np.empty(shape, dtype=np.int64)
            columns[0] = rows = np.arange(shape[2])
            columns[1] = self._table_of[:, None] * shape[2] + rows
            columns[2] = self._first_of[:, None] + batch.row_starts
            columns[3], columns[4] = self._width_of[:, None], self._block_of[:, None]
            self._batch, self._columns = batch, columns.reshape(5, -1)
        return self._columns

    def plan(self, batch: DraftBatch, snapshot: Int64) -> Drafts:
        """What the requests of `batch` need; `snapshot`: those that may end at a boundary whose
        state is to be kept."""
        starts = (-batch.start % self._sizes < batch.tokens).take(self._size_of, axis=0)
        at = starts.ravel().nonzero()[0]
        rows, lines, first, widths, sizes = self.columns_of(batch).take(at, axis=1)
        number, inside = np.divmod(batch.end[rows] - ONE, sizes)  # of the step's last token
        after, indices = batch.tokens - ONE - inside, first + number % widths
        num_dense = int(at.searchsorted(self._num_dense * len(batch.slots)))
        plan = Drafts(
            batch,
            at,
            lines,
            rows,
            indices,
            after,
            sizes,
            num_dense,
            snapshot,
            NO_INDICES,
            NO_FLAGS,
            len(at),
            NO_ROWS,
            NO_ROWS,
        )
        if snapshot.size:
            plan.snapshot_indices = batch.row_starts[snapshot][:, None] + self._snapshots
            plan.is_new = self.pool.counts[self._flat[plan.snapshot_indices]] != UNSHARED
            plan.num_new += count_true(plan.is_new)
        return plan

    def fill(self, plan: Drafts, new_pages: Int64) -> Int64:
        """Give `new_pages` [num_new] to the plan; returns the slot mapping [num_tables, n *
        size]."""
        batch = plan.batch
        slots: Int64 = batch.token_slots.take(batch.row_of, axis=1)
        slots += batch.steps
        slots[self._state_rows] = NOWHERE
        plan.pages, plan.slot_mapping = new_pages, slots
        lines, first = (
            slots.reshape(-1, batch.size),
            new_pages[: len(plan.at)] * plan.sizes - plan.after,
        )
        shift = first - ONE - batch.token_slots.ravel()[plan.lines]
        lines[plan.lines] += batch.behind.take(plan.after, axis=0) * shift[:, None]
        return slots

    def commit(self, plan: Drafts, taken: Int64) -> tuple[Int64, Int32]:
        """Make the plan real, of which each request keeps `taken` [n] tokens; returns the entries
        that changed and their pages.

        A ring's column has a block that was last seen `width` blocks ago: no query after the step,
        and no tail of a last boundary, reaches so far back.
        """
        batch, cut = plan.batch, plan.num_dense
        indices, pages = plan.indices, plan.pages[: len(plan.at)]
        stays = plan.after < taken[plan.rows]
        kept = stays.nonzero()[0]
        if len(kept) < len(indices):
            self.pool.put(pages[~stays])
            indices, pages, cut = indices[kept], pages[kept], int(kept.searchsorted(cut))
        if not len(kept):
            return indices, NO_VALUES
        for tables, first in self._releasing:
            n, at = len(batch.slots), plan.at[kept]
            low, high = at.searchsorted((first * n, (first + 1) * n)).tolist()
            if low < high:
                rows, size = plan.rows[kept[low:high]], tables.spec.block_size
                drop_behind(tables, batch.slots[rows], (batch.end[rows] - ONE) // size)
        if cut < len(kept):
            self.pool.unuse(self._flat[indices[cut:]])
            self.pool.counts[pages[cut:]] = UNSHARED
        values = pages.astype(INT32)
        self._flat[indices] = values
        return indices, values

    def snapshots(self, plan: Drafts, end: Int64) -> tuple[Int64, Int32]:
        """Make those snapshots real that are due at `end` [n], and free the others' pages.

        Returns:
            (requests whose snapshots are due, copies of pages after the step [m, 2], from live
            states to snapshots).
        """
        due = end[plan.snapshot_rows] % self._segment == ZERO
        indices = plan.snapshot_indices[due]
        new_pages = plan.pages[len(plan.at) :]
        if len(new_pages):
            is_due = due.repeat(len(self._snapshots))[plan.is_new.ravel()]
            self.pool.put(new_pages[~is_due])
            new_pages, replaced = new_pages[is_due], indices[plan.is_new[due]]
            self.pool.unuse(self._flat[replaced])
            self._flat[replaced] = new_pages
            self.pool.counts[new_pages] = UNSHARED
        copies: Int32 = self._pairs[indices.ravel() - ONE]
        return plan.snapshot_rows[due], copies

    def demand(self, plan: Drafts, num_tables: int, num_requests: int) -> list[int]:
        """Pages that each table needs."""
        which = plan.is_new.nonzero()[-1] if plan.is_new.size else NO_ROWS
        tables = np.concatenate([plan.lines // num_requests, self._state_tables[which]])
        found: list[int] = np.bincount(tables, minlength=num_tables).tolist()
        return found
