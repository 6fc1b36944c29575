"""State tables: a live page that every step changes in place, and a snapshot taken at a boundary.

A state can be copied only when a step ends, so a boundary becomes resumable only if a step ends there
(`KVCache.cut` says where to end). The snapshot of the newest such boundary stays with the request until
the next one; resume points share it. kvcore moves no bytes: a plan lists the page copies to run before its
step, and a commit those to run after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .pages import PagePool
from .spec import GroupClass, Int32, Int64

LIVE, SNAPSHOT = 0, 1  # columns of a state table


@dataclass
class StateStep:
    """Plan of one class of state tables."""

    starting: Int64  # rows of requests without live pages
    snapping: Int64  # rows that may end at a boundary and need new pages for the snapshot
    live: Int32 | None = None  # [len(starting), num_tables]
    snapshots: Int32 | None = None  # [len(snapping), num_tables]
    copies: Int32 | None = None  # [m, 2] source and destination pages, before the step

    @property
    def num_blocks(self) -> int:
        """Blocks that need pages."""
        return len(self.starting) + len(self.snapping)


class StateTables:
    """Live pages and newest snapshots of the state groups of one spec."""

    def __init__(self, spec: GroupClass, tables: Int32, pool: PagePool) -> None:
        self.spec = spec
        self.pool = pool
        columns = tables[:, spec.offset : spec.offset + spec.num_columns]
        self.table = columns.reshape(len(tables), spec.num_tables, 2)
        assert np.shares_memory(self.table, tables)
        self._row = tables.shape[1]

    def plan(self, slots: Int64, boundary: Int64) -> StateStep:
        """Which of `slots` [n] need live pages, and which a snapshot at `boundary` [n] (0 = none)."""
        live, snapshot = self.table[slots, 0, LIVE], self.table[slots, 0, SNAPSHOT]
        # A snapshot that a resume point or another request shares must not be written over.
        shared = (self.pool.users[snapshot] > 1) | (self.pool.holds[snapshot] > 0)
        return StateStep((live == 0).nonzero()[0], ((boundary > 0) & shared).nonzero()[0])

    def fill(self, plan: StateStep, slots: Int64, fresh: Int32) -> Int32:
        """Give `fresh` pages to the plan; returns the live pages of `slots` [n, num_tables] in the step.

        The state of a request without live pages starts from its snapshot, or from page 0.
        """
        k = self.spec.num_tables
        cut = len(plan.starting) * k
        plan.live, plan.snapshots = fresh[:cut].reshape(-1, k), fresh[cut:].reshape(-1, k)
        sources = self.table[slots[plan.starting], :, SNAPSHOT]
        plan.copies = np.stack([sources.ravel(), plan.live.ravel()], axis=1)
        pages: Int32 = self.table[slots, :, LIVE]
        pages[plan.starting] = plan.live
        return pages

    def commit(
        self, plan: StateStep, slots: Int64, ends: Int64
    ) -> tuple[Int32, tuple[Int64, Int32]]:
        """Make the plan real.

        Args:
            ends: [m] rows whose step ended at a boundary of which a snapshot is due.

        Returns:
            (copies after the step [m, 2], table changes (flat indices [n, k], pages [n, k])).
        """
        assert plan.live is not None and plan.snapshots is not None
        starting, snapping = slots[plan.starting], slots[plan.snapping]
        self.table[starting, :, LIVE] = plan.live
        self.pool.users[plan.live] = 1
        due = np.isin(plan.snapping, ends)
        self.pool.put(plan.snapshots[~due].ravel())
        snapping, pages = snapping[due], plan.snapshots[due]
        self.pool.unuse(self.table[snapping, :, SNAPSHOT].ravel())
        self.table[snapping, :, SNAPSHOT] = pages
        self.pool.users[pages] = 1
        sources, targets = self.table[slots[ends], :, LIVE], self.table[slots[ends], :, SNAPSHOT]
        copies = np.stack([sources.ravel(), targets.ravel()], axis=1)
        first = np.arange(self.spec.num_tables) * 2 + self.spec.offset + LIVE
        return copies, ((starting * self._row)[:, None] + first, plan.live)
