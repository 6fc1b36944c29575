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
from collections.abc import Sequence
from typing import Protocol

from .hashing import KEY_BYTES

DOUBT = 10.0  # imagined entries of a kind, of the mean share: it has to show that it differs
LOOKS = 64  # new entries looked at for each eviction or prompt: about 0.3 ms
ENOUGH = 16  # returns from which a habit is known
RARE = 2  # a reason is none if so many times fewer are returned to than of all
LONG_AGO = float(1 << 50)  # ticks
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
    """The whole interface. `add` and `discard` are called in the middle of changes and must not raise."""

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
            _, _, ticket, entry = self._heap[0]
            if self._tickets.get(entry) == ticket:
                return entry
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Entry | None:
        """Take out the entry of lowest rank."""
        entry = self.peek()
        if entry is not None:
            rank = heapq.heappop(self._heap)[0]
            del self._tickets[entry]
            self.evicted(entry, rank)
        return entry

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Called with each admitted prompt; does nothing here."""

    def evicted(self, entry: Entry, rank: float) -> None:
        """Called with each popped entry; does nothing here."""


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

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Nothing is learned from prompts."""

    def _enter(self, queue: deque[Entry], entry: Entry) -> None:
        self._place[entry] = queue
        queue.append(entry)


class Kind:
    """Of one kind of entries: how many were made, how many prompts returned to, and after how long; late ones count more."""

    __slots__ = ("made", "returned", "waited")

    def __init__(self) -> None:
        self.made = self.returned = self.waited = 0.0

    def count(self) -> None:
        """One more was made."""
        self.made += 1
        if self.made > 1024:
            self.made, self.returned, self.waited = (
                self.made / 2,
                self.returned / 2,
                self.waited / 2,
            )

    def share(self, prior: float) -> float:
        """How many were returned to; `prior` while there is little to tell."""
        return (self.returned + DOUBT * prior) / (self.made + DOUBT)

    def wait(self, prior: float) -> float:
        """Mean time to a return; `prior` while there is little to tell."""
        return (self.waited + DOUBT * prior) / (self.returned + DOUBT)


class Visit:
    """A prompt that was admitted."""

    __slots__ = ("at", "end", "later", "moved_on", "records")

    def __init__(self, at: int, end: int, later: bool) -> None:
        self.at = at  # prompts before and with it
        self.end = end  # segments
        self.later = later  # it goes on with an earlier one
        self.moved_on = False  # a later one goes on with it
        self.records: list[Record] = []


class Record:
    """What `Adaptive` remembers of an entry, cached or evicted."""

    __slots__ = ("entry", "kind", "last_used", "open", "since", "stand", "visit")

    def __init__(self) -> None:
        self.entry: Entry | None = None  # while it is filed
        self.visit: Visit | None = None
        self.kind = ""
        self.since = 0  # prompt since which it has this kind, or was used
        self.last_used = -1
        self.open = False  # no prompt returned to it since
        self.stand: Record | None = None  # an evicted longer entry whose returns it serves

    @property
    def later(self) -> bool:
        """Its prompt goes on with an earlier one."""
        return self.visit is not None and self.visit.later


def hazard(share: float, half: float, age: float) -> float:
    """Returns per prompt to an entry that none returned to so far.

    A `share` of its kind is returned to at all, half of these within `half` prompts, with a long tail (log-logistic, shape 1): an old entry is
    less and less likely to be one of them.
    """
    left = share * half / (half + age)
    return left / ((half + age) * (1 - share + left))


