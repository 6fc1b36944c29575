"""`Part`: what a step gives one of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrays import Int32, Int64

if TYPE_CHECKING:
    from .plan import StepPlan
    from .step import Step


class Part:
    """The part of one request in a `Step`.

    What follows from the pages (all methods) asks for the plan of the step, which ends its
    building.

    Attributes:
        slot: whose it is. start: its tokens before the step.
        num_new_tokens, lookahead: as of `Step.add`.
        num_new_pages: pages reserved for it.
    """

    __slots__ = ("_step", "lookahead", "num_new_pages", "num_new_tokens", "slot", "start")

    def __init__(
        self, step: Step, slot: int, start: int, num_new_tokens: int, lookahead: int, pages: int
    ) -> None:
        self._step, self.slot, self.start = step, slot, start
        self.num_new_tokens, self.lookahead, self.num_new_pages = num_new_tokens, lookahead, pages

    @property
    def rows(self) -> slice:
        """Its rows in the arrays of the step's plan."""
        plan = self._step.plan()
        i = self._step.row_of(self.slot)
        return slice(int(plan.cu_seqlens_q[i]), int(plan.cu_seqlens_q[i + 1]))

    @property
    def positions(self) -> Int64:
        """[num_new_tokens] int64."""
        return self._step.plan().positions[self.rows]

    @property
    def slot_mapping(self) -> Int64:
        """[num_tables, num_new_tokens] int64, as of `StepPlan`."""
        return self._step.plan().slot_mapping[:, self.rows]

    @property
    def lookahead_slots(self) -> Int64:
        """[num_tables, lookahead] int64: where rows go that are past its new tokens."""
        full, first = self._in_full()
        last = first + self.num_new_tokens
        return full.slot_mapping[:, last : last + self.lookahead]

    @property
    def state_pages(self) -> Int32:
        """[num_tables] int32 its live pages; empty without state groups."""
        plan = self._step.plan()
        pages: Int32 = plan.state_pages[:, self._step.row_of(self.slot)].copy()
        return pages

    @property
    def copies(self) -> Int32:
        """[m, 2] int32 pages to copy before the step: those of `StepPlan.copies` that are its."""
        copies = self._step.plan().copies
        return copies[np.isin(copies[:, 1], self.state_pages)] if len(copies) else copies

    @property
    def replays(self) -> tuple[Int64, Int64]:
        """`StepPlan.replay_rows` and `replay_slots` that are its, the rows counted from its
        first."""
        plan, rows = self._step.plan(), self.rows
        its = (plan.replay_rows >= rows.start) & (plan.replay_rows < rows.stop)
        return plan.replay_rows[its] - rows.start, plan.replay_slots[:, its]

    def new_blocks(self, group: int, part: int = 0) -> tuple[Int64, Int64]:
        """Blocks that start in the step, or in its lookahead, and have a page.

        They are what a worker appends to a table of its own.

        Args:
            group, part: a dense or window group, and which of its pages_per_block pages.

        Returns:
            ([m] int64 block numbers, ascending, [m] int64 their pages).

        Raises:
            ValueError: there is no such group or part.
        """
        layout = self._step.layout
        t = layout.table(group, part)
        size = layout.groups[group].block_size
        full, first = self._in_full()
        rows = slice(first, first + self.num_new_tokens + self.lookahead)
        positions, slots = full.positions[rows], full.slot_mapping[t, rows]
        at = (positions % size == 0) & (slots >= 0)
        return positions[at] // size, slots[at] // size

    def _in_full(self) -> tuple[StepPlan, int]:
        """The plan with lookaheads, and the first row in it."""
        full = self._step.full_plan()
        return full, int(full.cu_seqlens_q[self._step.row_of(self.slot)])
