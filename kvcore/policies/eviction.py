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
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ..prefix.keys import KEY_BYTES
from ..spec import as_int

DOUBT = 10.0  # imagined entries of a kind, of the mean share: it has to show that it differs
ENOUGH = 16  # returns from which a habit is known
RARE = 2  # a reason is none if so many times fewer are returned to than of all
LONG_AGO = float(1 << 50)  # ticks
REASONS = ("end", "end", "edited", "junction")  # of `kept`
RECALLED = 4096  # segments from the end of a prompt in which an earlier entry is looked for: about a millisecond


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

    @property
    def freed(self) -> int:
        """Pages that its eviction frees, or lets the next one free, now: longer entries may need the segments that it gains."""

    @property
    def shorter(self) -> Entry | None:
        """The next shorter entry of the chain."""


class EvictionPolicy(Protocol):
    """The whole interface. A policy serves one cache.

    What a method raises leaves the cache whole: `KVCache.admit` raises what `asked` does, and changes nothing; `plan` and `evict`
    raise what `pop` does. `add` and `discard` are called in the middle of changes: where they raise, they are called again
    before the next eviction, which then raises.
    """

    def add(self, entry: Entry) -> None:
        """`entry` was made, or was used again: file it (anew)."""

    def discard(self, entry: Entry) -> None:
        """`entry` is gone or may not be evicted any more; it may not have been filed."""

    def pop(self) -> Entry | None:
        """Take out the entry to evict next; None when there is none."""

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """A prompt was admitted: 32 bytes for each of its segments, how many of them were reused, and where it will leave entries.

        kept: up to four depths: for a resend, its end, its end if edited, and a junction; 0 for none.
        """


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
        rank = self.rank(entry)
        if rank != rank:  # it compares with nothing: the heap would be no heap
            raise ValueError(f"rank: expected a number, got {rank!r}")
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

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Called with each admitted prompt; does nothing here."""

    def evicted(self, entry: Entry, rank: float) -> None:
        """Called with each popped entry; does nothing here."""


class Kind:
    """Of one kind of entries: how many were made, how many prompts returned to, and after how long; late ones count more."""

    __slots__ = ("made", "returned", "waited")

    def __init__(self) -> None:
        self.made = self.returned = self.waited = 0.0

    def count(self) -> None:
        """One more was made."""
        self.made += 1
        if self.made > 1024:
            self.made /= 2
            self.returned /= 2
            self.waited /= 2

    def share(self, prior: float) -> float:
        """How many were returned to; `prior` while there is little to tell."""
        return (self.returned + DOUBT * prior) / (self.made + DOUBT)

    def wait(self, prior: float) -> float:
        """Mean time to a return; `prior` while there is little to tell."""
        return (self.waited + DOUBT * prior) / (self.returned + DOUBT)


class Place:
    """A boundary of a prompt at which something may be kept."""

    __slots__ = ("end", "open", "reasons")

    def __init__(self, reasons: frozenset[str]) -> None:
        self.reasons = reasons  # why it is kept (nothing: it was hit)
        self.end = 0  # segments of the prompt
        self.open = True  # no prompt returned to it


class Returns:
    """At which ends of earlier prompts later ones resume: several are kept of each, as nobody knows which is returned to.

    A return counts for the reason why its boundary was kept, if that is one alone, whether or not it is still cached.

    Args:
        memory: boundaries remembered.
    """

    def __init__(self, memory: int = 16384) -> None:
        self._memory = memory
        self._places: OrderedDict[bytes, Place] = OrderedDict()
        self._kinds: dict[str, Kind] = {}
        self._all = Kind()
        self._num_returns = 0  # to one boundary more than once, too

    def asked(self, keys: bytes, hit: int, kept: Sequence[int]) -> None:
        """Learn from a prompt, as `EvictionPolicy.asked` is told of it."""
        end = len(keys) // KEY_BYTES
        for depth in range(end, max(0, end - RECALLED), -1):
            place = self._places.get(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES])
            if place is not None:
                self._return_to(place)
                break
        reasons: dict[int, set[str]] = {}
        if hit:  # it lies in this prompt now, and stays what it was
            known = self._places.get(keys[(hit - 1) * KEY_BYTES : hit * KEY_BYTES])
            reasons[hit] = set() if known is None else set(known.reasons)
        for depth, reason in zip(kept, REASONS, strict=False):
            if hit < depth <= end:
                reasons.setdefault(depth, set()).add(reason)
        for depth, names in reasons.items():
            self._keep(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES], frozenset(names), end)

    def unlikely(self, entry: Entry) -> bool:
        """Whether `entry` was kept only for reasons that hardly any prompt returns for."""
        place = self._places.get(entry.key)
        if place is None:
            shorter = entry.shorter
            before = None if shorter is None else self._places.get(shorter.key)
            answer = before is not None and entry.depth > before.end
            reason = "answer" if answer else "inside"
            place = self._keep(entry.key, frozenset([reason]), entry.depth)
        every = self._all
        if self._num_returns < ENOUGH or not place.reasons:
            return False
        mean = every.returned / every.made
        return all(RARE * self._kinds[reason].share(mean) < mean for reason in place.reasons)

    def _keep(self, key: bytes, reasons: frozenset[str], end: int) -> Place:
        place = self._places.get(key)
        if place is None or place.reasons != reasons:
            place = self._places[key] = Place(reasons)
            self._all.count()
            for reason in reasons:
                self._kinds.setdefault(reason, Kind()).count()
        place.end = end
        self._places.move_to_end(key)
        if len(self._places) > self._memory:
            self._places.popitem(last=False)
        return place

    def _return_to(self, place: Place) -> None:
        self._num_returns += 1
        if place.open:
            place.open = False
            self._all.returned += 1
            for reason in place.reasons:
                if len(place.reasons) == 1:
                    self._kinds[reason].returned += 1
                else:  # nobody knows for which
                    self._kinds[reason].made -= 1


class LRU(Ranked):
    """Least recently used first; before all others, unused entries of a kind that prompts do not return to (see `Returns`)."""

    def __init__(self) -> None:
        super().__init__()
        self._returns = Returns()

    def rank(self, entry: Entry) -> float:
        """The tick of the last use, long ago for what nobody will use."""
        if not entry.num_uses and self._returns.unlikely(entry):
            return entry.last_used - LONG_AGO
        return entry.last_used

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Learn where prompts return to."""
        self._returns.asked(keys, hit, kept)


