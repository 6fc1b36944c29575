"""Pages of steps that have not advanced: they have left the pool and are in no table yet.

`reserve` gets pages for block references (see `StepPlanner.wanted`). `arrays` and `advance` look up
those that the step wants. `advance` returns the others to the pool.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..arguments import refusal
from ..arrays import Flags, Int64
from ..pages import PagePool
from .planner import BLOCK_BITS, StepChanges, StepPlanner


class Reservations:
    """The reserved pages of all requests.

    Attributes:
        pages: slot -> block reference -> page.
        until: [max_requests] int64 tokens up to which pages were reserved last; 0 without a step.
        in_flight: [max_requests] bool, in a step that `KVCache.arrays` made.
    """

    def __init__(self, planner: StepPlanner, pool: PagePool, max_requests: int) -> None:
        self._planner, self._pool = planner, pool
        self.pages: dict[int, dict[int, int]] = {}
        self.until: Int64 = np.zeros(max_requests, dtype=np.int64)
        self.in_flight: Flags = np.zeros(max_requests, dtype=np.bool_)

    def missing(self, slot: int, refs: list[int]) -> list[int]:
        held = self.pages.get(slot)
        return refs if held is None else [ref for ref in refs if ref not in held]

    def add(self, slot: int, end: int, refs: list[int], pages: Iterator[int]) -> list[list[int]]:
        """Reserve the next of `pages` for each of `refs` of a request, up to token `end`; returns
        the new pages of each group (none of states)."""
        groups, num_tables = self._planner.table_groups, len(self._planner.sizes)
        given: list[list[int]] = [[] for _ in groups]
        if not refs:  # nothing is lacking
            if self.until.item(slot):
                self.until[slot] = end
            return given
        self.until[slot] = end
        held = self.pages.setdefault(slot, {})
        for ref in refs:
            held[ref] = page = next(pages)
            if ref >> BLOCK_BITS < num_tables:
                given[groups[ref >> BLOCK_BITS]].append(page)
        return given

    def step_ends(self, slots: Int64, ends: Int64) -> Int64:
        """[n] tokens after the step of each request: what is reserved, or `ends`."""
        return np.maximum(self.until[slots], ends)

    def pages_of(self, changes: StepChanges) -> Int64:
        slots, pages = changes.slots.tolist(), []
        for i, ref in zip(*(x.tolist() for x in self._planner.wanted(changes)), strict=True):
            page = self.pages.get(slots[i], {}).get(ref)
            if page is None:
                got = f"{changes.end[i]} of slot {slots[i]}: call `reserve` first"
                raise refusal("ends", "tokens whose pages are reserved", got)
            pages.append(page)
        return np.array(pages, dtype=np.int64)

    def launch(self, slots: Int64, ends: Int64) -> None:
        self.until[slots], self.in_flight[slots] = ends, True

    def end(self, slots: Int64, used: Int64) -> None:
        """The requests have no step any more; their pages but those `used` are free again."""
        self.until[slots], self.in_flight[slots] = 0, False
        held = [self.pages.pop(slot) for slot in slots.tolist() if slot in self.pages]
        taken = set(used.tolist())
        left = [page for each in held for page in each.values() if page not in taken]
        if left:
            self._pool.put(np.array(left, dtype=np.int64))

    def expect_not_in_flight(self, slots: Int64, name: str) -> None:
        flying = self.in_flight[slots]
        if np.count_nonzero(flying):
            raise refusal(
                name,
                "a request that no step holds",
                f"slot {slots[flying][0]}, which is in a step that has not advanced: advance it "
                "first, to where it was if the step is not run",
            )
