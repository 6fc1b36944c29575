"""The default eviction policy: which entry saves least, learned from what prompts return to."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from ..prefix.keys import KEY_BYTES
from .base import Entry, in_order
from .returns import GONE, NOTHING, Kind, Record, Visit, hazard

# Segments from the end of a prompt in which an earlier entry is looked for: about a millisecond.
RECALLED = 4096

# New entries looked at for each prompt, about 0.3 ms, and for each eviction: more than one, so that
# those that wait become fewer.
LOOKS, LOOKS_AGAIN = 64, 2
Filed = tuple[int, int, int, Entry]  # last use, -depth, a number of its own
Queue = tuple[int, str, bool]  # segments saved per page, kind, in a conversation that went on
# Of the two ends, the junction and the edited end of a prompt.
KINDS = ("end", "end", "junction", "edited")


def segments_per_page(entry: Entry) -> float:
    """Segments that a hit on `entry` saves for each page that its eviction frees."""
    return entry.gain / (entry.freed or 1)


class Adaptive:
    """The entry goes first that is expected to save least per page and time, as this traffic shows.

    Saved per page is what can be seen: the segments that a hit on the entry saves over the next
    shorter one, for the pages that its eviction frees. How soon a hit comes is learned for each
    kind of entry, from the share of its kind that prompts return to, the mean time that takes, and
    the time since the entry was made or used (see `hazard`). The kinds:

    * why the prompt left the entry: its `end`, an `edited` end, a `junction`, the end of the
        `answer`, or else `inside`;
    * `superseded`: a later prompt went on from here, and left entries of its own;
    * `passed`: a later prompt went on from another entry of the same prompt;
    * `shared`: a prompt that mostly differs starts with it;

    each apart for prompts that begin a conversation and for those that go on with one. Keys are
    remembered longer than their entries, so that a prompt shows what it would have returned to had
    all been kept. Where nothing differs, this is LRU.

    Who returns to an evicted entry is served by the next shorter one: that one stands in, and is as
    likely to be hit as the likeliest that it stands in for.

    Entries of one kind and about the same savings wait in one queue; only the heads of the queues
    are compared, and entries are looked at when the first eviction or prompt after them comes, so
    that filing one costs next to nothing.

    Source: LHD (NSDI 2018) for hit density, hyperbolic caching (ATC 2017) for comparing queues;
        Marconi (arXiv 2411.19379) for the kinds
    of reuse; ARC for learning from what was evicted.

    Args:
        patience: mean waits after which half of those who return have done so.
        memory: keys remembered, as a multiple of the cached entries.
        worth: what a hit on an entry saves for each page that its eviction frees, in any unit;
            segments for each page by default.
    """

    def __init__(
        self,
        patience: float = 3.0,
        memory: float = 16.0,
        worth: Callable[[Entry], float] | None = None,
    ) -> None:
        if not (0 <= patience < math.inf and 1 <= memory < math.inf):
            raise ValueError(
                f"patience, memory: expected >= 0 and >= 1, got {patience} and {memory}"
            )
        self._patience, self._memory = patience, memory
        self._worth = segments_per_page if worth is None else worth
        self._new: OrderedDict[Entry, None] = OrderedDict()  # not looked at yet
        self._filed: dict[Entry, tuple[int, Record]] = {}
        self._queues: dict[Queue, list[Filed]] = {}
        self._next = 0
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._left: OrderedDict[bytes, tuple[Visit, str]] = OrderedDict()
        self._kinds: dict[tuple[str, bool], Kind] = {}
        self._sums: dict[str, Kind] = {}
        self._all = Kind()
        self._rates: dict[tuple[str, bool], tuple[float, float]] = {}
        self._chances: dict[tuple[str, bool, int], float] = {}
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
        self._look(LOOKS_AGAIN)
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

    def coming(self, n: int) -> list[Entry]:
        """The entries that `pop` would take out next as far as they are looked at, at most `n`;
        they stay."""
        found: list[Entry] = []
        heads = [
            head for q, heap in self._queues.items() if (head := self._head(q, in_order(heap)))
        ]
        heapq.heapify(heads)
        while heads and len(found) < n:
            _, filed, queue, rest = heads[0]
            found.append(filed[3])
            head = self._head(queue, rest)
            if head is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, head)
        return found

    def _head(
        self, queue: Queue, filed: Iterator[Filed]
    ) -> tuple[float, Filed, Queue, Iterator[Filed]] | None:
        """What the next entry of `filed` is expected to save, the entry, and the others."""
        for head in filed:
            known = self._filed.get(head[3], GONE)
            if known[0] == head[2]:
                return 2.0 ** queue[0] * self._chance(known[1]), head, queue, filed
        return None

    def _stand_in(self, shorter: Entry, record: Record) -> None:
        """`shorter` now serves those who return to the evicted `record`; and it may be the last of
        its chain."""
        if shorter in self._new and shorter not in self._filed:
            del self._new[shorter]
            self._file(shorter, self._record(shorter))
        if shorter in self._filed:
            known = self._filed[shorter][1]
            if self._chance(record) > self._chance(known):
                known.stand = record.stand or record
            self._new[shorter] = None

    def _chance(self, record: Record) -> float:
        """How likely a hit at the next prompt is; the same until then for all of one kind and
        age."""
        record = record.stand or record
        like = record.kind, record.later, record.since
        chance = self._chances.get(like)
        if chance is None:
            share, wait = self._rate(record.kind, record.later)
            chance = hazard(share, 1 + self._patience * wait, self._now - record.since)
            self._chances[like] = chance
        return chance

    def _least(self) -> Queue:
        """The queue whose head is expected to save least."""
        best: tuple[float, Filed] | None = None
        least: Queue | None = None
        for queue, heap in list(self._queues.items()):
            while heap and self._filed.get(heap[0][3], GONE)[0] != heap[0][2]:
                heapq.heappop(heap)
            if not heap:
                del self._queues[queue]
                continue
            saved = 2.0 ** queue[0] * self._chance(self._filed[heap[0][3]][1])
            head = saved, heap[0]
            if best is None or head < best:
                best, least = head, queue
        assert least is not None
        return least

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
        _, exponent = math.frexp(self._worth(entry))
        like = record.stand or record
        return exponent - 1, like.kind, like.later

    # What is learned.

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Find what the prompt returns to: the deepest entry that it could have hit had all been
        kept, and the one that it hit."""
        self._look(LOOKS)
        self._now += 1
        self._rates.clear()
        self._chances.clear()
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
                self._left[key] = self._visit, name
                self._left.move_to_end(key)
        while len(self._left) > 1024:
            self._left.popitem(last=False)

    def _return_to(self, record: Record, most: bool) -> bool:
        """A prompt starts with the prefix of `record`, `most` of it is that; returns whether it
        goes on with another prompt."""
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
        """Share that is returned to, and mean wait; what is little known is taken from the kind as
        a whole, and from all."""
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
        """The record of `entry`, brought up to date."""
        key, records = entry.key, self._records
        record = records.get(key)
        if (record is None or not record.kind) and key not in self._left:
            self._look_before(entry)
        if record is None:
            if self._popped is not None and self._popped[0] is entry:
                record = records[key] = self._popped[1]  # a chain that was only shortened
            else:
                record = records[key] = Record()
            while len(records) > 1024 + self._memory * (len(self._filed) + len(self._new)):
                records.popitem(last=False)
        else:
            records.move_to_end(key)
        left = self._left.pop(key, None)
        if left is not None and left[0] is not record.visit:
            # The prompt that returned here makes it anew: what its return left was never cached.
            if record.open and record.since == left[0].at:
                for count in self._counts(record):
                    count.made -= 1
            record.visit = left[0]
            left[0].records.append(record)
            self._become(record, left[1])
        elif not record.kind:
            record.visit = self._answered(entry)
            if record.visit is not None:
                record.visit.records.append(record)
            self._become(record, "inside" if record.visit is None else "answer")
        if record.last_used != entry.last_used:
            record.last_used, record.since, record.stand = entry.last_used, self._now, None
        return record

    def _look_before(self, entry: Entry) -> None:
        """File the entries of the chain before `entry` that were not looked at yet: they tell
        whether it ends an answer."""
        waiting, node = list[Entry](), entry.shorter
        while node is not None and node in self._new and node.key not in self._records:
            waiting.append(node)
            node = node.shorter if node.key not in self._left else None
        for node in reversed(waiting):
            del self._new[node]
            self._file(node, self._record(node))

    def _answered(self, entry: Entry) -> Visit | None:
        """The prompt whose answer ends at `entry`, if it does."""
        shorter, visit = entry.shorter, self._visit
        if shorter is not None:
            known = self._records.get(shorter.key)
            visit = known.visit if known is not None else None
        return visit if visit is not None and entry.depth > visit.end else None
