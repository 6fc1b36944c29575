"""Pins: cached prefixes that stay until everything unpinned is gone, or their time has passed."""

from __future__ import annotations

import math

from ..spec import as_seconds
from .index import PrefixIndex
from .tree import ResumePoint, Run, merge, path_to


class Pins:
    """Pinned prefixes of one cache, within a budget of pages.

    Args:
        index: what is cached.
        max_pages: pages of pinned entries; past it pins are demoted at once, those of the lowest
            priority first, of these the oldest. What does not fit even then is not pinned.

    Attributes:
        at_release: expiry of the pin that each slot's request gets when it is released.
    """

    def __init__(self, index: PrefixIndex, max_pages: int) -> None:
        self._index, self._max_pages = index, max_pages
        self.at_release: dict[int, float] = {}

    def pin(self, run: Run, depth: int, expiry: float, priority: int = 0) -> int:
        """Pin the boundary `depth` on the path to `run`; returns the segments pinned: 0, and all
        other pins as they were, where it does not fit."""
        index = self._index
        if not self.fits(run, depth, priority):
            return 0
        index.pin(index.end_at(run, depth), expiry, priority)
        while index.num_pinned_pages > self._max_pages:
            index.demote_oldest()
        return depth

    def fits(self, run: Run, depth: int, priority: int = 0) -> bool:
        """Whether there is an entry at the boundary `depth` on the path to `run`, made now if its
        neighbours allow it, and it is within the budget beside what has a higher priority."""
        index = self._index
        if not depth:
            return False
        end = index.end_at(run, depth)
        entry = index.point_at(end) if index.hybrid else end
        fits = entry is not None and (entry in index.pins or self._fits(entry, end, priority))
        if not fits:
            merge(end, index.hybrid)
        return fits

    def _fits(self, entry: Run | ResumePoint, end: Run, priority: int) -> bool:
        index, nodes = self._index, set(path_to(end))
        own = len(entry.pages) if isinstance(entry, ResumePoint) else 0
        added = sum(node.length for node in nodes if not node.pins) * index.pages_per_segment
        if index.num_pinned_pages + added + own <= self._max_pages:
            return True
        for other in index.pins:
            if index.priority(other) > priority:
                if isinstance(other, ResumePoint):
                    assert other.run is not None
                    own += len(other.pages)
                    nodes.update(path_to(other.run))
                else:
                    nodes.update(path_to(other))
        segments = sum(node.length for node in nodes)
        return segments * index.pages_per_segment + own <= self._max_pages

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
