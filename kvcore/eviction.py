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
RARE = -1.5  # log2: kinds returned to about a third as often as the others, or less, go first
NEAR = 32  # segments before the end of a prompt that count as near it
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

    def asked(self, keys: bytes, hit: int) -> None:
        """Called with each admitted prompt; does nothing here."""

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

    def asked(self, keys: bytes, hit: int) -> None:
        """Nothing is learned from prompts."""

    def _enter(self, queue: deque[Entry], entry: Entry) -> None:
        self._place[entry] = queue
        queue.append(entry)


class Record:
    """What `Adaptive` remembers of an entry, cached or evicted."""

    __slots__ = ("cost", "last_used", "superseded", "turn", "where")

    def __init__(self, turn: int) -> None:
        self.turn = turn  # turns of its conversation that came before
        self.last_used = 0
        self.superseded = False  # a longer prompt returned to it, and leaves entries of its own
        self.where = ""  # its kind, while no prompt returned to it since it has that
        self.cost = ""  # the same; "-" once a prompt returned to it


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


class Adaptive(Ranked):
    """Recency, corrected by what this traffic shows of things that nobody can know beforehand.

    * Do conversations that came back once come back more often than new ones? Then their entries are kept longer, by
      `patience` times the mean time after which prompts return.
    * Are some kinds of entries returned to a third as often as the others, or less? Then those of them that are costly or superseded go first. An entry is at the `end` of a
      prompt, `near` it, or `else`where (after the answer, at a junction); `superseded` once the next turn left longer ones;
      `costly` or not, that is with fewer than half of the segments saved per page of the best.

    Keys are remembered longer than their entries, so that a prompt shows what it would have returned to had all been kept.
    Where nothing differs, this is LRU.

    Source: LeCaR and ARC for learning from what was evicted; Marconi (arXiv 2411.19379) for kinds of reuse and savings per byte.

    Args:
        patience: mean times to a return that a conversation which comes back earns.
        memory: keys remembered, as a multiple of the cached entries.
    """

    def __init__(self, patience: float = 4.0, memory: float = 16.0) -> None:
        super().__init__()
        if not (patience >= 0 and memory >= 1):
            raise ValueError(
                f"patience, memory: expected >= 0 and >= 1, got {patience} and {memory}"
            )
        self._patience, self._memory = patience, memory
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._places: OrderedDict[bytes, str] = (
            OrderedDict()
        )  # keys at and near the ends of late prompts
        self._turns, self._where, self._costs = Shares(), Shares(), Shares()
        self._wait = 0.0  # mean ticks to a return
        self._num_returns = 0
        self._densest = 0.0  # most segments saved per page
        self._turn = self._now = 0
        self._popped: tuple[Entry, Record] | None = None

    def asked(self, keys: bytes, hit: int) -> None:
        """Find what the prompt returns to: the entry that it hit, and the deepest that it could have hit had all been kept."""
        self._turn = 0
        end = len(keys) // KEY_BYTES
        for depth in range(end, max(0, end - RECALLED), -1):
            record = self._records.get(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES])
            if record is not None:
                self._return_to(record, 2 * depth >= end)
                if 0 < hit < depth:
                    used = self._records.get(keys[(hit - 1) * KEY_BYTES : hit * KEY_BYTES])
                    if used is not None:
                        self._credit(used)
                break
        self._turns.made("later" if self._turn else "first")
        for depth in range(max(1, end - NEAR), end + 1):
            key = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
            self._places[key] = "end" if depth >= end - 1 else "near"
        while len(self._places) > 64 * NEAR:
            self._places.popitem(last=False)

    def _return_to(self, record: Record, most: bool) -> None:
        """A prompt starts with the prefix of `record`; `most` of it is that."""
        self._credit(record)
        if most:
            self._turns.returned("later" if record.turn else "first")
            self._num_returns += 1
            wait = self._now - record.last_used
            self._wait += (wait - self._wait) / min(self._num_returns, 1024)
            self._turn = record.turn = record.turn + 1
            record.superseded = True

    def _credit(self, record: Record) -> None:
        """Count a return once for each kind that the entry has."""
        if record.where:
            self._where.returned(record.where)
            record.where = ""
        if record.cost not in ("", "-"):
            self._costs.returned(record.cost)
            record.cost = "-"

    def rank(self, entry: Entry) -> float:
        """The tick of the last use, and what its kinds add or take."""
        self._now = max(self._now, entry.last_used)
        record = self._record(entry)
        density = entry.gain / max(1, entry.num_pages)
        self._densest = max(self._densest, density)
        cost = "costly" if density < self._densest / 2 else "cheap"
        where = "superseded" if record.superseded else self._places.get(entry.key, "else")
        if record.where != where:
            record.where = where
            self._where.made(where)
        if not record.cost:
            record.cost = cost
            self._costs.made(cost)
        rank = float(entry.last_used)
        if record.turn:
            rank += self._patience * self._wait * min(1.0, max(0.0, self._turns.lift("later")))
        # The dense pages of a superseded entry are kept for the longer ones: all that it costs is its own.
        if (cost == "costly" or record.superseded) and min(
            self._where.lift(where), self._costs.lift(cost)
        ) < RARE:
            rank -= FIRST
        return rank

    def evicted(self, entry: Entry, rank: float) -> None:
        """A chain that is only shortened is filed again at once, under another key."""
        record = self._records.get(entry.key)
        self._popped = None if record is None else (entry, record)

    def _record(self, entry: Entry) -> Record:
        key, records = entry.key, self._records
        if key in records:
            record = records[key]
            records.move_to_end(key)
        elif self._popped is not None and self._popped[0] is entry:
            record = records[key] = self._popped[1]
        else:
            record = records[key] = Record(self._turn)
        record.last_used = entry.last_used
        while len(records) > 1024 + self._memory * len(self._tickets):
            records.popitem(last=False)
        return record
