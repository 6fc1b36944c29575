"""Results of planning a step: `StepPlan` and `OutOfPages`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .arrays import Int32, Int64

if TYPE_CHECKING:
    from .tables.planner import StepChanges


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step of a batch, as the kernels need it. Arrays are not to be written to.

    From `KVCache.plan` it holds until another plan, or any other call that changes requests, cached
    content or free pages; pins and look-ups do not void it. From `KVCache.arrays` it holds until
    its requests advance.

    Attributes:
        slots: [n] int64 request slots, in batch order.
        num_new_tokens: [n] int64.
        cu_seqlens_q: [n + 1] int32 prefix sums of num_new_tokens.
        seq_lens: [n] int32 tokens after the step.
        positions: [total] int64.
        slot_mapping: [num_groups, total] int64, page * block_size + row; -1 = do not write, as all
            rows of state groups. In a window group only rows that later queries or a kept boundary
            need have a slot: attention takes the step's own keys and values from the step. With
            `KVCache(reads="pages")` all rows have one, but for replayed rows of dense groups.
        replay_rows, replay_slots: [m] int64 rows of the step that are computed once more, and
            [num_groups, m] int64 their slots in dense groups: attention over all keys must take
            these rows from the pages, not from the step.
        copies: [m, 2] int32 pages (source, destination) to copy before the step: state snapshots
            that requests start from. Source 0, the null page, must hold the initial state.
        state_pages: [num_groups, n] int32 live page of each request, which the state kernel updates
            in place; 0 in other groups; [0, 0] without state groups.
        changes: effects of the commit on the tables.
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
    changes: StepChanges = field(repr=False)


@dataclass(frozen=True)
class OutOfPages:
    """A step that does not fit; nothing was changed.

    Attributes:
        needed, free, evictable: pages that the step needs, that are free, that eviction could free.
        group: name of the group that needs the most pages.
        per_group: pages that each group needs.
    """

    needed: int
    free: int
    evictable: int
    group: str
    per_group: dict[str, int]

    def __str__(self) -> str:
        return (
            f"out of pages: the step needs {self.needed} (most of them in group {self.group!r}), "
            f"{self.free} are free and {self.evictable} evictable"
        )


def without_last(plan: StepPlan, num: Int64) -> StepPlan:
    """A plan without the last `num` [n] tokens of each request."""
    counts = plan.num_new_tokens - num
    cu = np.zeros_like(plan.cu_seqlens_q)
    cu[1:] = np.add.accumulate(counts)
    number = np.arange(len(plan.positions)) - plan.cu_seqlens_q[:-1].repeat(plan.num_new_tokens)
    stays = number < counts.repeat(plan.num_new_tokens)
    replays = stays[plan.replay_rows]
    rows = (stays.cumsum() - 1)[plan.replay_rows[replays]]
    return StepPlan(
        plan.slots, counts, cu, (plan.seq_lens - num).astype(np.int32),
        plan.positions[stays], plan.slot_mapping[:, stays], rows, plan.replay_slots[:, replays],
        plan.copies, plan.state_pages, plan.changes,
    )  # fmt: skip