class Ghosts:
    """Keys of the entries evicted last, each with a note; a bounded memory of what was regretted.

    Args:
        capacity: keys remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = as_int("num_ghosts", capacity, 0)
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
        for name, share in (("weight", weight), ("step", step)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: expected 0..1, got {share}")
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
        # Queues in order of arrival; of each entry how often it was used lately.
        self._small: OrderedDict[Entry, int] = OrderedDict()
        self._main: OrderedDict[Entry, int] = OrderedDict()
        self._ghosts = Ghosts(num_ghosts)

    def add(self, entry: Entry) -> None:
        """A new entry enters a queue; a used one is only marked."""
        for queue in (self._small, self._main):
            if entry in queue:
                queue[entry] = min(3, queue[entry] + 1)
                return
        queue = self._main if self._ghosts.pop(entry.key) is not None else self._small
        queue[entry] = 0

    def discard(self, entry: Entry) -> None:
        """Forget `entry`."""
        self._small.pop(entry, None)
        self._main.pop(entry, None)

    def pop(self) -> Entry | None:
        """The first unused entry, of the small queue while that is over its share."""
        while self._small or self._main:
            over = len(self._small) > self._share * (len(self._small) + len(self._main))
            queue = self._small if self._small and (over or not self._main) else self._main
            entry, uses = queue.popitem(last=False)
            if uses:
                self._main[entry] = 0 if queue is self._small else uses - 1
                continue
            if queue is self._small:
                self._ghosts.add(entry.key, 0.0)
            return entry
        return None

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Nothing is learned from prompts."""
