"""Checks of `KVCache(debug=True)`: one thread at a time, tokens of prompts, and page 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Int32
from .spec import NULL_BLOCK, Layout

if TYPE_CHECKING:
    from .plan import StepPlan

# Calls that read numbers which never change, or may be a call old.
FREE = ("table", "slot_of", "stats", "describe")


class Checks:
    """Checks of the calls of one cache.

    Args:
        layout: the groups of the cache.
        owner: the cache, whose methods this wraps: RuntimeError if another thread is in a call.

    Attributes:
        prompts: prompt tokens of the request in each slot.
    """

    def __init__(self, layout: Layout, owner: object) -> None:
        self.prompts: dict[int, Int32] = {}
        groups = layout.groups
        self._names = [group.name for group in groups]
        self._block_sizes = np.array([[group.block_size] for group in groups])
        self._states = [t for t, group in enumerate(groups) if group.kind == "state"]
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # in a call now
        self._call = ""
        for name, method in vars(type(owner)).items():
            if name[0] != "_" and callable(method) and name not in FREE:
                setattr(owner, name, self._alone(name, getattr(owner, name)))

    def _alone(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
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

    def expect_pages(self, plan: StepPlan) -> None:
        """Raise AssertionError if a step would write a row, a state or a copy to page 0."""
        pages = plan.slot_mapping // self._block_sizes
        for t in (pages == NULL_BLOCK).any(axis=1).nonzero()[0]:
            raise AssertionError(f"a row of {self._names[t]} on page 0")
        assert (plan.state_pages[self._states] != NULL_BLOCK).all(), "a live state on page 0"
        assert (plan.copies[:, 1] != NULL_BLOCK).all(), "a copy to page 0"

    def expect_tokens(
        self, name: str, slots: list[int], start: list[int], counts: list[int], ids: Int32
    ) -> None:
        """Raise ValueError if `ids`, `counts` [n] from `start` [n] on, differ from the prompts."""
        first = 0
        for slot, begin, n in zip(slots, start, counts, strict=True):
            known = self.prompts[slot][begin : begin + n]
            wrong = (ids[first:][: len(known)] != known).nonzero()[0]
            if wrong.size:
                at = int(wrong[0])
                raise ValueError(
                    f"{name}: expected {known[at]} at position {begin + at} of slot {slot}, "
                    f"as in its prompt, got {ids[first + at]}"
                )
            first += n
