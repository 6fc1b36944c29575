"""Statistics of `Adaptive`: entries, the prompts that left them, and the prompts that return."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ..prefix.keys import KEY_BYTES
from .base import Entry

PATIENCE = 3.0  # mean waits after which half of the returns have come
MEMORY = 16  # keys remembered, as a multiple of the cached entries
DOUBT = 10.0  # imagined entries of a kind, of the mean share: it has to show that it differs

# Segments from the end of a prompt in which an earlier entry is looked for: about a millisecond.
RECALLED = 4096

# Of the two ends, the junction and the edited end of a prompt.
KINDS = ("end", "end", "junction", "edited")


class Ranking(Protocol):
    """The policy of a cache or of a tier, with its entries."""

    def __len__(self) -> int:
        """Entries that it ranks."""

    def rerank(self, entry: Entry) -> None:
        """Rank `entry` again: its statistics changed."""


class ReturnCounts:
    """Entries of one kind of `Adaptive`, and returns to them; recent ones count more. `waited`:
    prompts until these returns, in all."""

    __slots__ = ("made", "returned", "waited")

    def __init__(self) -> None:
        self.made = self.returned = self.waited = 0.0

    def count(self) -> None:
        self.made += 1
        if self.made > 1024:
            self.made /= 2
            self.returned /= 2
            self.waited /= 2

    def share(self, prior: float) -> float:
        """Share that was returned to; near `prior` with few entries."""
        return (self.returned + DOUBT * prior) / (self.made + DOUBT)

    def wait(self, prior: float) -> float:
        """Mean prompts until a return; near `prior` with few returns."""
        return (self.waited + DOUBT * prior) / (self.returned + DOUBT)


class Visit:
    """A prompt that was admitted."""

    __slots__ = ("at", "continues", "end", "moved_on", "records")

    def __init__(self, at: int, end: int, continues: bool) -> None:
        self.at = at  # prompts before and with it
        self.end = end  # segments
        self.continues = continues  # it goes on with an earlier one
        self.moved_on = False  # a later one goes on with it
        self.records: list[Record] = []


class Record:
    """Statistics of an entry, cached or evicted."""

    __slots__ = ("filed", "kind", "last_used", "open", "since", "stands_for", "visit")

    def __init__(self) -> None:
        self.filed: dict[Ranking, Entry] = {}  # its entry in each policy that ranks it
        self.visit: Visit | None = None
        self.kind = ""
        self.since = 0  # prompt since which it has this kind, or was used
        self.last_used = -1
        self.open = False  # no prompt returned to it since
        self.stands_for: Record | None = None  # an evicted longer entry whose returns it serves

    @property
    def continues(self) -> bool:
        return self.visit is not None and self.visit.continues


def hazard(share: float, half: float, age: float) -> float:
    """Returns per prompt to an entry that none returned to so far.

    A `share` of its kind is returned to at all, half of these within `half` prompts, with a long
    tail (log-logistic, shape 1): an old entry is less and less likely to be one of them.
    """
    left = share * half / (half + age)
    return left / ((half + age) * (1 - share + left))


GONE = (0, Record())
NOTHING = ReturnCounts()


class Returns:
    """Returns of prompts to the entries of one cache and its tiers, ranked by `policies`.

    Attributes:
        records: key of an entry, cached or not -> its record.
        left: key of an entry that a prompt will leave, not cached yet -> (prompt, kind).
    """

    def __init__(self) -> None:
        self.policies: list[Ranking] = []
        self.records: OrderedDict[bytes, Record] = OrderedDict()
        self.left: OrderedDict[bytes, tuple[Visit, str]] = OrderedDict()
        self._kinds: dict[tuple[str, bool], ReturnCounts] = {}
        self._sums: dict[str, ReturnCounts] = {}
        self._all = ReturnCounts()
        self._rates: dict[tuple[str, bool], tuple[float, float]] = {}
        self._chances: dict[tuple[str, bool, int], float] = {}
        self._now = 0  # prompts
        self._visit: Visit | None = None

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Find the deepest entry that the prompt could have hit, and the one that it hit."""
        self._now += 1
        self._rates.clear()
        self._chances.clear()
        end, went_on = len(keys) // KEY_BYTES, False
        for depth in range(end, max(0, end - RECALLED), -1):
            record = self.records.get(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES])
            if record is not None:
                went_on = self._return_to(record, 2 * depth >= end)
                used = self.records.get(keys[(hit - 1) * KEY_BYTES : hit * KEY_BYTES])
                if 0 < hit < depth and used is not None:
                    self._credit(used)
                    self._become(used, "superseded" if 2 * hit >= end else "shared")
                break
        self._visit = Visit(self._now, end, went_on)
        # In the order of KINDS: at one depth an edited end wins over a junction.
        for depth, name in zip((*kept[:2], *kept[:1:-1]), KINDS, strict=False):
            if hit < depth <= end:
                key = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
                self.left[key] = self._visit, name
                self.left.move_to_end(key)
        while len(self.left) > 1024:
            self.left.popitem(last=False)

    def _return_to(self, record: Record, most: bool) -> bool:
        """Count a prompt with the prefix of `record`, which is `most` of it or not; True if it
        continues an earlier prompt."""
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
        if record.open:
            record.open = False
            for kind in self._counts(record):
                kind.returned += 1
                kind.waited += self._now - record.since

    def _become(self, record: Record, kind: str) -> None:
        record.kind, record.since, record.open, record.stands_for = kind, self._now, True, None
        for count in self._counts(record):
            count.count()
        for policy, entry in record.filed.items():
            policy.rerank(entry)

    def _counts(self, record: Record) -> tuple[ReturnCounts, ReturnCounts, ReturnCounts]:
        return (
            self._kinds.setdefault((record.kind, record.continues), ReturnCounts()),
            self._sums.setdefault(record.kind, ReturnCounts()),
            self._all,
        )

    def _rate(self, kind: str, continues: bool) -> tuple[float, float]:
        """(share returned to, mean wait); small counts are mixed with those of more entries."""
        rate = self._rates.get((kind, continues))
        if rate is None:
            every = self._all
            mean = (every.returned + 1) / (every.made + 10)
            wait = (every.waited + 1) / (every.returned + 1)
            for known in (
                self._sums.get(kind, NOTHING),
                self._kinds.get((kind, continues), NOTHING),
            ):
                mean, wait = known.share(mean), known.wait(wait)
            rate = self._rates[kind, continues] = mean, wait
        return rate

    def chance(self, record: Record) -> float:
        """Probability of a hit by the next prompt; equal for all entries of one kind and age."""
        record = record.stands_for or record
        like = record.kind, record.continues, record.since
        chance = self._chances.get(like)
        if chance is None:
            share, wait = self._rate(record.kind, record.continues)
            chance = hazard(share, 1 + PATIENCE * wait, self._now - record.since)
            self._chances[like] = chance
        return chance

    # Entries.

    def remember(self, key: bytes, record: Record) -> None:
        """Set the record of `key`; forget the oldest ones."""
        records = self.records
        records[key] = record
        while len(records) > 1024 + MEMORY * sum(map(len, self.policies)):
            records.popitem(last=False)

    def renew(self, record: Record, entry: Entry, *, is_used: bool) -> None:
        """Bring the record of `entry` up to date; `is_used`: it may have been used since."""
        key = entry.key
        if key in self.records:
            self.records.move_to_end(key)
        left = self.left.pop(key, None)
        if left is not None and left[0] is not record.visit:
            # The prompt that returned here has left the entry again: count one of the two.
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
        if is_used and record.last_used != entry.last_used:
            record.last_used, record.since, record.stands_for = entry.last_used, self._now, None

    def _answered(self, entry: Entry) -> Visit | None:
        shorter, visit = entry.shorter, self._visit
        if shorter is not None:
            known = self.records.get(shorter.key)
            visit = known.visit if known is not None else None
        return visit if visit is not None and entry.depth > visit.end else None
