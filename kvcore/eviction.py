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
import math
from collections import OrderedDict, deque
from typing import Protocol

from .hashing import KEY_BYTES

FIRST = 2.0**40  # ticks: before every entry that is not set back as far
CLEARLY = (
    0.5  # log2: what comes back 1.4 times as often as the rest, or less, does not differ from it
)


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

    def asked(self, keys: bytes, hit: int) -> None:
        """A prompt was admitted: 32 bytes for each of its segments, and how many of them were reused."""


class Ranked:
    """Base of policies that give each entry a number: the lowest goes first, the deepest among equals.

    A heap with lazy deletion: filing and popping cost O(log n). What was filed is ranked anew when it comes to the head, and
    filed again if it rose since.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._tickets: dict[Entry, int] = {}
        self._next = 0
        self._densest = 0.0  # most segments saved per page

    def rank(self, entry: Entry) -> float:
        """Place in the order of eviction."""
        raise NotImplementedError

    def spare(self, entry: Entry) -> bool:
        """Whether little is lost with `entry`, for what it costs.

        That is, it saves less than half of what the best entry does per page, and a shorter entry of its chain saves at
        least half as much as it does.
        """
        gain = entry.gain
        density = gain / max(1, entry.num_pages)
        self._densest = max(self._densest, density)
        return 2 * density < self._densest and 2 * gain <= entry.depth

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

    def peek(self) -> Entry | None:
        """The entry of lowest rank; it stays."""
        while self._heap:
            rank, _, ticket, entry = self._heap[0]
            if self._tickets.get(entry) != ticket:
                heapq.heappop(self._heap)
                continue
            now = self.rank(entry)
            if now <= rank:
                return entry
            heapq.heapreplace(self._heap, (now, -entry.depth, ticket, entry))
        return None

    def pop(self) -> Entry | None:
        """Take out the entry of lowest rank."""
        entry = self.peek()
        if entry is not None:
            rank = heapq.heappop(self._heap)[0]
            del self._tickets[entry]
            self.evicted(entry, rank)
        return entry

    def asked(self, keys: bytes, hit: int) -> None:
        """Called with each admitted prompt; does nothing here."""

    def evicted(self, entry: Entry, rank: float) -> None:
        """Called with each popped entry; does nothing here."""


class LRU(Ranked):
    """Least recently used first; before them, and in the same order, the spare ones.

    A prompt leaves up to four resume points close to each other. When pages run short one of them is enough.
    """

    def rank(self, entry: Entry) -> float:
        """The tick of the last use."""
        return entry.last_used - (FIRST if self.spare(entry) else 0)


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

    def add(self, entry: Entry) -> None:
        """Learn from an entry that comes back, and file it."""
        regret = self._ghosts.pop(entry.key)
        if regret is not None:
            # It was evicted as less valuable than the mean (trust value less), or as merely old (trust it more).
            self.weight += self._step * (-self.weight if regret < 1 else 1 - self.weight)
        value = entry.gain / max(1, entry.num_pages)
        self._filed += 1
        self._mean += (value - self._mean) / min(self._filed, 1024)
        super().add(entry)

    def rank(self, entry: Entry) -> float:
        """Tick of the last use, plus the time that the entry's value buys."""
        value = entry.gain / max(1, entry.num_pages)
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

    def asked(self, keys: bytes, hit: int) -> None:
        """Nothing is learned from prompts."""

    def _enter(self, queue: deque[Entry], entry: Entry) -> None:
        self._place[entry] = queue
        queue.append(entry)


class Shares:
    """Of each kind, how many out of how many were returned to; the latest thousand or two of each count."""

    def __init__(self) -> None:
        self._made: dict[str, float] = {}
        self._returned: dict[str, float] = {}

    def made(self, kind: str) -> None:
        """One more of `kind`."""
        self._made[kind] = self._made.get(kind, 0.0) + 1
        if self._made[kind] > 1024:
            self._made[kind] /= 2
            self._returned[kind] = self._returned.get(kind, 0.0) / 2

    def returned(self, kind: str) -> None:
        """One of `kind` was returned to."""
        self._returned[kind] = self._returned.get(kind, 0.0) + 1

    def lift(self, kind: str) -> float:
        """log2 of the share of `kind` over that of all other kinds; near 0 while there is little to tell."""
        made, returned = self._made.get(kind, 0.0), self._returned.get(kind, 0.0)
        others = sum(self._made.values()) - made
        mean = (sum(self._returned.values()) - returned + 1) / (others + 10)
        # 20 imagined ones of the other kinds' share: a kind has to show that it differs.
        return math.log2((returned + 20 * mean) / (made + 20) / mean) if others > 20 else 0.0


