"""The default eviction policy: evict first what is expected to save least, by past returns."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from .base import Entry, in_order
from .returns import GONE, Record, Returns

# New entries filed at each prompt (about 0.3 ms), and at each eviction (two: the backlog shrinks).
LOOKS, LOOKS_AGAIN = 64, 2
Filed = tuple[int, int, int, Entry]  # last use, -depth, a number of its own
Queue = tuple[int, str, bool]  # log2 of segments saved per page, kind, `Record.continues`


def segments_per_page(entry: Entry) -> float:
    """Segments that a hit on `entry` saves for each page that its eviction frees."""
    return entry.gain / (entry.freed or 1)


class Adaptive:
    """Evict first the entry that is expected to save least per page and time.

    Savings are the segments that a hit has more than one on the next shorter entry, for each page
    that its eviction frees. The time until a hit is learned for each kind of entry, from the share
    that prompts return to, their mean time, and the age of the entry (see `hazard`). The kinds,
    each apart for prompts that begin a conversation or continue one:

    * the reason why the prompt left the entry: its `end`, an `edited` end, a `junction`, the end of
      the `answer`, or else `inside`;
    * `superseded`: a later prompt went on from here, and left entries of its own;
    * `passed`: a later prompt went on from another entry of the same prompt;
    * `shared`: a prompt that mostly differs starts with it.

    Keys are remembered longer than their entries, to see which evicted ones prompts return to. The
    next shorter entry stands in for an evicted one, and is as likely to be hit. Where nothing
    differs, this is LRU. Entries of one kind and similar savings are *filed* in one queue; only the
    heads of the queues are compared.

    Source: LHD (NSDI 2018) for hit density; hyperbolic caching (ATC 2017) for comparing queues;
    Marconi (arXiv 2411.19379) for the kinds of reuse; ARC for learning from evicted entries.

    Args:
        worth: savings of a hit on an entry for each page that its eviction frees, in any unit;
            segments by default.
    """

    def __init__(self, worth: Callable[[Entry], float] | None = None) -> None:
        self._returns = Returns()
        self._returns.policies.append(self)
        self._is_behind = False
        self._worth = segments_per_page if worth is None else worth
        self._new: OrderedDict[Entry, None] = OrderedDict()  # not looked at yet
        self._filed: dict[Entry, tuple[int, Record]] = {}
        self._queues: dict[Queue, list[Filed]] = {}
        self._next = 0
        self._popped: tuple[Entry, Record] | None = None

    def behind(self, worth: Callable[[Entry], float]) -> Adaptive:
        """A policy for a tier behind this cache, with the same statistics and its own `worth`."""
        policy = Adaptive(worth=worth)
        policy._returns, policy._is_behind = self._returns, True
        self._returns.policies.append(policy)
        return policy

    # The container.

    def __len__(self) -> int:
        return len(self._filed) + len(self._new)

    def add(self, entry: Entry) -> None:
        """Keep `entry`; it is filed when something depends on it."""
        self._new[entry] = None

    def discard(self, entry: Entry) -> None:
        """Forget `entry`."""
        self._new.pop(entry, None)
        filed = self._filed.pop(entry, None)
        if filed is not None and filed[1].filed.get(self) is entry:
            del filed[1].filed[self]

    def pop(self) -> Entry | None:
        """Take out the entry that is expected to save least."""
        self._look(len(self._new) if self._is_behind else LOOKS_AGAIN)
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
            if not record.filed:  # else it can still be had from another policy
                if shorter is not None:
                    self._stand_in(shorter, record)
                record.stands_for = None
            return entry
        return None

    def coming(self, n: int) -> list[Entry]:
        """The entries that `pop` would take out next, at most `n`; they stay."""
        self._look(len(self._new))
        self._tidy()
        found: list[Entry] = []
        heads = [(self._saved(q, heap[0]), heap[0], q) for q, heap in self._queues.items()]
        heapq.heapify(heads)
        others: dict[Queue, Iterator[Filed]] = {}  # of the queues whose head was found
        while heads and len(found) < n:
            _, filed, queue = heads[0]
            found.append(filed[3])
            if queue not in others:
                others[queue] = self._after_head(self._queues[queue])
            head = next(others[queue], None)
            if head is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (self._saved(queue, head), head, queue))
        return found

    def _saved(self, queue: Queue, filed: Filed) -> float:
        return 2.0 ** queue[0] * self._returns.chance(self._filed[filed[3]][1])

    def _after_head(self, heap: list[Filed]) -> Iterator[Filed]:
        for filed in islice(in_order(heap), 1, None):
            if self._filed.get(filed[3], GONE)[0] == filed[2]:
                yield filed

    def _stand_in(self, shorter: Entry, record: Record) -> None:
        """`shorter` serves returns to the evicted `record`, and may be the last of its chain."""
        if shorter in self._filed:
            known = self._filed[shorter][1]
            if self._returns.chance(record) > self._returns.chance(known):
                known.stands_for = record.stands_for or record
                for policy, entry in known.filed.items():
                    policy.rerank(entry)
            self._new[shorter] = None

    def rerank(self, entry: Entry) -> None:
        """Rank `entry` again before the next eviction: its statistics changed."""
        self._new[entry] = None

    def _tidy(self) -> None:
        for queue, heap in list(self._queues.items()):
            while heap and self._filed.get(heap[0][3], GONE)[0] != heap[0][2]:
                heapq.heappop(heap)
            if not heap:
                del self._queues[queue]

    def _least(self) -> Queue:
        best: tuple[float, Filed] | None = None
        least: Queue | None = None
        self._tidy()
        for queue, heap in self._queues.items():
            head = self._saved(queue, heap[0]), heap[0]
            if best is None or head < best:
                best, least = head, queue
        assert least is not None
        return least

    def _look(self, limit: int) -> None:
        """File the entries that waited longest; those that wait count as worth keeping."""
        while self._new and limit:
            entry = self._new.popitem(last=False)[0]
            self._file(entry, self._record(entry))
            limit -= 1

    def _file(self, entry: Entry, record: Record) -> None:
        self._next += 1
        record.filed[self] = entry
        self._filed[entry] = self._next, record
        heap = self._queues.setdefault(self._queue(entry, record), [])
        used = (record.stands_for or record).last_used
        heapq.heappush(heap, (used, -entry.depth, self._next, entry))
        if len(heap) > 4 * len(self._filed) + 64:
            heap[:] = [r for r in heap if self._filed.get(r[3], GONE)[0] == r[2]]
            heapq.heapify(heap)

    def _queue(self, entry: Entry, record: Record) -> Queue:
        _, exponent = math.frexp(self._worth(entry))
        like = record.stands_for or record
        return exponent - 1, like.kind, like.continues

    # What is learned.

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Learn from a prompt (see `EvictionPolicy.asked`)."""
        self._look(LOOKS)
        if not self._is_behind:
            self._returns.asked(keys, hit, kept)

    def _record(self, entry: Entry) -> Record:
        key, returns = entry.key, self._returns
        record = returns.records.get(key)
        if record is None:
            # Eviction took only the end of a chain: the rest keeps its record.
            was = self._popped is not None and self._popped[0] is entry
            record = self._popped[1] if was and self._popped is not None else Record()
            returns.remember(key, record)
        returns.renew(record, entry, is_used=not self._is_behind)
        return record
