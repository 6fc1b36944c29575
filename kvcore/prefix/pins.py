"""Pins: cached prefixes that are evicted after all others, until their time has passed."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..arguments import as_seconds, refusal
from .tree import ResumePoint, Run, path_to

if TYPE_CHECKING:
    from .index import PrefixIndex


class Pins:
    """Pinned entries of one index, within a budget of pages; beyond it the oldest pins are demoted.

    Attributes:
        num_segments, num_point_pages: segments on the paths to pinned entries; pages of their
            points.
        num_demoted: pins that ended early, for room.
    """

    def __init__(self, index: PrefixIndex, max_pages: int) -> None:
        self._index, self._max_pages = index, max_pages
        self._expiry: OrderedDict[Run | ResumePoint, float] = OrderedDict()  # the oldest pin first
        self.num_segments = self.num_point_pages = self.num_demoted = 0

    def __contains__(self, entry: Run | ResumePoint) -> bool:
        return entry in self._expiry

    def __iter__(self) -> Iterator[Run | ResumePoint]:
        return iter(self._expiry)

    def __len__(self) -> int:
        return len(self._expiry)

    @property
    def num_pages(self) -> int:
        """Pages of pinned entries, and dense pages of the prefixes that end in them."""
        return self.num_segments * self._index.pages_per_segment + self.num_point_pages

    def pin(self, run: Run, depth: int, expiry: float) -> int:
        """Pin the entry at `depth` on the path to `run`, or renew its pin as the newest. Returns
        the pinned segments; 0 without an entry at this depth, or if it alone exceeds the budget."""
        index = self._index
        if not depth:
            return 0
        end = index.end_at(run, depth)
        entry = index.point_at(end) if index.hybrid else end
        own = len(entry.pages) if isinstance(entry, ResumePoint) else 0
        fits = depth * index.pages_per_segment + own <= self._max_pages
        if entry is None or not (fits or entry in self):
            index.merge(end)
            return 0
        if entry not in self:
            self._add(entry, end)
        self._expiry[entry] = expiry
        self._expiry.move_to_end(entry)
        while self.num_pages > self._max_pages:
            self.demote_oldest()
        return depth

    def _add(self, entry: Run | ResumePoint, run: Run) -> None:
        for node in path_to(run):
            if node.pins == 0:
                self.num_segments += node.length
            node.pins += 1
        if isinstance(entry, ResumePoint):
            self.num_point_pages += len(entry.pages)
        self._index.withdraw(entry)

    def remove(self, entry: Run | ResumePoint) -> None:
        index = self._index
        del self._expiry[entry]
        run = entry.run if isinstance(entry, ResumePoint) else entry
        assert run is not None
        for node in path_to(run):
            node.pins -= 1
            if node.pins == 0:
                self.num_segments -= node.length
        if isinstance(entry, ResumePoint):
            self.num_point_pages -= len(entry.pages)
            index.offer(entry)
        else:
            index.became_leaf(entry)
        index.merge(run)

    def demote_oldest(self) -> None:
        self.remove(next(iter(self)))
        self.num_demoted += 1

    def unpin(self, run: Run, depth: int) -> bool:
        index = self._index
        run = index.end_at(run, depth)
        entry = run.points.get(run.depth) if index.hybrid else run
        if entry is None or entry not in self:
            return False
        self.remove(entry)
        return True

    def expire(self, now: float) -> int:
        expired = [entry for entry, expiry in self._expiry.items() if expiry <= now]
        for entry in expired:
            self.remove(entry)
        return len(expired)


def expiry_of(now: float, ttl: float) -> float:
    now = as_seconds("now", now)
    if ttl == math.inf:
        return ttl
    if as_seconds("ttl", ttl) <= 0:
        raise refusal("ttl", "seconds > 0", repr(ttl))
    return now + ttl
