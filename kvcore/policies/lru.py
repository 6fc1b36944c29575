"""Least recently used first: the baseline that the other policies are compared with."""

from __future__ import annotations

from .base import Entry, Ranked


class LRU(Ranked):
    """Evict the least recently used entry first."""

    def rank(self, entry: Entry) -> float:
        """The tick of the last use."""
        return entry.last_used