class Adaptive:
    """The entry goes first that is expected to save least per page and time, as this traffic shows.

    Saved per page is what can be seen: the segments that a hit on the entry saves over the next shorter one, for the pages
    that its eviction frees. How soon a hit comes is learned for each kind of entry, from the share of its kind that prompts return
    to, the mean time that takes, and the time since the entry was made or used (see `hazard`). The kinds:

    * why the prompt left the entry: its `end`, an `edited` end, a `junction`, the end of the `answer`, or else `inside`;
    * `superseded`: a later prompt went on from here, and left entries of its own;
    * `passed`: a later prompt went on from another entry of the same prompt;
    * `shared`: a prompt that mostly differs starts with it;

    each apart for prompts that begin a conversation and for those that go on with one. Keys are remembered longer than their
    entries, so that a prompt shows what it would have returned to had all been kept. Where nothing differs, this is LRU.

    Who returns to an evicted entry is served by the next shorter one: that one stands in, and is as likely to be hit as the likeliest
    that it stands in for.

    Entries of one kind and about the same savings wait in one queue; only the heads of the queues are compared, and entries are
    looked at when the first eviction or prompt after them comes, so that filing one costs next to nothing.

    Source: LHD (NSDI 2018) for hit density, hyperbolic caching (ATC 2017) for comparing queues; Marconi (arXiv 2411.19379) for the kinds
    of reuse; ARC for learning from what was evicted.

    Args:
        patience: mean waits after which half of those who return have done so.
        memory: keys remembered, as a multiple of the cached entries.
    """

    def __init__(self, patience: float = 3.0, memory: float = 16.0) -> None:
        if not (patience >= 0 and memory >= 1):
            raise ValueError(
                f"patience, memory: expected >= 0 and >= 1, got {patience} and {memory}"
            )
        self._patience, self._memory = patience, memory
        self._new: OrderedDict[Entry, None] = OrderedDict()  # not looked at yet
        self._filed: dict[Entry, tuple[int, Record]] = {}
        self._queues: dict[Queue, list[tuple[int, int, int, Entry]]] = {}
        self._next = 0
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._places: OrderedDict[bytes, tuple[Visit, str]] = OrderedDict()
        self._kinds: dict[tuple[str, bool], Kind] = {}
        self._sums: dict[str, Kind] = {}
        self._all = Kind()
        self._rates: dict[tuple[str, bool], tuple[float, float]] = {}
        self._now = 0  # prompts
        self._visit: Visit | None = None
        self._popped: tuple[Entry, Record] | None = None

    # The container.

    def add(self, entry: Entry) -> None:
        """Keep `entry`; it is filed when something depends on it."""
        self._new[entry] = None

    def discard(self, entry: Entry) -> None:
        """Forget `entry`."""
        self._new.pop(entry, None)
        filed = self._filed.pop(entry, None)
        if filed is not None:
            filed[1].entry = None

    def pop(self) -> Entry | None:
        """Take out the entry that is expected to save least."""
        self._look(LOOKS)
        while self._new and not self._filed:
            self._look(LOOKS)
        while self._filed:
            queue = self._least()
            entry = heapq.heappop(self._queues[queue])[3]
            record = self._filed[entry][1]
            if self._queue(entry, record) != queue:
                self._file(entry, record)  # neighbours came or went
                continue
            shorter = entry.shorter
            self.discard(entry)
            self._popped = (entry, record)
            if shorter is not None:
                self._stand_in(shorter, record)
            record.stand = None
            return entry
        return None

    def _stand_in(self, shorter: Entry, record: Record) -> None:
        """`shorter` now serves those who return to the evicted `record`; and it may be the last of its chain."""
        if shorter in self._new and shorter not in self._filed:
            del self._new[shorter]
            self._file(shorter, self._record(shorter))
        if shorter in self._filed:
            known = self._filed[shorter][1]
            if self._chance(record) > self._chance(known):
                known.stand = record.stand or record
            self._new[shorter] = None

    def _chance(self, record: Record) -> float:
        """How likely a hit at the next prompt is."""
        record = record.stand or record
        share, wait = self._rate(record.kind, record.later)
        return hazard(share, 1 + self._patience * wait, self._now - record.since)

    def _least(self) -> Queue:
        """The queue whose head is expected to save least."""
        best: Queue | None = None
        least = (math.inf, 0, 0, 0)
        for queue, heap in list(self._queues.items()):
            while heap and self._filed.get(heap[0][3], GONE)[0] != heap[0][2]:
                heapq.heappop(heap)
            if not heap:
                del self._queues[queue]
                continue
            first = (2.0 ** queue[0] * self._chance(self._filed[heap[0][3]][1]), *heap[0][:3])
            if best is None or first < least:
                best, least = queue, first
        assert best is not None
        return best

    def _look(self, limit: int) -> None:
        """File the entries that waited longest: those that wait still count as worth keeping."""
        while self._new and limit:
            entry = self._new.popitem(last=False)[0]
            self._file(entry, self._record(entry))
            limit -= 1

    def _file(self, entry: Entry, record: Record) -> None:
        self._next += 1
        record.entry = entry
        self._filed[entry] = self._next, record
        heap = self._queues.setdefault(self._queue(entry, record), [])
        used = entry.last_used if record.stand is None else record.stand.last_used
        heapq.heappush(heap, (used, -entry.depth, self._next, entry))
        if len(heap) > 4 * len(self._filed) + 64:
            heap[:] = [r for r in heap if self._filed.get(r[3], GONE)[0] == r[2]]
            heapq.heapify(heap)

    def _queue(self, entry: Entry, record: Record) -> Queue:
        saved = math.floor(math.log2(entry.gain / max(1, entry.freed)))
        like = record.stand or record
        return saved, like.kind, like.later

    # What is learned.

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Find what the prompt returns to: the deepest entry that it could have hit had all been kept, and the one that it hit."""
        self._look(LOOKS)
        self._now += 1
        self._rates.clear()
        end, went_on = len(keys) // KEY_BYTES, False
        for depth in range(end, max(0, end - RECALLED), -1):
            record = self._records.get(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES])
            if record is not None:
                went_on = self._return_to(record, 2 * depth >= end)
                used = self._records.get(keys[(hit - 1) * KEY_BYTES : hit * KEY_BYTES])
                if 0 < hit < depth and used is not None:
                    self._credit(used)
                    self._become(used, "superseded" if 2 * hit >= end else "shared")
                break
        self._visit = Visit(self._now, end, went_on)
        for depth, name in zip((*kept[:2], *kept[:1:-1]), KINDS, strict=False):
            if hit < depth <= end:
                key = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
                self._places[key] = self._visit, name
                self._places.move_to_end(key)
        while len(self._places) > 1024:
            self._places.popitem(last=False)

    def _return_to(self, record: Record, most: bool) -> bool:
        """A prompt starts with the prefix of `record`, `most` of it is that; returns whether it goes on with another prompt."""
        self._credit(record)
        visit = record.visit if most else None
        if visit is not None and not visit.moved_on:
            visit.moved_on = True
            for other in visit.records:
                if other is not record and other.kind not in ("superseded", "passed", "shared"):
                    self._become(other, "passed")
        self._become(record, "superseded" if most else "shared")
        return visit is not None

    def _credit(self, record: Record) -> None:
        """Count a return, once."""
        if record.open:
            record.open = False
            for kind in self._counts(record):
                kind.returned += 1
                kind.waited += self._now - record.since

    def _become(self, record: Record, kind: str) -> None:
        record.kind, record.since, record.open, record.stand = kind, self._now, True, None
        for count in self._counts(record):
            count.count()
        if record.entry is not None:
            self._new[record.entry] = None  # to be filed anew

    def _counts(self, record: Record) -> tuple[Kind, Kind, Kind]:
        return (
            self._kinds.setdefault((record.kind, record.later), Kind()),
            self._sums.setdefault(record.kind, Kind()),
            self._all,
        )

    def _rate(self, kind: str, later: bool) -> tuple[float, float]:
        """Share that is returned to, and mean wait; what is little known is taken from the kind as a whole, and from all."""
        rate = self._rates.get((kind, later))
        if rate is None:
            every = self._all
            mean = (every.returned + 1) / (every.made + 10)
            wait = (every.waited + 1) / (every.returned + 1)
            for known in (
                self._sums.get(kind, NOTHING),
                self._kinds.get((kind, later), NOTHING),
            ):
                mean, wait = known.share(mean), known.wait(wait)
            rate = self._rates[kind, later] = mean, wait
        return rate

    def _record(self, entry: Entry) -> Record:
        key, records = entry.key, self._records
        record = records.get(key)
        if record is None:
            if self._popped is not None and self._popped[0] is entry:
                record = records[key] = self._popped[1]  # a chain that was only shortened
            else:
                record = records[key] = Record()
            while len(records) > 1024 + self._memory * (len(self._filed) + len(self._new)):
                records.popitem(last=False)
        else:
            records.move_to_end(key)
        place = self._places.pop(key, None)
        if place is not None and place[0] is not record.visit:
            # The prompt that returned here makes it anew: what its return left was never cached.
            if record.open and record.since == place[0].at:
                for count in self._counts(record):
                    count.made -= 1
            record.visit = place[0]
            place[0].records.append(record)
            self._become(record, place[1])
        elif not record.kind:
            record.visit = self._answered(entry)
            if record.visit is not None:
                record.visit.records.append(record)
            self._become(record, "inside" if record.visit is None else "answer")
        if record.last_used != entry.last_used:
            record.last_used, record.since, record.stand = entry.last_used, self._now, None
        return record

    def _answered(self, entry: Entry) -> Visit | None:
        """The prompt whose answer ends at `entry`, if it does."""
        shorter, visit = entry.shorter, self._visit
        if shorter is not None:
            known = self._records.get(shorter.key)
            if known is None and shorter in self._new:
                del self._new[shorter]
                self._file(shorter, known := self._record(shorter))
            visit = known.visit if known is not None else None
        return visit if visit is not None and entry.depth > visit.end else None


Queue = tuple[int, str, bool]  # segments saved per page, kind, in a conversation that went on
KINDS = ("end", "end", "junction", "edited")
REASONS = ("end", "end", "edited", "junction")  # of `kept`
GONE = (0, Record())
NOTHING = Kind()
