"""Eviction policies: who goes first when free pages run short.

The index calls a policy whenever an entry is made or used, keeps entries in a heap by the rank it
answers, and evicts the lowest rank first, deepest first among equals. Entries that can serve no hit
any more go before every ranked entry; no policy is asked about them.
"""

from __future__ import annotations

from typing import Protocol


class Entry(Protocol):
    """What a policy may look at: a resume point, or the end of a chain in dense-only models."""

    @property
    def last_used(self) -> int:
        """Tick of the last use; ticks count admissions, commits and releases."""

    @property
    def num_uses(self) -> int:
        """Hits served so far."""

    @property
    def depth(self) -> int:
        """Segments from the start of the sequence."""


class EvictionPolicy(Protocol):
    """The whole interface of a policy."""

    def rank(self, entry: Entry) -> float:
        """Order of eviction: the lowest goes first. Called when `entry` is made and when it is used."""


class LRU:
    """Least recently used first."""

    def rank(self, entry: Entry) -> float:
        """The tick of the last use."""
        return float(entry.last_used)
