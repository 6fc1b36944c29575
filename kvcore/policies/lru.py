"""Least recently used first: the baseline that the other policies are compared with."""

from __future__ import annotations

from .base import Entry, Ranked


class LRU(Ranked):
    """The entry goes first whose last use is longest ago. Nothing is learned."""

    def rank(self, entry: Entry) -> float:
        """The tick of the last use."""
        return entry.last_used
