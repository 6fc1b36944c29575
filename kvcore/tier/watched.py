"""An eviction policy that others hear through: of admissions, and of what it evicts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import islice

from ..policies.base import Entry, EvictionPolicy
from ..prefix.eviction import EvictableTree
from ..prefix.tree import ResumePoint, Run


class Watched:
    """Stands in front of the policy of an index.

    Args:
        policy: the one that decides.
        on_pop: told of each entry that it takes out.
        on_asked: told of each prompt, after the policy.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        on_pop: Callable[[Entry], None],
        on_asked: Callable[[bytes, int, Sequence[int]], None] | None = None,
    ) -> None:
        self.policy = policy
        self.add, self.discard = policy.add, policy.discard
        self._pop, self._asked = policy.pop, policy.asked
        self._on_pop, self._on_asked = on_pop, on_asked

    def pop(self) -> Entry | None:
        """As of the policy."""
        entry = self._pop()
        if entry is not None:
            self._on_pop(entry)
        return entry

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """As of the policy."""
        self._asked(keys, hit, kept)
        if self._on_asked is not None:
            self._on_asked(keys, hit, kept)

    def coming(self, n: int) -> list[Entry] | None:
        """As of the policy; None where it cannot tell."""
        tell = getattr(self.policy, "coming", None)
        return None if tell is None else list(islice(tell(n), n))


def coming(index: EvictableTree, n: int) -> list[Run | ResumePoint]:
    """The entries of `index` that eviction would take next, at most `n`, without any effect."""
    policy = index.policy
    found = policy.coming(n) if isinstance(policy, Watched) else None
    if found is None:
        entries: list[Run | ResumePoint] = []
        for run in index.runs():
            if index.hybrid:
                entries += run.points.values()
            elif not (run.locks or run.children):
                entries.append(run)
        found = heapq.nsmallest(n, entries, key=lambda e: (e.last_used, -e.depth))
    return [
        entry
        for entry in found
        if entry not in index.pins
        and (
            (isinstance(entry, ResumePoint) and entry.run is not None)
            or (isinstance(entry, Run) and entry.parent is not None)
        )
    ]
