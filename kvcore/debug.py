"""What `KVCache(debug=True)` checks in each call: its thread, prompt tokens, and page 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Int32, as_token_ids
from .plan import OutOfPages, StepPlan
from .prefix.lookup import Match
from .spec import NULL_BLOCK
from .step import Step

if TYPE_CHECKING:
    from .cache import KVCache

# All that reads or changes what a change may be in the middle of.
CALLS = (
    "match",
    "admit",
    "cut",
    "needed",
    "plan",
    "begin",
    "commit",
    "rollback",
    "lowest_rollback",
    "release",
    "pin",
    "pin_request",
    "unpin",
    "expire_pins",
    "clear",
    "announce",
    "evict",
    "evict_pages",
    "restore_pages",
    "reset",
    "take_deltas",
    "check_invariants",
)
STEP_CALLS = ("add", "drop", "plan", "advance", "commit", "cancel")


class Watch:
    """Stands in front of the calls of one cache. A cache without it pays nothing.

    Args:
        cache: whose methods are replaced.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._admit = cache.admit
        self._plan, self._commit = cache.plan, cache.commit
        self._begin = cache.begin
        self._prompts: dict[int, Int32] = {}  # by slot
        groups = [cache.layout.groups[g] for g, _ in cache.layout.tables]
        self._names = [group.name for group in groups]
        self._block_sizes = np.array([[group.block_size] for group in groups])
        self._states = [t for t, group in enumerate(groups) if group.kind == "state"]
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # which is in a call
        self._call = ""
        for name in CALLS:
            setattr(cache, name, self._alone(name, getattr(self, name, getattr(cache, name))))

    def _alone(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which raises where another thread is in a call."""

        @wraps(call)
        def alone(*args: Any, **kwargs: Any) -> Any:
            me, other = threading.current_thread(), self._thread
            if other is me:  # a call inside of a call
                return call(*args, **kwargs)
            if not self._lock.acquire(blocking=False):
                raise RuntimeError(
                    f"{name}: expected one thread at a time, got thread {me.name!r} while thread "
                    f"{other.name if other else 'another'!r} is in {self._call}"
                )
            self._thread, self._call = me, name
            try:
                return call(*args, **kwargs)
            finally:
                self._thread = None
                self._lock.release()

        return alone

    def admit(self, request_id: Hashable, match: Match, *, resumed: bool = False) -> int:
        """`KVCache.admit`; remembers the prompt."""
        slot = self._admit(request_id, match, resumed=resumed)
        assert match.prompt.tokens is not None
        self._prompts[slot] = match.prompt.tokens
        return slot

    def plan(self, slots: Any, num_new_tokens: Any) -> StepPlan | OutOfPages:
        """`KVCache.plan`; no row that it writes may be on page 0."""
        plan = self._plan(slots, num_new_tokens)
        if isinstance(plan, StepPlan):
            self._check_rows(plan)
        return plan

    def begin(self) -> Step:
        """`KVCache.begin`; the calls of the step are watched as those of the cache."""
        step = self._begin()
        make, commit = step.plan, step.commit

        def plan() -> StepPlan:
            made = make()
            self._check_rows(made)
            return made

        def checked_commit(input_ids: Any, accepted: Any = None) -> Int32:
            ids = as_token_ids("input_ids", input_ids)
            if step.is_planned and len(ids) == len(make().positions):  # else it is refused
                self._check_tokens(make(), ids, step.slots)
            copies = commit(input_ids, accepted)
            assert np.all(copies[:, 1] != NULL_BLOCK), "a copy to page 0"
            return copies

        checked = {"plan": plan, "commit": checked_commit}
        for name in STEP_CALLS:
            setattr(step, name, self._alone(name, checked.get(name, getattr(step, name))))
        return step

    def commit(self, plan: StepPlan, input_ids: Any, accepted: Any = None) -> Int32:
        """`KVCache.commit`; tokens of a prompt must be those that it was admitted with, as the keys
        say."""
        ids = as_token_ids("input_ids", input_ids)
        if plan is self._cache._steps.planned and len(ids) == len(
            plan.positions
        ):  # else it is refused
            self._check_tokens(plan, ids, set(plan.slots.tolist()))
        copies = self._commit(plan, input_ids, accepted)
        assert np.all(copies[:, 1] != NULL_BLOCK), "a copy to page 0"
        return copies

    def _check_rows(self, plan: StepPlan) -> None:
        """No row that a plan writes may be on page 0."""
        pages = plan.slot_mapping // self._block_sizes
        for t in (pages == NULL_BLOCK).any(axis=1).nonzero()[0]:
            raise AssertionError(f"a row of {self._names[t]} on page 0")
        assert (plan.state_pages[self._states] != NULL_BLOCK).all(), "a live state on page 0"
        assert (plan.copies[:, 1] != NULL_BLOCK).all(), "a copy to page 0"

    def _check_tokens(self, plan: StepPlan, ids: Int32, slots: set[int]) -> None:
        """Raise ValueError unless those of `ids` that prompts have, of `slots`, are theirs."""
        cu = plan.cu_seqlens_q.tolist()
        for i, slot in enumerate(plan.slots.tolist()):
            prompt = self._prompts.get(slot)
            if prompt is None or slot not in slots:
                continue
            start = int(plan.positions[cu[i]])
            known = prompt[start : start + cu[i + 1] - cu[i]]
            wrong = (ids[cu[i] :][: len(known)] != known).nonzero()[0]
            if wrong.size:
                at = int(wrong[0])
                raise ValueError(
                    f"input_ids: expected {known[at]} at position {start + at} of slot {slot}, "
                    f"as in its prompt, got {ids[cu[i] + at]}"
                )
