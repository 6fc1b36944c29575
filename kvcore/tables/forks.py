"""Forks: the row of a request that goes on as another one does, up to where the two part.

Pages that nobody writes to any more are shared: those of cached segments, which the index owns,
those of full blocks of windows, and snapshots. What either request may still write to is copied:

    alignment 64, dense blocks of 32, window blocks of 16, 154 tokens, no drafts

    tokens    0        32       64       96       128      154
    dense     |  index |  index |  index |  index |  copy  |       past the last segment
    window                              | share | share | share | cp |   open block alone

A dense page has one owner, so a full dense block past the last cached segment is copied too: at
most the pages of one segment, and of the tokens that its key waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Int32, Int64
from .rows import RowTables
from .state import LIVE, SNAPSHOT


@dataclass(slots=True, eq=False)
class ForkPlan:
    """What a fork copies.

    Attributes:
        columns: [m] columns of the fused table whose pages are copied.
        tables: [m] rows in a slot mapping of their tables.
        shared: [j] pages of windows and snapshots that one more request reads.
        dense: (first, end) columns of each dense table past the cached segments that are in use.
    """

    columns: Int64
    tables: Int64
    shared: Int32
    dense: list[tuple[int, int]]


class ForkTables(RowTables):
    """What happens to rows as a request is forked."""

    def plan_fork(self, source: int, cached: int, computed: int, lowest: int) -> ForkPlan:
        """What a fork of the request of slot `source` copies; nothing changes.

        Args:
            cached, computed: its tokens. lowest: the fewest that a rollback can leave.
        """
        row, first_row = self.array[source], np.zeros(1, dtype=np.int64)
        is_copied = np.zeros(len(row), dtype=np.bool_)
        is_shared = np.zeros(len(row), dtype=np.bool_)
        table_of = np.zeros(len(row), dtype=np.int64)
        dense = []
        # Rows of drafters from here on wait for tokens that may still be taken back.
        written = max(0, lowest - self.layout.lookahead)
        for block in self.blocks:
            c = block.spec
            low = written if block.is_window else cached
            blocks = np.arange(low // c.block_size, -(-computed // c.block_size))
            is_copied[block.indices(first_row, blocks).ravel()] = True
            whole = slice(c.offset, c.offset + c.num_columns)
            if block.is_window:
                is_shared[whole] = True
            else:
                dense.append((cached // c.block_size, -(-computed // c.block_size)))
            table_of[whole] = np.repeat(c.tables, c.width)
        for state in self.states:
            c = state.spec
            is_copied[state.first + LIVE] = True
            is_shared[state.first + SNAPSHOT] = True
            table_of[c.offset : c.offset + c.num_columns] = np.repeat(c.tables, c.width)
        columns = (is_copied & (row != 0)).nonzero()[0]
        shared = row[is_shared & ~is_copied & (row != 0)]
        return ForkPlan(columns, table_of[columns], shared, dense)

    def fork(self, source: int, slot: int, plan: ForkPlan, new_pages: Int64) -> Int32:
        """Fill the empty row `slot` as that of `source`, with `new_pages` [m] where it copies; not
        the entries of cached segments, which the index has.

        Returns:
            [m, 2] pages (source, destination) to copy.
        """
        row = self.array[slot]
        for table in [b.table for b in self.windows] + [s.table for s in self.states]:
            table[slot] = table[source]
        for block, (first, end) in zip(self.dense, plan.dense, strict=True):
            block.table[slot, :, first:end] = block.table[source, :, first:end]
        copies = np.stack([row[plan.columns], new_pages.astype(np.int32)], axis=1)
        row[plan.columns] = new_pages
        is_dense = np.isin(plan.tables, [t for b in self.dense for t in b.spec.tables])
        self.pool.use(plan.shared)
        self.pool.use_new(copies[~is_dense, 1])
        self.snapshot_at[slot] = self.snapshot_at[source]
        columns = row.nonzero()[0]
        self._delta(slot * len(row) + columns, row[columns])
        return copies
