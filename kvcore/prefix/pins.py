"""Pins: cached prefixes that stay until everything unpinned is gone, or their time has passed."""

from __future__ import annotations

import math

from ..spec import as_seconds
from .index import PrefixIndex
from .tree import ResumePoint, Run, merge


class Pins:
    """Pinned prefixes of one cache, within a budget of pages.

    Args:
        index: what is cached.
        max_pages: pages of pinned entries; past it the oldest pins are demoted at once. What does
            not fit even alone is not pinned.

    Attributes:
        at_release: expiry of the pin that each slot's request gets when it is released.
    """

    def __init__(self, index: PrefixIndex, max_pages: int) -> None:
        self._index, self._max_pages = index, max_pages
        self.at_release: dict[int, float] = {}

    def pin(self, run: Run, depth: int, expiry: float) -> int:
        """Pin the boundary `depth` on the path to `run`; returns the segments pinned: 0, and all
        other pins as they were, where it does not fit."""
        index = self._index
        if not self._fits(run, depth):
            return 0
        index.pin(index.end_at(run, depth), expiry)
        while index.num_pinned_pages > self._max_pages:
            index.demote_oldest()
        return depth

    def _fits(self, run: Run, depth: int) -> bool:
        """Whether there is an entry at the boundary `depth` on the path to `run`, made now if its
        neighbours allow it, and it alone is within the budget."""
        index = self._index
        if not depth:
            return False
        end = index.end_at(run, depth)
        entry = index.point_at(end) if index.hybrid else end
        own = len(entry.pages) if isinstance(entry, ResumePoint) else 0
        fits = entry is not None and (
            entry in index.pins or depth * index.pages_per_segment + own <= self._max_pages
        )
        if not fits:
            merge(end, index.hybrid)
        return fits

    def unpin(self, run: Run, depth: int) -> bool:
        """End the pin of the boundary `depth` on the path to `run`; False if it is not pinned."""
        index = self._index
        run = index.end_at(run, depth)
        entry = run.points.get(run.depth) if index.hybrid else run
        if entry is None or entry not in index.pins:
            return False
        index.unpin(entry)
        return True

    def released(self, slot: int, run: Run, depth: int) -> None:
        """The request of `slot` ended; its prefix of `depth` segments is on the path to `run`."""
        expiry = self.at_release.pop(slot, None)
        if expiry is not None:
            self.pin(run, depth, expiry)

    def expire(self, now: float) -> int:
        """End the pins whose time has passed; returns how many."""
        expired = [entry for entry, expiry in self._index.pins.items() if expiry <= now]
        for entry in expired:
            self._index.unpin(entry)
        return len(expired)


def expiry_of(now: float, ttl: float) -> float:
    """Seconds at which a pin of `ttl` seconds from `now` on ends.

    Raises:
        ValueError: `ttl` is not positive, or `now` not a finite number.
    """
    now = as_seconds("now", now)
    if ttl == math.inf:
        return ttl
    if as_seconds("ttl", ttl) <= 0:
        raise ValueError(f"ttl: expected seconds > 0, got {ttl!r}")
    return now + ttl