class Adaptive(LRU):
    """LRU that keeps conversations longer which came back, while such ones come back more often than new ones do.

    They earn up to `patience` times the mean time after which prompts return. Prompts are remembered longer than
    their entries, so that one shows that it returns even where nothing of it is left. Where nothing differs, this is LRU.

    A prompt is found again at anchors: it leaves its key at its last multiple of s and of 2 s segments, where s is
    a power of two and between an eighth and a sixteenth of its length, and looks for those of others at the multiples of s in about its second half. One up to
    twice as long has the same s or the next one.

    Source: ARC and LeCaR for learning from what was evicted; Marconi (arXiv 2411.19379) for conversations that return.

    Args:
        patience: mean times to a return that a conversation which came back earns.
        memory: prompts remembered, as a multiple of the cached entries.
    """

    def __init__(self, patience: float = 4.0, memory: float = 4.0) -> None:
        super().__init__()
        if not (patience >= 0 and memory >= 1):
            raise ValueError(
                f"patience, memory: expected >= 0 and >= 1, got {patience} and {memory}"
            )
        self._patience, self._memory = patience, memory
        self._seen: OrderedDict[bytes, Visit] = OrderedDict()  # anchors of late prompts
        self._later: OrderedDict[Entry, tuple[bool, int]] = (
            OrderedDict()
        )  # and when it was last used
        self._shares = Shares()
        self._wait = 0.0  # mean ticks to a return
        self._num_returns = 0
        self._now = 0
        self._visit = Visit(0, False)

    def asked(self, keys: bytes, hit: int) -> None:
        """Find out whether the prompt goes on with an earlier one, and remember it."""
        n = len(keys) // KEY_BYTES
        step = 1 << max(0, n.bit_length() - 4)
        self._visit = Visit(self._now, False)
        for depth in range(n // step * step, max(0, n // 2 - step), -step):
            earlier = self._seen.get(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES])
            if earlier is not None:
                self._return_to(earlier)
                break
        self._shares.made("later" if self._visit.later else "first")
        for multiple in (step, 2 * step):
            depth = n // multiple * multiple
            if depth:
                key = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
                self._seen[key] = self._visit
                self._seen.move_to_end(key)
        while len(self._seen) > 2048 + 2 * self._memory * len(self._tickets):
            self._seen.popitem(last=False)

    def _return_to(self, earlier: Visit) -> None:
        """A conversation came back; each of its prompts counts once as returned to."""
        if not earlier.returned:
            earlier.returned = True
            self._shares.returned("later" if earlier.later else "first")
        self._num_returns += 1
        self._wait += (self._now - earlier.tick - self._wait) / min(self._num_returns, 1024)
        self._visit.later = True

    def rank(self, entry: Entry) -> float:
        """The tick of the last use, and what a conversation that came back earns."""
        rank = super().rank(entry)
        if self._is_later(entry):
            more_often = self._shares.lift("later") - CLEARLY
            rank += self._patience * self._wait * min(1.0, max(0.0, more_often))
        return rank

    def _is_later(self, entry: Entry) -> bool:
        """Whether `entry` is of a conversation that came back: as the newest prompt, if it was made or used since."""
        used = entry.last_used
        known = self._later.get(entry)
        if known is not None and known[1] == used:
            return known[0]
        later = self._visit.later and used > self._visit.tick
        self._now = max(self._now, used)
        self._later[entry] = (later, used)
        self._later.move_to_end(entry)
        while len(self._later) > 1024 + 2 * len(self._tickets):
            self._later.popitem(last=False)
        return later


class Visit:
    """A prompt that `Adaptive` remembers."""

    __slots__ = ("later", "returned", "tick")

    def __init__(self, tick: int, later: bool) -> None:
        self.tick = tick
        self.later = later  # it went on with an earlier one
        self.returned = False  # a later one went on with it
