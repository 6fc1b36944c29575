"""An eviction policy that others hear through: of admissions, and of what it evicts."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TypeGuard

from ..policies.base import Entry, EvictionPolicy
from ..prefix.eviction import EvictableTree
from ..prefix.tree import ResumePoint, Run


class Watched:
    """Stands in front of the policy of an index.

    *Spare* entries go before all others: first those that are *kept* by the next place, since to
    lose them costs a copy at most, then those that somebody wants to leave. What the next place
    evicts is spare no more.

    Args:
        policy: the one that decides.
        on_pop: told of each entry that it takes out.
        on_asked: told of each prompt, after the policy.
        on_discard: told of each entry that may not be evicted any more, or is gone.

    Attributes:
        kept_pages: that the eviction of all that is kept would free, as seen when each became so,
            or by `count`.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        on_pop: Callable[[Entry], None],
        on_asked: Callable[[bytes, int, Sequence[int]], None] | None = None,
        on_discard: Callable[[Entry], None] | None = None,
    ) -> None:
        self.policy = policy
        self._on_pop, self._on_asked, self._on_discard = on_pop, on_asked, on_discard
        self._kept: OrderedDict[Entry, int] = OrderedDict()  # and the pages of each
        self._leaving: OrderedDict[Entry, None] = OrderedDict()
        self.kept_pages = 0

    def add(self, entry: Entry) -> None:
        """As of the policy; it is not spare."""
        self.needed(entry)
        self.policy.add(entry)

    def discard(self, entry: Entry) -> None:
        """As of the policy."""
        self.needed(entry)
        if self._on_discard is not None:
            self._on_discard(entry)
        self.policy.discard(entry)

    def spare(self, entry: Entry, *, kept: bool = False) -> None:
        """`entry`, which was added, is to go first; `kept`: the next place has it."""
        if not kept and entry in self._kept:
            return self._kept.move_to_end(entry, last=False)
        self.needed(entry)
        if kept:
            self._kept[entry] = pages = entry.freed
            self.kept_pages += pages
        else:
            self._leaving[entry] = None

    def is_spare(self, entry: Entry) -> bool:
        """Whether `entry` goes before others."""
        return entry in self._kept or entry in self._leaving

    def needed(self, entry: Entry) -> None:
        """`entry` is the only copy now, if it was a spare one."""
        self.kept_pages -= self._kept.pop(entry, 0)
        self._leaving.pop(entry, None)

    def count(self) -> int:
        """`kept_pages`, counted anew: neighbours came or went."""
        for entry in self._kept:
            self._kept[entry] = entry.freed
        self.kept_pages = sum(self._kept.values())
        return self.kept_pages

    def pop(self) -> Entry | None:
        """A spare entry if there is one, as `Watched` says; else as of the policy."""
        spare = next(chain(self._kept, self._leaving), None)
        if spare is None:
            entry = self.policy.pop()
        else:
            entry = spare
            self.discard(entry)
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

    def coming(self, n: int, *, kept: bool = True) -> list[Entry] | None:
        """As of the policy; None where it cannot tell.

        Args:
            kept: those too that the next place has.
        """
        tell = getattr(self.policy, "coming", None)
        if tell is None:
            return None
        first = list(islice(chain(self._kept if kept else (), self._leaving), n))
        if len(first) == n:
            return first
        others: list[Entry] = tell(n if kept else n + len(self._kept))
        if not (self._kept or self._leaving):
            return others
        return [*first, *(e for e in others if not self.is_spare(e))][:n]

    def is_kept(self, entry: Entry) -> bool:
        """Whether the next place has `entry`, which goes first therefore."""
        return entry in self._kept


def coming(index: EvictableTree, n: int, *, kept: bool = True) -> list[Run | ResumePoint]:
    """The entries of `index` that eviction would take next, at most `n`, without any effect.

    Args:
        kept: as of `Watched.coming`.
    """
    policy = index.policy
    found = policy.coming(n, kept=kept) if isinstance(policy, Watched) else None
    if found is None:
        entries: list[Run | ResumePoint] = []
        for run in index.runs():
            if index.hybrid:
                entries += run.points.values()
            elif not (run.locks or run.children):
                entries.append(run)
        if not kept and isinstance(policy, Watched):
            entries = [entry for entry in entries if not policy.is_kept(entry)]
        found = heapq.nsmallest(n, entries, key=lambda e: (e.last_used, -e.depth))
    return [entry for entry in found if is_there(entry) and entry not in index.pins]


def is_there(entry: Entry) -> TypeGuard[Run | ResumePoint]:
    """Whether `entry` is still one of its index."""
    if isinstance(entry, ResumePoint):
        return entry.run is not None
    return isinstance(entry, Run) and entry.parent is not None
