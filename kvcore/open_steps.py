"""The steps of a cache that are open: `OpenSteps` (see `step` for the life of one)."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Int32, Int64, as_ints
from .debug import STEP_CALLS
from .part import Part
from .plan import OutOfPages, StepPlan
from .prefix.chains import Publication
from .step import Step

if TYPE_CHECKING:
    from .cache import KVCache


class OpenSteps:
    """The steps of one cache that are not over, and what keeps them from one another's pages.

    Args:
        cache: the cache.

    Attributes:
        building: the step to which requests may be added.
        by_slot: the parts of steps that have not advanced.
        advanced: steps that have, and are not committed; in that order.
        quiet: a token at a position that this does not divide starts no block.
        plain: whether nothing but a block that starts takes a page.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache, self._chains, self._tables = cache, cache._chains, cache._tables
        self.layout, self.pool, self.sequences = cache.layout, cache.pool, cache.sequences
        self.max_requests, self.active = self.sequences.max_requests, self.sequences.active
        self.num_computed = self.sequences.num_computed
        self.max_model_len, self.most_lookahead = cache.max_model_len, cache.max_draft_tokens
        self.quiet = gcd(*(g.block_size for g in self.layout.groups))
        self.plain = not (self._tables.states or cache.replay_tokens is not None)
        # Tokens of a request that start at most one block a table, all of which survives the step.
        sizes = [g.block_size for g in self.layout.groups if g.kind != "state"]
        self._few = min([self.most_lookahead + 1, self.layout.alignment, *sizes])
        self._alignment, self._replays_stop = cache.alignment, self._chains.replays.stop
        self.building: Step | None = None
        self.by_slot: dict[int, Part] = {}
        self.advanced: list[Step] = []

    def begin(self) -> Step:
        """`KVCache.begin`."""
        if self.building is not None:
            if self.building.parts:
                raise ValueError(
                    "begin: expected no step that is being built: ask for its plan, or cancel it"
                )
            self.building.cancel()
        self.cache._planned = None  # the newest plan may need what is reserved from here on
        self.building = step = Step(self)
        if self.cache._checks is not None:
            self.cache._checks.expect_one_thread(step, STEP_CALLS)
        return step

    # What a request needs.

    def is_quiet(self, slot: int, start: int) -> bool:
        """Whether a request that starts no block takes no page for its next token either."""
        states = self._tables.states
        if states:  # which rule replays out
            return bool((start + 1) % self._alignment and self._tables.has_states(slot))
        return start >= self._replays_stop.item(slot)

    def reserve(self, slot: int, start: int, num: int) -> int | OutOfPages:
        """Reserve pages for `num` tokens of a request from `start` on; returns how many."""
        cache, tables, pool, changes = self.cache, self._tables, self.pool, None
        is_few = num <= self._few and start >= self._replays_stop.item(slot)
        if is_few and tables.has_states(slot):
            need = tables.needed_by_few(slot, start, num, cache.enable_caching)
        else:
            changes = cache._changes_of([slot], [num])
            need = changes.num_new
        free = pool.num_available
        if need > free:
            if need > free + cache.index.num_evictable:
                changes = changes or cache._changes_of([slot], [num])
                return cache._lacking(need, cache._planner.per_group(changes))
            cache._evict(need - free)
        pool.num_reserved += need
        return need

    def planned(self, step: Step) -> StepPlan:
        """Plan a step, and take its pages; it is not built on."""
        cache, parts, reserved = self.cache, step.parts, step.num_reserved
        slots = np.fromiter([p.slot for p in parts], np.int64, len(parts))
        counts = np.fromiter([p.num_new_tokens + p.lookahead for p in parts], np.int64, len(parts))
        self.pool.num_reserved -= reserved
        try:
            changes = cache._changes_of(slots, counts)
            assert changes.num_new <= reserved, "pages of parts"
            plan = cache._arrays(changes)
        except BaseException:
            self.pool.num_reserved += reserved
            raise
        if cache._checks is not None:
            cache._checks.expect_pages(plan)
        cache._planned = self.building = None
        step.pages = self.pool.peek(plan.changes.num_new)
        self.pool.take(plan.changes.num_new)
        return plan

    # What becomes of steps.

    def advance(self, plan: StepPlan, end: Int64) -> tuple[Int32, Publication | None]:
        """The tokens of a step, whose pages are taken, count as computed up to `end` [n]; which
        they are is not known.

        Returns:
            ([m, 2] pages to copy after the step, what is to be published; None for nothing).
        """
        self.cache._changed()
        copies, publication = self.cache._advance(plan, end)
        if publication is not None:
            self._chains.wait(publication)
        return copies, publication

    def finish(self, plan: StepPlan, ids: Int32, end: Int64) -> Int32:
        """Advance and publish a step up to `end` [n] tokens; returns the copies to run after it."""
        cache = self.cache
        cache._changed()
        cache._feed(plan, ids, end)
        copies, publication = cache._advance(plan, end)
        if publication is not None:
            self._chains.publish(publication)
        return copies

    def publish(
        self,
        plan: StepPlan,
        publication: Publication | None,
        ids: Int32,
        end: Int64,
        gone: set[int],
    ) -> None:
        """Cache what a step completed that has advanced to `end` [n], now that its tokens are
        known; not that of the slots `gone`."""
        cache = self.cache
        cache._changed()
        if not cache.enable_caching:
            return
        changes, slots = plan.changes, plan.slots
        rows = np.arange(len(slots))
        if gone:
            is_gone = np.isin(slots, list(gone))
            rows, end = rows[~is_gone], np.where(is_gone, 0, end)
        self.sequences.feed(
            slots[rows], changes.start[rows], end[rows], ids, plan.cu_seqlens_q[rows]
        )
        if cache._announcer is not None:
            cache._announcer.computed(plan, ids, end)
        if publication is not None:
            self._chains.publish_late(publication)

    def forget(self, publication: Publication, slot: int) -> None:
        """Take a request that is released out of what a step is to publish."""
        self._chains.forget(publication, slot)

    def has_advanced(self, step: Step) -> None:
        """`step` has: its requests may be in other steps, and released."""
        self._let_go(step)
        self.advanced.append(step)

    def is_over(self, step: Step) -> None:
        """`step` is committed or cancelled."""
        if step in self.advanced:
            self.advanced.remove(step)
            return
        if step is self.building:
            self.building = None
        self._let_go(step)

    def give_back(self, step: Step) -> None:
        """`step` does not take place: what it has of the pool is free again."""
        self.cache._planned = None  # it names pages that lie deeper in the stack now
        if step is self.building:
            self.pool.num_reserved -= step.num_reserved
        self.pool.put(step.pages)

    def _let_go(self, step: Step) -> None:
        """The requests of `step` may be in other steps."""
        slots = step.slots
        if len(slots) == len(self.by_slot):
            self.by_slot.clear()
        for slot in slots if self.by_slot else ():
            del self.by_slot[slot]

    # What others may do.

    def busy(self, name: str, slot: int) -> ValueError:
        """The error of a call that must wait until a step has advanced."""
        return ValueError(
            f"{name}: expected a request that no step holds, got slot {slot}, which is in a step "
            "that has not advanced: drop it, or advance, commit or cancel that step first"
        )

    def leave(self, slot: int, name: str) -> None:
        """The request of `slot` is about to be released.

        Raises:
            ValueError: it is in a step that has not advanced.
        """
        if slot in self.by_slot:
            raise self.busy(name, slot)
        for step in self.advanced:
            step.leave(slot)

    def expect_settled(self, slot: int) -> None:
        """Raise ValueError if `slot` is in a step that is not committed."""
        if slot in self.by_slot:
            raise self.busy("slot", slot)
        if any(slot in step.slots for step in self.advanced):
            raise ValueError(
                f"slot: expected a request whose steps are committed, got slot {slot}, of which "
                "one has advanced only"
            )

    def expect_none_of(self, slots: Any) -> None:
        """Raise ValueError, for `KVCache.plan`, if a step is being built, or has one of `slots`."""
        if self.building is not None and self.building.parts:
            raise ValueError(
                "plan: expected no step that is being built: ask for its plan, or cancel it"
            )
        for slot in as_ints("slots", slots).ravel().tolist():
            self.expect_settled(slot)

    def expect_in_order(self, step: Step) -> None:
        """Raise ValueError if an earlier step of a request of `step` is not committed."""
        for older in self.advanced:
            if older is step:
                return
            both = older.slots & step.slots
            if both:
                raise ValueError(
                    f"commit: expected the steps of a request in their order, got a later one of "
                    f"slot {min(both)} before one that has advanced"
                )

    def taken(self) -> Iterator[Int64]:
        """Pages of steps that are planned and have not advanced."""
        steps = {id(part._step): part._step for part in self.by_slot.values()}
        for step in steps.values():
            yield step.pages
