"""Interface of eviction policies: `Entry` and `EvictionPolicy`; the base class `Ranked`; `LRU`.

An entry can serve a hit by itself: a resume point, or the end of a chain in models with only dense
groups. The shortest policy is a subclass of `Ranked` that gives entries a rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, Protocol, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])
R = TypeVar("R", bound="Ranked")
SHORT = 64  # items of a heap


class Entry(Protocol):
    """Cached entry as a policy sees it. Entries are compared and hashed by identity."""

    @property
    def key(self) -> bytes:
        """Key of the prefix that ends here; the same if the entry is cached again."""

    @property
    def last_used(self) -> int:
        """Tick of the last use: a count of calls such as `admit`, `commit` and `release`."""

    @property
    def num_uses(self) -> int:
        """Hits served so far."""

    @property
    def depth(self) -> int:
        """Segments from the start of the sequence."""

    @property
    def gain(self) -> int:
        """Segments that a hit here saves over the next shorter entry of the chain."""

    @property
    def num_pages(self) -> int:
        """Window and state pages of this entry, shared ones too, and dense pages of its `gain`."""

    @property
    def freed(self) -> int:
        """As `num_pages`, without dense pages that requests or longer entries need."""

    @property
    def shorter(self) -> Entry | None:
        """The next shorter entry of the chain."""


class EvictionPolicy(Protocol):
    """Interface of a policy, which serves one cache. A host tier also needs a method ``coming``,
    which `Ranked.coming` describes.

    Errors leave the cache whole: `KVCache.admit` raises those of `asked`, and each call that evicts
    those of `pop`. Calls of `add` and `discard` that raise are repeated by the next eviction.
    """

    def add(self, entry: Entry) -> None:
        """Rank `entry`: it was cached, or used again."""

    def discard(self, entry: Entry) -> None:
        """Forget `entry`, perhaps an unknown one: it is gone, or a request or pin needs it."""

    def pop(self) -> Entry | None:
        """Take out the entry to evict next; None when there is none."""

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Learn from an admitted prompt.

        Args:
            keys: 32 bytes for each of its segments.
            hit: segments reused.
            kept: none, or four depths at which it will leave entries, 0 for none: for a resend, its
                end, its edited end, and its junction (see `policies.retention`).
        """


def is_policy(thing: Any) -> bool:
    """True if `thing` has the methods of an eviction policy."""
    methods = [getattr(thing, name, None) for name in ("add", "discard", "pop", "asked")]
    return not isinstance(thing, type) and all(map(callable, methods))


class Ranked:
    """Base of policies that give each entry a rank when it is filed: the lowest goes first, the
    deepest among equals. A heap with lazy deletion.

    Raises:
        TypeError: a subclass that does not define `rank`.
    """

    _heap: list[tuple[float, int, int, Entry]]
    _tickets: dict[Entry, int]
    _next: int

    def __new__(cls: type[R], *args: Any, **options: Any) -> R:
        """Make the heap here: a subclass with an ``__init__`` of its own need not call another."""
        if cls.rank is Ranked.rank:
            raise TypeError(f"policy: {cls.__name__} must define rank(entry)")
        policy = super().__new__(cls)
        policy._heap, policy._tickets, policy._next = [], {}, 0
        return policy

    def __len__(self) -> int:
        """Entries that are filed."""
        return len(self._tickets)

    def rank(self, entry: Entry) -> float:
        """Place in the order of eviction."""
        raise NotImplementedError

    def add(self, entry: Entry) -> None:
        """File `entry` by its rank now."""
        self._next += 1
        self._tickets[entry] = self._next
        rank = self.rank(entry)
        if not isinstance(rank, Real) or rank != rank:  # NaN compares with nothing
            raise ValueError(f"rank: {type(self).__name__}: expected a number, got {rank!r}")
        heapq.heappush(self._heap, (rank, -entry.depth, self._next, entry))
        if len(self._heap) > 4 * len(self._tickets) + 1024:
            self._heap = [r for r in self._heap if self._tickets.get(r[3]) == r[2]]
            heapq.heapify(self._heap)

    def discard(self, entry: Entry) -> None:
        """Forget `entry`."""
        self._tickets.pop(entry, None)

    def peek(self) -> Entry | None:
        """The entry of lowest rank; it stays."""
        while self._heap:
            _, _, ticket, entry = self._heap[0]
            if self._tickets.get(entry) == ticket:
                return entry
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Entry | None:
        """Take out the entry of lowest rank."""
        entry = self.peek()
        if entry is not None:
            self.evicted(entry, self._heap[0][0])  # which may raise: then it stays
            heapq.heappop(self._heap)
            del self._tickets[entry]
        return entry

    def coming(self, n: int) -> list[Entry]:
        """The entries that `pop` would take out next, at most `n`; they stay."""
        found: list[Entry] = []
        self.peek()  # drops discarded entries from the top of the heap
        for _, _, ticket, entry in in_order(self._heap):
            if len(found) == n:
                break
            if self._tickets.get(entry) == ticket:
                found.append(entry)
        return found

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Called with each admitted prompt; does nothing here."""

    def evicted(self, entry: Entry, rank: float) -> None:
        """Called with each popped entry; does nothing here."""


class LRU(Ranked):
    """Evict the least recently used entry first: the baseline of the other policies."""

    def rank(self, entry: Entry) -> float:
        """The tick of the last use."""
        return entry.last_used


def in_order(heap: list[T]) -> Iterator[T]:
    """Items of a heap, the least first; they stay. It must not change meanwhile."""
    if len(heap) <= SHORT:  # quicker than one by one
        yield from sorted(heap)
        return
    fringe = [(heap[0], 0)]
    while fringe:
        item, i = heapq.heappop(fringe)
        yield item
        for j in range(2 * i + 1, min(2 * i + 3, len(heap))):
            heapq.heappush(fringe, (heap[j], j))
