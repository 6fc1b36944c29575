"""Eviction policies: which cached entry goes first when free pages run short.

An entry is what can serve a hit by itself: a resume point, or the end of a chain in models with only dense
groups. Dense blocks that serve no entry go before any entry, pinned entries after all others; no policy is
asked about either. A policy is a container with three methods. To write one, subclass `Ranked` and say
how entries compare:

    class LFU(Ranked):
        def rank(self, entry):
            return entry.num_uses
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Protocol


class Entry(Protocol):
    """What a policy may look at. Entries are compared and hashed by identity."""

    @property
    def key(self) -> bytes:
        """Key of the prefix that ends here; the same when the entry is made anew after an eviction."""

    @property
    def last_used(self) -> int:
        """Tick of the last use; ticks count admissions, commits and releases."""

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
        """Pages that are kept for this entry alone: its own, and those of the segments that it gains."""


class EvictionPolicy(Protocol):
    """The whole interface. `add` and `discard` are called in the middle of changes and must not raise."""

    def add(self, entry: Entry) -> None:
        """`entry` was made, or was used again: file it (anew)."""

    def discard(self, entry: Entry) -> None:
        """`entry` is gone or may not be evicted any more; it may not have been filed."""

    def pop(self) -> Entry | None:
        """Take out the entry to evict next; None when there is none."""


class Ranked:
    """Base of policies that give each entry a number when it is filed: the lowest goes first, the deepest among equals.

    A heap with lazy deletion: filing and popping cost O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._tickets: dict[Entry, int] = {}
        self._next = 0

    def rank(self, entry: Entry) -> float:
        """Place in the order of eviction."""
        raise NotImplementedError

    def add(self, entry: Entry) -> None:
        """File `entry` by its rank now."""
        self._next += 1
        self._tickets[entry] = self._next
        heapq.heappush(self._heap, (self.rank(entry), -entry.depth, self._next, entry))
        if len(self._heap) > 4 * len(self._tickets) + 1024:
            self._heap = [r for r in self._heap if self._tickets.get(r[3]) == r[2]]
            heapq.heapify(self._heap)

    def discard(self, entry: Entry) -> None:
        """Forget `entry`."""
        self._tickets.pop(entry, None)

    def pop(self) -> Entry | None:
        """The entry of lowest rank."""
        while self._heap:
            rank, _, ticket, entry = heapq.heappop(self._heap)
            if self._tickets.get(entry) == ticket:
                del self._tickets[entry]
                self.evicted(entry, rank)
                return entry
        return None

    def evicted(self, entry: Entry, rank: float) -> None:
        """Called with each popped entry; does nothing here."""


class LRU(Ranked):
    """Least recently used first."""

    def rank(self, entry: Entry) -> float:
        """The tick of the last use."""
        return entry.last_used


class Ghosts:
    """Keys of the entries evicted last, each with a note; a bounded memory of what was regretted.

    Args:
        capacity: keys remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._notes: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes, note: float) -> None:
        """Remember an eviction."""
        self._notes[key] = note
        self._notes.move_to_end(key)
        if len(self._notes) > self._capacity:
            self._notes.popitem(last=False)

    def pop(self, key: bytes) -> float | None:
        """The note of an entry that comes back, once."""
        return self._notes.pop(key, None)


class CostAware(Ranked):
    """Recency plus `weight` times the compute that an entry saves for the pages it keeps.

    GreedyDual: an entry is filed at ``floor + value``, where floor is the rank of the last victim, so that value
    buys time and no entry stays forever. The value mixes two parts, recency (the same for all) and segments
    saved per page, scaled by their running mean. When an entry comes back that was evicted lately, the part that spoke
    against it loses weight.

    Source: Marconi (arXiv 2411.19379) 4.2 for the mix; GreedyDual-Size for the aging; LeCaR for learning from ghosts.

    Args:
        weight: initial weight of saved compute, 0 to 1.
        num_ghosts: evictions remembered.
        step: factor by which a regretted eviction moves the weight.
    """

    def __init__(self, weight: float = 0.3, num_ghosts: int = 4096, step: float = 0.05) -> None:
        super().__init__()
        if not 0 <= weight <= 1:
            raise ValueError(f"weight: expected 0..1, got {weight}")
        self.weight = weight
        self._step = step
        self._ghosts = Ghosts(num_ghosts)
        self._mean = 0.0
        self._filed = 0
        self._last_tick = 0

    def rank(self, entry: Entry) -> float:
        """Tick of the last use, plus the time that the entry's value buys."""
        regret = self._ghosts.pop(entry.key)
        if regret is not None:
            # It was evicted as less valuable than the mean (trust value less), or as merely old (trust it more).
            self.weight += self._step * (-self.weight if regret < 1 else 1 - self.weight)
        value = entry.gain / max(1, entry.num_pages)
        self._filed += 1
        self._mean += (value - self._mean) / min(self._filed, 1024)
        self._last_tick = max(self._last_tick, entry.last_used)
        relative = min(8.0, value / self._mean) if self._mean else 1.0
        horizon = len(self._tickets)  # entries cached: about the ticks that one stays
        return entry.last_used + self.weight * horizon * relative

    def evicted(self, entry: Entry, rank: float) -> None:
        """Remember the victim and how its value compared with the mean."""
        value = entry.gain / max(1, entry.num_pages)
        self._ghosts.add(entry.key, value / self._mean if self._mean else 1.0)


class S3FIFO:
    """Three queues: what is used once leaves quickly, so that a scan does not flush what is used again.

    New entries enter a small queue and move to the main one if they were used by the time they reach its
    head; in the main queue a used entry goes round again. An entry that comes back soon after its
    eviction enters the main queue at once.

    Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).

    Args:
        small: share of the pages that the small queue may hold before it is the first to give.
        num_ghosts: evictions remembered.
    """

    def __init__(self, small: float = 0.1, num_ghosts: int = 4096) -> None:
        if not 0 < small < 1:
            raise ValueError(f"small: expected a share in (0, 1), got {small}")
        self._share = small
        self._small: deque[Entry] = deque()
        self._main: deque[Entry] = deque()
        self._place: dict[Entry, deque[Entry]] = {}
        self._uses: dict[Entry, int] = {}
        self._ghosts = Ghosts(num_ghosts)

    def add(self, entry: Entry) -> None:
        """A new entry enters a queue; a used one is only marked."""
        if entry in self._place:
            self._uses[entry] = min(3, self._uses[entry] + 1)
            return
        self._uses[entry] = 0
        self._enter(self._main if self._ghosts.pop(entry.key) is not None else self._small, entry)

    def discard(self, entry: Entry) -> None:
        """Forget `entry`; its place in a queue is skipped later."""
        self._place.pop(entry, None)
        self._uses.pop(entry, None)

    def pop(self) -> Entry | None:
        """The first unused entry, of the small queue while that is over its share."""
        while self._place:
            over = len(self._small) > self._share * len(self._place)
            queue = self._small if self._small and (over or not self._main) else self._main
            entry = queue.popleft()
            if self._place.get(entry) is not queue:
                continue
            if self._uses[entry]:
                self._uses[entry] = 0 if queue is self._small else self._uses[entry] - 1
                self._enter(self._main, entry)
                continue
            self.discard(entry)
            if queue is self._small:
                self._ghosts.add(entry.key, 0.0)
            return entry
        self._small.clear()
        self._main.clear()
        return None

    def _enter(self, queue: deque[Entry], entry: Entry) -> None:
        self._place[entry] = queue
        queue.append(entry)
