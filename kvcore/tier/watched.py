"""An eviction policy that others hear through: of admissions, and of what it evicts."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeGuard

from ..policies.base import Entry, EvictionPolicy
from ..prefix.eviction import EvictableTree
from ..prefix.tree import ResumePoint, Run


class Watched:
    """Stands in front of the policy of an index.

    *Spare* entries go before all others: those that another place has as well, since to lose them
    costs a copy at most, and those that somebody wants to leave. What another place evicts is spare
    no more.

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
        self._on_pop, self._on_asked = on_pop, on_asked
        self._spare: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        """As of the policy; it is not spare."""
        self._spare.pop(entry, None)
        self.policy.add(entry)

    def discard(self, entry: Entry) -> None:
        """As of the policy."""
        self._spare.pop(entry, None)
        self.policy.discard(entry)

    def spare(self, entry: Entry) -> None:
        """`entry`, which was added, is to go first."""
        self._spare[entry] = None

    def is_spare(self, entry: Entry) -> bool:
        """Whether `entry` goes before others."""
        return entry in self._spare

    def needed(self, entry: Entry) -> None:
        """`entry` is the only copy now, if it was a spare one."""
        self._spare.pop(entry, None)

    def pop(self) -> Entry | None:
        """The entry that has been spare for longest; else as of the policy."""
        if self._spare:
            entry: Entry | None = self._spare.popitem(last=False)[0]
            assert entry is not None
            self.policy.discard(entry)
        else:
            entry = self.policy.pop()
        if entry is not None:
            self._on_pop(entry)
        return entry

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """As of the policy."""
        self.policy.asked(keys, hit, kept)
        if self._on_asked is not None:
            self._on_asked(keys, hit, kept)

    def hinted(self, entry: Entry, intent: str) -> None:
        """The policy hears of a hint, if it wants to."""
        tell = getattr(self.policy, "hinted", None)
        if tell is not None:
            tell(entry, intent)

    def chance(self, entry: Entry) -> float | None:
        """As of the policy; None where it cannot tell."""
        tell = getattr(self.policy, "chance", None)
        return None if tell is None else tell(entry)

    def coming(self, n: int) -> list[Entry] | None:
        """As of the policy; None where it cannot tell."""
        tell = getattr(self.policy, "coming", None)
        if tell is None:
            return None
        first = list(islice(self._spare, n))
        if len(first) == n:
            return first
        others: list[Entry] = tell(n)
        return [*first, *(e for e in others if e not in self._spare)] if first else others


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
    return [entry for entry in found if is_there(entry) and entry not in index.pins]


def is_there(entry: Entry) -> TypeGuard[Run | ResumePoint]:
    """Whether `entry` is still one of its index."""
    if isinstance(entry, ResumePoint):
        return entry.run is not None
    return isinstance(entry, Run) and entry.parent is not None
