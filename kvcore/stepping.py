"""The calls of steps: plans and commits of whole batches, steps built request by request,
rollbacks."""

from __future__ import annotations

from typing import Any

from .arrays import Int32, Int64
from .checks import as_batch, check_batch
from .open_steps import OpenSteps
from .plan import OutOfPages, StepPlan, Steps
from .prefix.requests import Sequences
from .prefix.tracker import Chains
from .spec import as_int
from .step import Step
from .tables.planner import Tables


class CacheSteps:
    """The part of `KVCache` that steps need.

    Attributes:
        sequences: the running requests.
        enable_caching: whether anything is cached.
    """

    sequences: Sequences
    enable_caching: bool
    _chains: Chains
    _tables: Tables
    _steps: Steps
    _open: OpenSteps

    def cut(self, slots: Any, num_new_tokens: Any) -> Int64:
        """Shorten chunks so that each ends at its next kept boundary, or else at its last boundary.

        Only needed with state groups, whose state can be kept only where a step ends; without them
        the counts come back as they are.

        Args:
            slots, num_new_tokens: [n] as for `plan`.

        Returns:
            [n] int64 counts, at least 1 each.

        Raises:
            ValueError: as `plan` for the slots and counts.
        """
        slots, counts = as_batch(slots, num_new_tokens)
        check_batch(slots, counts, self.sequences)
        if not (self._tables.states and self.enable_caching):
            return counts.copy()
        start = self.sequences.num_computed[slots]
        shortened: Int64 = self._chains.stops(slots, start, start + counts) - start
        return shortened

    def plan(self, slots: Any, num_new_tokens: Any) -> StepPlan | OutOfPages:
        """Plan a step: which pages and rows the new tokens of each request get.

        No request changes before `commit`. When free pages run short, cached entries are evicted
        here (as `policy` ranks them), and only if that is enough.

        Args:
            slots: [n] ints, distinct, from `admit`.
            num_new_tokens: [n] ints >= 1.

        Raises:
            ValueError: an unknown or repeated slot, one in a step of `begin` that is not committed,
                a count below 1, or a sequence past max_model_len; or a step is being built.
        """
        steps = self._open
        if steps.by_slot or steps.advanced:
            steps.expect_none_of(slots)
        plan = self._steps.plan(slots, num_new_tokens)
        if self._steps.checks is not None and isinstance(plan, StepPlan):
            self._steps.checks.expect_pages(plan)
        return plan

    def commit(self, plan: StepPlan, input_ids: Any, accepted: Any = None) -> Int32:
        """Make a planned step real: its rows become context, whole segments become findable.

        Args:
            plan: the newest plan of this cache, with no change since (see `StepPlan`).
            input_ids: [total] ints, the tokens whose rows the step computed, in the plan's order.
            accepted: [n] ints, how many of each request's new tokens stay; all by default. At most
                max_draft_tokens of a request may be rejected.

        Returns:
            [m, 2] int32 pages (source, destination) to copy after this step and before the next:
            snapshots of states. Empty without state groups.

        Raises:
            ValueError: the plan is not the newest, or void, or an argument has the wrong size.
                Nothing changed.
        """
        return self._steps.commit(plan, input_ids, accepted)

    def begin(self) -> Step:
        """Start to build a step, request by request (see `Step`). It voids the newest plan.

        Raises:
            ValueError: another step is being built: its plan was not asked for.
        """
        return self._open.begin()

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Forget the last computed tokens of a request.

        Args:
            slot: from `admit`.
            num_tokens: how many, at least 1.

        Raises:
            ValueError: the slot is unknown, or in a step of `begin` that is not committed, or the
                tokens are cached already (or are the lookahead of cached ones), or more than
                max_draft_tokens would be taken back from the furthest position reached.
        """
        slot, num_tokens = self.sequences.checked(slot), as_int("num_tokens", num_tokens, 1)
        self._open.expect_settled(slot)
        self._steps.rollbacks.expect(slot, num_tokens)
        self._steps.changed()
        self._steps.rollbacks.take_back(slot, num_tokens)

    def lowest_rollback(self, slot: int) -> int:
        """The fewest tokens that `rollback` can leave the request of `slot`.

        Raises:
            ValueError: the slot is unknown.
        """
        return self._steps.rollbacks.lowest(self.sequences.checked(slot))
