"""State tables: a live page that every step changes in place, and a snapshot taken at a boundary.

A state can be copied only when a step ends, so a boundary becomes resumable only if a step ends
there (`KVCache.cut` says where to end). The snapshot of the newest such boundary stays with the
request until the next one; resume points share it. kvcore moves no bytes: a plan lists the page
copies to run before its step, and a commit those to run after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import NO_ROWS, Int32, Int64, slice_of
from ..pages import NULL, UNSHARED, PagePool
from ..spec import GroupClass

NO_INDICES: Int64 = np.empty((0, 0), dtype=np.int64)
NO_LIVE: Int32 = np.empty((0, 0), dtype=np.int32)
NO_COPIES: Int32 = np.empty((0, 2), dtype=np.int32)
LIVE, SNAPSHOT = 0, 1  # columns of a state table


@dataclass(slots=True, eq=False)
class StateStep:
    """Plan of one class of state tables."""

    pages: Int32  # [n, num_tables] live pages in the step, 0 where there are none yet
    starting: Int64  # rows of requests without live pages
    snapping: Int64  # rows that may end at a boundary and need new pages for the snapshot
    snapshots: Int64 | None = None  # [len(snapping), num_tables]
    copies: Int32 | None = None  # [m, 2] source and destination pages, before the step

    @property
    def num_blocks(self) -> int:
        """Blocks that need pages."""
        return len(self.starting) + len(self.snapping)


class StateTables:
    """Live pages and newest snapshots of the state groups of one spec."""

    def __init__(self, spec: GroupClass, tables: Int32, alignment: int, pool: PagePool) -> None:
        self.spec = spec
        self.alignment = alignment
        self.pool = pool
        columns = tables[:, spec.offset : spec.offset + spec.num_columns]
        self.table = columns.reshape(len(tables), spec.num_tables, 2)
        assert np.shares_memory(self.table, tables)
        self._flat = tables.reshape(-1)
        self._row = tables.shape[1]
        self.first = np.arange(spec.num_tables) * 2 + spec.offset

    def _indices(self, slots: Int64, column: int) -> Int64:
        """Flat indices in the fused table of the live pages or the snapshots of `slots` [n]: [n,
        k]."""
        indices: Int64 = (slots * self._row)[:, None] + (self.first + column)
        return indices

    def plan(self, slots: Int64, rows: Int64) -> StateStep:
        """Which of `slots` [n] need live pages, and which of `rows`, that may end at a boundary,
        pages for a snapshot."""
        both = self.table[slots] if len(slots) > 1 else self.table[int(slots[0])][None].copy()
        live = both[:, :, LIVE]
        starting = (live[:, 0] == NULL).nonzero()[0]
        return StateStep(live, starting, self._snapping(rows, both[:, 0, SNAPSHOT]))

    def _snapping(self, rows: Int64, snapshots: Int32) -> Int64:
        """Which of `rows` have one of `snapshots` [n] that a resume point or another request
        shares: it must not be written over."""
        if not len(rows):
            return NO_ROWS
        shared: Int64 = rows[self.pool.counts[snapshots[rows]] != UNSHARED]
        return shared

    def fill(self, plan: StateStep, slots: Int64, new_pages: Int64) -> None:
        """Give `new_pages` to the plan.

        The state of a request without live pages starts from its snapshot, or from page 0.
        """
        k = self.spec.num_tables
        cut = len(plan.starting) * k
        plan.snapshots = new_pages[cut:].reshape(-1, k)
        if cut:
            plan.pages[plan.starting] = new_pages[:cut].reshape(-1, k)
            plan.copies = np.empty((cut, 2), dtype=np.int32)
            plan.copies[:, 0] = self.table[slots[plan.starting], :, SNAPSHOT].ravel()
            plan.copies[:, 1] = new_pages[:cut]

    def commit(
        self, plan: StateStep, slots: Int64, end: Int64, ends: Int64
    ) -> tuple[Int32, Int64, Int32]:
        """Make the plan real.

        Args:
            end: [n] tokens after the step. ends: rows whose step ended at a boundary of which a
                snapshot is due.

        Returns:
            (copies after the step [m, 2], flat indices and pages of the table changes).
        """
        assert plan.snapshots is not None
        indices, live = NO_INDICES, NO_LIVE
        if len(plan.starting):
            indices, live = self._indices(slots[plan.starting], LIVE), plan.pages[plan.starting]
            self._flat[indices] = live
            self.pool.users[live] = 1
        snapping, pages = plan.snapping, plan.snapshots
        if len(snapping):
            due = end[snapping] % self.alignment == 0
            if np.count_nonzero(due) < len(due):
                self.pool.put(pages[~due].ravel())
                snapping, pages = snapping[due], pages[due]
            where = self._indices(slots[snapping], SNAPSHOT)
            self.pool.unuse(self._flat[where].ravel())
            self._flat[where] = pages
            self.pool.users[pages] = 1
        copies = np.empty((len(ends) * self.spec.num_tables, 2), dtype=np.int32)
        copies[:, 0] = plan.pages[ends].ravel()
        copies[:, 1] = self.table[slots[ends], :, SNAPSHOT].ravel()
        return copies, indices, live


def rows_of(states: list[StateTables]) -> Int64 | slice:
    """Rows of state tables in a slot mapping, as an index."""
    return slice_of(sorted(t for s in states for t in s.spec.tables.tolist()))
