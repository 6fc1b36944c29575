"""Steps for workers in other processes: plain arrays, and a copy of the block tables.

scheduler                                      worker
plan = kv.plan(slots, counts)                  tables = WorkerTables(groups, ...)
step = step_arrays(kv, plan)  -- pickled -->   tables.update(step)
...                                            run the model: tables.table(g)[step.slots]
kv.commit(plan, ids)                           step.slot_mapping, step.copies, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .arguments import as_int
from .arrays import NO_ROWS, NO_VALUES, Int32, Int64
from .spec import GroupSpec, Layout

if TYPE_CHECKING:
    from .cache import KVCache
    from .plan import StepPlan


class StepArrays(NamedTuple):
    """The arrays of a `StepPlan`, and the table cells that changed since the step before:
    [m] int64 flat indices into `KVCache.tables` (repeats have one page), and [m] int32 pages there.
    """

    slots: Int64
    num_new_tokens: Int64
    cu_seqlens_q: Int32
    seq_lens: Int32
    positions: Int64
    slot_mapping: Int64
    replay_rows: Int64
    replay_slots: Int64
    copies: Int32
    state_pages: Int32
    table_indices: Int64
    table_pages: Int32


def step_arrays(kv: KVCache, plan: StepPlan) -> StepArrays:
    """Arrays of the newest plan of `kv`, between the plan and its commit.

    This takes the deltas of `kv`, made with ``track_deltas=True``: make no other call of
    `take_deltas`, and send each step that runs to all workers.
    """
    indices, _ = kv.take_deltas()
    named = (getattr(plan, name) for name in StepArrays._fields[:-2])
    return StepArrays._make([*named, indices, kv.tables.reshape(-1)[indices]])


class WorkerTables:
    """A worker's copy of the block tables of a cache in another process, for `device.BatchBuilder`.
    The arguments are those of the `KVCache`.

    Attributes:
        tables: [max_requests, columns] int32: all block tables side by side.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        max_requests: int,
        max_model_len: int,
        max_draft_tokens: int = 0,
    ) -> None:
        max_requests = as_int("max_requests", max_requests, 1)
        max_model_len = as_int("max_model_len", max_model_len, 1)
        self.max_draft_tokens = as_int("max_draft_tokens", max_draft_tokens, 0, max_model_len)
        self.layout = Layout(groups, max_model_len, max_draft_tokens)
        self.tables: Int32 = np.zeros((max_requests, self.layout.num_columns), dtype=np.int32)
        self._changed: list[Int64] = []

    def update(self, step: StepArrays) -> None:
        """Bring the tables up to date before `step` runs; each step once, in order. ValueError for
        an index past the tables.
        """
        indices = step.table_indices
        if len(indices) and int(indices.max()) >= self.tables.size:
            raise ValueError(
                f"step: expected indices below {self.tables.size}, the cells of these tables, "
                f"got {int(indices.max())}: the cache was made with other arguments"
            )
        self.tables.reshape(-1)[indices] = step.table_pages
        self._changed.append(indices)

    def table(self, group: int) -> Int32:
        """`KVCache.table`; of state groups read `StepArrays.state_pages` instead."""
        offset, width = self.layout.columns(group)
        return self.tables[:, offset : offset + width]

    def take_deltas(self) -> tuple[Int64, Int32]:
        """`KVCache.take_deltas`: cells that changed since the last call."""
        if not self._changed:
            return NO_ROWS, NO_VALUES
        indices = np.concatenate(self._changed)
        self._changed.clear()
        return indices, self.tables.reshape(-1)[indices]
