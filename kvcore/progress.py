"""What a step does once it is sure: its requests advance, and what they completed is cached.

*Advance*: the rows count as computed. Tables and lengths move on, pages out of reach become free,
and the pages of the resume points that are due are held. Nothing of that depends on the tokens.

*Publish*: the tokens become known. They are hashed, whole segments become findable under their
keys, and the resume points join them.

A commit does both at once. A step that is followed by others before its tokens are known
(`step`) does them one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import NO_ROWS, Int32, Int64, as_token_ids
from .plan import StepPlan, Steps
from .prefix.tracker import Chains, Passed
from .rollbacks import Rollbacks
from .tables.decode import DecodeChanges, Ending
from .tables.drafts import DraftBatch
from .tables.groups import StepChanges, Tables

if TYPE_CHECKING:
    from .announcer import Announcer


class Progress:
    """Commits of one cache.

    Args:
        steps: its plans. chains: what requests add to the index. tables: where their pages are.
        announcer: told of computed tokens; None if nobody listens.
        enable_caching: whether anything is cached.

    Attributes:
        rollbacks: how far tokens may be taken back.
    """

    def __init__(
        self,
        steps: Steps,
        chains: Chains,
        tables: Tables,
        announcer: Announcer | None,
        enable_caching: bool,
    ) -> None:
        self._steps, self._chains, self._tables = steps, chains, tables
        self._announcer, self._sequences = announcer, chains.sequences
        self._batches, self._decodes = tables.batches, tables.decodes
        self._pool, self._layout = tables.pool, tables.layout
        self._enable_caching = enable_caching
        self.rollbacks = Rollbacks(chains, tables)

    def commit(self, plan: StepPlan, input_ids: Any, accepted: Any) -> Int32:
        """`KVCache.commit`."""
        if plan.__class__ is not StepPlan:
            raise ValueError(f"plan: expected a StepPlan, got {plan!r}")
        ids = as_token_ids("input_ids", input_ids)
        if plan is not self._steps.planned:
            raise ValueError(
                "plan: expected the newest plan of this cache, got another cache's, or one made "
                "before another plan or change"
            )
        if len(ids) != len(plan.positions):
            raise self.wrong_size(plan, ids)
        end = plan.changes.end if accepted is None else self.end_of(plan, accepted)
        self._pool.take(plan.changes.num_new)
        return self.finish(plan, ids, end)

    def wrong_size(self, plan: StepPlan, ids: Int32) -> ValueError:
        """The error of a commit of `plan` with more or fewer `ids`."""
        return ValueError(
            f"input_ids: expected {len(plan.positions)} tokens as planned, got {len(ids)}"
        )

    def end_of(self, plan: StepPlan, accepted: Any) -> Int64:
        """[n] tokens after a step of which `accepted` tokens stay.

        Raises:
            ValueError: as `KVCache.commit`.
        """
        changes = plan.changes
        taken = self.rollbacks.checked(changes.batch, plan.num_new_tokens, accepted)
        end: Int64 = changes.start + taken
        return end

    def finish(self, plan: StepPlan, ids: Int32, end: Int64) -> Int32:
        """Advance and publish a step whose pages are taken, up to `end` [n] tokens; returns the
        copies to run after it."""
        changes, made, ending = plan.changes, None, None
        self._steps.changed()
        if self._enable_caching:
            if isinstance(changes, DecodeChanges):
                batch = changes.batch
                made = self._sequences.feed_next(
                    batch.slots, batch.start, batch.end, ids, batch.ending
                )
            else:
                made, ending = self._feed(plan, changes, ids, end)
            if self._announcer is not None:
                self._announcer.computed(plan, ids, end)
        copies, passed = self._advance(plan, end, ending)
        if passed is not None:
            self._chains.publish(passed, made)
        return copies

    def advance(self, plan: StepPlan, end: Int64) -> tuple[Int32, Passed | None]:
        """The tokens of a step, whose pages are taken, count as computed up to `end` [n]; which
        they are is not known.

        Returns:
            ([m, 2] pages to copy after the step, what is to be published; None for nothing).
        """
        self._steps.changed()
        copies, passed = self._advance(plan, end, None)
        if passed is not None:
            self._chains.wait(passed)
        return copies, passed

    def publish(
        self, plan: StepPlan, passed: Passed | None, ids: Int32, end: Int64, gone: set[int]
    ) -> None:
        """Cache what a step completed that has advanced to `end` [n], now that its tokens are
        known; not that of the slots `gone`."""
        self._steps.changed()
        if not self._enable_caching:
            return
        changes, slots, made = plan.changes, plan.slots, None
        if isinstance(changes, DecodeChanges) and not gone:
            made = self._sequences.feed_next(slots, changes.start, end, ids, None)
        else:
            rows = np.arange(len(slots))
            if gone:
                is_gone = np.isin(slots, list(gone))
                rows, end = rows[~is_gone], np.where(is_gone, 0, end)
            self._sequences.forget_batch()
            self._sequences.feed_several(
                slots[rows], changes.start[rows], end[rows], ids, plan.cu_seqlens_q[rows]
            )
        if self._announcer is not None:
            self._announcer.computed(plan, ids, end)
        if passed is not None:
            self._chains.publish_late(passed, made)

    def _advance(
        self, plan: StepPlan, end: Int64, ending: Ending | None
    ) -> tuple[Int32, Passed | None]:
        """`advance`.

        Args:
            ending: whose segments end, if a step with drafts knows.
        """
        changes, passed = plan.changes, None
        if self._layout.drafts:
            self.rollbacks.reached(plan.slots, changes.end)
        if isinstance(changes, DecodeChanges):
            batch = changes.batch
            due: tuple[Ending, Int64, Int64] | None = None
            if not batch.age:  # its first step
                self._batches.keep(batch)
            if self._enable_caching and (self._layout.lookahead or batch.ending.slot_list):
                # Before the tables move on: whose segments end here.
                due = self._chains.due(batch)
            copies = self._decodes.commit(changes)
            if due is not None:
                passed = self._chains.passed(batch, *due)
        elif self._enable_caching:
            copies, passed = self._chains.advance(changes, end, ending)
        else:
            effects = self._tables.commit(changes, end, (NO_ROWS, NO_ROWS))
            self._tables.settle(changes, effects)
            copies = effects.copies
        self._sequences.num_computed[plan.slots] = end
        return copies, passed

    def _feed(
        self, plan: StepPlan, step: StepChanges, ids: Int32, end: Int64
    ) -> tuple[list[bytes] | None, Ending | None]:
        """Give the tokens of a step to the key chains.

        Returns:
            What `Chains` need not find out of a step with drafts: (keys of the segments that end in
            it, whose they are); None where it must.
        """
        batch, rows = step.batch, step.chunk_rows
        if isinstance(batch, DraftBatch):
            return self._sequences.feed_drafts(batch, ids, end)
        if batch is not None:
            ones = ids[plan.cu_seqlens_q[step.decode_rows]] if rows.size else ids
            self._sequences.feed_next(batch.slots, batch.start, batch.end, ones, batch.ending)
        if rows.size:
            slots, first = step.slots[rows], plan.cu_seqlens_q[rows]
            self._sequences.feed_several(slots, step.start[rows], end[rows], ids, first)
        return None, None
