"""Pages of steps that have not advanced: `Reservations`.

They have left the pool and wait beside the tables, a record a slot. What a page is for is told by a
key (see `StepPlanner.wanted`), so that the planner finds it again, however often it is asked:

    reserve     keys that a step wants and the record lacks get pages
    arrays      the pages of all keys that the step wants; the request is in flight
    advance     the same once more, for the tables; what is left over goes back to the pool
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Int64
from ..pages import PagePool
from .planner import BLOCK_BITS, StepChanges, StepPlanner


@dataclass(slots=True)
class Reserved:
    """Pages of a request that its next step may write.

    Attributes:
        end: tokens up to which they were reserved last.
        pages: by key.
        in_flight: whether `arrays` gave them to a step.
    """

    end: int
    pages: dict[int, int] = field(default_factory=dict)
    in_flight: bool = False


class Reservations:
    """The reserved pages of all requests.

    Args:
        planner: of the steps. pool: of the pages.

    Attributes:
        by_slot: a record for each request that has any, or is in flight.
    """

    def __init__(self, planner: StepPlanner, pool: PagePool) -> None:
        self._planner, self._pool = planner, pool
        self.by_slot: dict[int, Reserved] = {}

    def missing(self, slot: int, keys: list[int]) -> list[int]:
        """Those of `keys` that have no page yet."""
        held = self.by_slot.get(slot)
        return keys if held is None else [key for key in keys if key not in held.pages]

    def add(self, slot: int, end: int, keys: list[int], pages: Iterator[int]) -> list[list[int]]:
        """Reserve the next of `pages` for each of `keys` of a request, up to token `end`; returns
        the new ones of each table but those of states."""
        rows, num_blocks = self._planner.table_rows, len(self._planner.sizes)
        given: list[list[int]] = [[] for _ in rows]
        held = self.by_slot.get(slot)
        if held is None:
            if not keys:  # nothing is lacking
                return given
            held = self.by_slot[slot] = Reserved(end)
        held.end = end
        for key in keys:
            held.pages[key] = page = next(pages)
            if key >> BLOCK_BITS < num_blocks:
                given[rows[key >> BLOCK_BITS]].append(page)
        return given

    def reach(self, slots: Int64, ends: Int64) -> Int64:
        """[n] tokens up to which the step of each request reaches: what is reserved, or `ends`."""
        reach = ends.copy()
        for i, slot in enumerate(slots.tolist()):
            held = self.by_slot.get(slot)
            if held is not None:
                reach[i] = max(held.end, int(ends[i]))
        return reach

    def pages_of(self, step: StepChanges) -> Int64:
        """The pages that a step takes.

        Raises:
            ValueError: some are not reserved.
        """
        slots, pages = step.slots.tolist(), []
        for row, key in zip(*(x.tolist() for x in self._planner.wanted(step)), strict=True):
            held = self.by_slot.get(slots[row])
            page = None if held is None else held.pages.get(key)
            if page is None:
                raise ValueError(
                    f"ends: expected tokens whose pages are reserved, got {step.end[row]} of "
                    f"slot {slots[row]}: call `reserve` first"
                )
            pages.append(page)
        return np.array(pages, dtype=np.int64)

    def launch(self, slots: Int64, ends: Int64) -> None:
        """The requests are in a step up to `ends` [n] from now on."""
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            held = self.by_slot.get(slot)
            if held is None:  # nothing was lacking
                held = self.by_slot[slot] = Reserved(end)
            held.end, held.in_flight = end, True

    def end(self, slots: list[int], used: Int64) -> None:
        """The requests have no step any more; their pages but those `used` are free again."""
        held = [self.by_slot.pop(slot).pages for slot in slots if slot in self.by_slot]
        taken = set(used.tolist())
        left = [page for each in held if each for page in each.values() if page not in taken]
        if left:
            self._pool.put(np.array(left, dtype=np.int64))

    def expect_not_in_flight(self, slot: int, name: str) -> None:
        """Raise ValueError if a request is in a step that has not advanced."""
        held = self.by_slot.get(slot)
        if held is not None and held.in_flight:
            raise ValueError(
                f"{name}: expected a request that no step holds, got slot {slot}, which is in a "
                "step that has not advanced: advance it first, to where it was if the step is not "
                "run"
            )
