"""What is where of a prompt, and the cheapest way to have it on the device.

Device and host have a tree each, so the dense chain that both hold between them is as long as the
longer one; a resume point may be in either, or be made of neighbours of which each holds one. The
seconds of a way are those of its load, and then of the prefill of what is left:

    segments            0   1   2   3   4   5   6        device: hit at 1, dense up to 4
    device              =========================        host: dense up to 6, resume point at 5
    host  dense         =============================    a hit at 5: segment 4 and the window pages
    resume points           d               h            of the point come from the host
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..arrays import ZERO32, Int32
from ..prefix.keys import Prompt
from ..prefix.lookup import EXPLANATIONS, Match, Reason, limited_by
from ..prefix.replays import replay_range
from ..prefix.tree import point_after, run_of
from .places import DEVICE, HOST, Found, Place, Tails, Tier
from .rates import Rate

if TYPE_CHECKING:
    from ..cache import KVCache
    from .jobs import Job

Limit = Reason | Literal["slower", "no-room"]

LOAD_EXPLANATIONS: dict[Limit, str] = {
    "slower": "loading more would take longer than computing it",
    "no-room": "the pool had no room to load more",
}
_EXPLANATIONS: dict[Limit, str] = dict(EXPLANATIONS.items()) | LOAD_EXPLANATIONS
_EXPLANATIONS |= {
    "not-cached": "nothing of this prompt is kept anywhere",
    "diverged": "the chain that is kept ends, or differs from the prompt, there",
}


@dataclass(frozen=True, slots=True)
class Share:
    """What one place gives to a prompt.

    Attributes:
        place: ``"device"``, which gives without a copy, ``"host"``, or ``"compute"`` for the prefill.
        num_tokens: whose dense blocks come from here, or which are computed.
        num_pages, num_bytes: to copy, window pages included.
        seconds: until they are there, or computed.
        lossy: whether the place has them in a lossy form.
    """

    place: str
    num_tokens: int
    num_pages: int
    num_bytes: int
    seconds: float
    lossy: bool = False

    def __str__(self) -> str:
        if self.place == "device":
            return f"{self.num_tokens} on the device"
        if self.place == "compute":
            return f"{self.num_tokens} to compute ({_time(self.seconds)})"
        size = f"{self.num_bytes / 2**20:.3g} MiB"
        lossy = ", lossy" if self.lossy else ""
        return f"{self.num_tokens} from {self.place} ({size}, {_time(self.seconds)}{lossy})"


@dataclass(frozen=True)
class TierMatch:
    """Result of a look-up on the device and in the host.

    Attributes:
        num_tokens: the hit once everything is loaded.
        num_saved_tokens: tokens that the request will not compute then; less than `num_tokens`
            never, more where it replays.
        device: the match on the device alone, as of `KVCache.match`.
        shares: what each place gives, the device first and what is computed last.
        seconds: until the whole prompt is computed: loads, then prefill.
        limited_by: why the hit is not longer; "no-room" is for whoever asked for a load to say.
        dense_tokens: tokens whose dense blocks are kept somewhere.
        pending: an open load of this prompt, if there is one: to wait for it may be enough.
    """

    num_tokens: int
    num_saved_tokens: int
    device: Match
    shares: tuple[Share, ...]
    seconds: float
    limited_by: Limit
    dense_tokens: int
    pending: Job | None = field(default=None, repr=False)

    @property
    def prompt(self) -> Prompt:
        """The hashed prompt."""
        return self.device.prompt

    @property
    def num_bytes(self) -> int:
        """Bytes to load."""
        return sum(share.num_bytes for share in self.shares)

    def explain(self) -> str:
        """One sentence: hit length, what comes from where, and what limited it."""
        without = ("device", "compute")  # a copy
        texts = [str(s) for s in self.shares if s.num_pages or s.place in without]
        why = _EXPLANATIONS[self.limited_by].format(dense=self.dense_tokens)
        saved = self.num_saved_tokens
        return f"{saved} of {self.prompt.num_tokens} tokens: {', '.join(texts)}; {why}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


@dataclass(slots=True)
class Way:
    """One way to have a prefix on the device.

    Attributes:
        device, host: where the chain ends in each place.
        hit: boundary of the resume point, or the end where none is needed. dense: boundary up to
            which dense segments are then there. Both in segments.
        tail: what `DEVICE` and `HOST` give to the resume point: [pages_per_point] pages there, in
            the columns of the host, and 0 where the other one has the column. Empty where no resume
            point is loaded.
        saved: tokens that are not computed then.
        num_pages: of the host, to copy.
        seconds: of the load and the prefill.
    """

    device: Found
    host: Found
    hit: int
    dense: int
    tail: dict[int, Int32]
    saved: int
    num_pages: int
    seconds: float = 0.0

    @property
    def num_loaded(self) -> int:
        """Segments to load."""
        return self.dense - self.device.depth


class Planner:
    """Finds the cheapest way; changes nothing.

    Args:
        kv: the cache whose pool is the device.
        device, host: the places.
        page_bytes: bytes of a page of the host.

    Attributes:
        prefill: tokens a second, as measured.
    """

    def __init__(
        self, kv: KVCache, device: Place, host: Tier, tails: Tails, page_bytes: int,
        prefill_tokens_per_second: float,
    ) -> None:  # fmt: skip
        self._kv, self._device, self._host, self._tails = kv, device, host, tails
        self._page_bytes = page_bytes
        self.prefill = Rate(prefill_tokens_per_second, memory=1.0)

    def match(self, prompt: Prompt, max_tokens: int | None, pending: Job | None) -> TierMatch:
        """What is where of `prompt`."""
        kv, a = self._kv, self._kv.alignment
        match, ways = self.ways(prompt, max_tokens)
        best = cheapest(ways)
        usable, most = self._limits(match)
        dense = max(best.device.depth, best.host.depth)
        why: Limit = limited_by(kv.enable_caching, usable, most, dense, best.hit)
        if best.saved < max([way.saved for way in ways]):
            why = "slower"
        return TierMatch(
            best.hit * a, best.saved, match, self._shares(prompt, best), best.seconds, why,
            dense * a, pending,
        )  # fmt: skip

    def ways(self, prompt: Prompt, max_tokens: int | None) -> tuple[Match, list[Way]]:
        """What the device has of `prompt`, and the ways to have more: first that without a load."""
        kv, a = self._kv, self._kv.alignment
        match, run = kv._lookup.find(prompt, max_tokens)
        limit = prompt.num_segments if kv.enable_caching else 0
        device = Found(self._device, run, match.dense_tokens // a)
        host = Found(self._host, *self._host.index.find(prompt.keys, limit))
        hit = (match.replay_to or match.num_tokens) // a
        as_is = Way(device, host, hit, device.depth, {}, match.num_saved_tokens, 0)
        ways = [as_is, *self._with_loads(match, device, host)]
        for way in ways:
            way.seconds = self._prefill_seconds(prompt, way)
            way.seconds += self._host.load_seconds(way.num_pages * self._page_bytes)
        return match, ways

    def _limits(self, match: Match) -> tuple[int, int]:
        """Segments of the prompt before its last token, and of them those that a hit may have."""
        prompt, a = match.prompt, self._kv.alignment
        usable = min((prompt.num_tokens - 1) // a, prompt.num_segments)
        return usable, usable if match.max_tokens is None else min(usable, match.max_tokens // a)

    def _with_loads(self, match: Match, device: Found, host: Found) -> list[Way]:
        """Find the ways with loads that save more than the device alone. Seconds grow and shrink
        evenly between the ends of the chains, so these are where to look."""
        kv, a = self._kv, self._kv.alignment
        _, most = self._limits(match)
        replays = kv.replay_tokens is not None and kv.hybrid
        shortest = match.num_tokens // a
        ways: dict[tuple[int, bool], Way] = {}
        for limit in {min(f.depth, most) for f in (device, host)}:
            if limit <= shortest:
                continue
            hit = self._boundary(device, host, limit)
            if hit > shortest and (hit, True) not in ways:
                ways[hit, True] = self._way(device, host, hit, True)
            if replays and limit > device.depth and (limit, False) not in ways:
                ways[limit, False] = self._way(device, host, limit, False)
        for way in ways.values():
            self._save(way, match, most)
        return [way for way in ways.values() if way.saved > match.num_saved_tokens]

    def _save(self, way: Way, match: Match, most: int) -> None:
        """What the request does not compute, as `Lookup.find` will see it."""
        kv, a = self._kv, self._kv.alignment
        hit = way.hit if way.tail or not kv.hybrid else match.num_tokens // a
        way.saved = hit * a
        if kv.replay_tokens is not None and kv.hybrid:
            replay = replay_range(min(way.dense, most) * a, hit * a, kv.replay_tokens, a)
            if replay is not None:
                way.saved, way.hit = replay[0], replay[1] // a

    def _boundary(self, device: Found, host: Found, limit: int) -> int:
        """Longest boundary <= `limit` that a request could resume at with what both hold."""
        found = (device, host)
        limit = min(limit, max([f.depth for f in found]))
        if not self._kv.hybrid or not limit or any(f.point(limit) is not None for f in found):
            return limit
        last = max(0 if p is None else p.depth for p in (f.before(limit + 1) for f in found))
        return max(f.place.index.resumable(f.run, f.depth, limit, last) for f in found)

    def _way(self, device: Found, host: Found, hit: int, with_point: bool) -> Way:
        """The way to `hit`."""
        dense = max(device.depth, min(host.depth, hit))
        tail = self._tail(device, host, hit) if with_point and self._kv.hybrid else {}
        num_pages = (dense - device.depth) * self._tails.layout.pages_per_segment
        if HOST in tail:
            num_pages += len(tail[HOST].nonzero()[0])
        return Way(device, host, hit, dense, tail, 0, num_pages)

    def _tail(self, device: Found, host: Found, depth: int) -> dict[int, Int32]:
        """Where the pages of the resume point at `depth` are, as `Way.tail`."""
        columns = self._tails.points
        if (point := device.point(depth)) is not None:
            tail = {DEVICE: columns.of(self._device, point.pages)}
        elif (point := host.point(depth)) is not None:
            tail = {HOST: columns.of(self._host, point.pages)}
        else:
            tail = self._tail_between((device, host), depth)
        before = device.before(depth + 1)
        if before is not None:  # the device's own blocks need no copy
            later, earlier = self._tails.shared(depth - before.depth)
            tail = {i: row.copy() for i, row in tail.items()}
            for row in tail.values():
                row[later] = 0
            own = tail.setdefault(DEVICE, np.zeros(len(columns), dtype=np.int32))
            own[later] = columns.of(self._device, before.pages)[earlier]
        return tail

    def _tail_between(self, found: tuple[Found, Found], depth: int) -> dict[int, Int32]:
        """`tail` out of the points before and after `depth`."""
        befores = [(p.depth, -i, p) for i, f in enumerate(found) if (p := f.before(depth + 1))]
        last, minus, before = max(befores, default=(0, 0, None))
        most = last + self._device.index.span
        afters = (
            (i, p)
            for i, f in enumerate(found)
            if f.depth >= depth and (p := point_after(run_of(f.run, depth), depth, most))
        )
        number, after = next(afters)  # there is one: `_boundary` found it
        columns = self._tails.points
        n = len(columns)
        first = None if before is None else np.arange(1, n + 1, dtype=np.int32)
        code = self._tails.layout.tail_between(
            depth, last, first, after.depth, np.arange(n + 1, 2 * n + 1, dtype=np.int32)
        )
        none = np.zeros(n, dtype=np.int32)
        first_pages = none
        if before is not None:
            first_pages = columns.of(found[-minus].place, before.pages)
        last_pages = columns.of(found[number].place, after.pages)
        pages = np.concatenate([none[:1], first_pages, last_pages])[code]
        places = np.repeat([0, -minus, number], [1, n, n])[code]
        return {i: np.where(places == i, pages, ZERO32) for i in {-minus, number}}

    def compute_seconds(self, num_segments: int) -> float:
        """Seconds that the prefill of so many segments takes."""
        return num_segments * self._kv.alignment / self.prefill.value

    def _prefill_seconds(self, prompt: Prompt, way: Way) -> float:
        return (prompt.num_tokens - way.saved) / self.prefill.value

    def _shares(self, prompt: Prompt, way: Way) -> tuple[Share, ...]:
        a, host = self._kv.alignment, self._host
        size = way.num_pages * self._page_bytes
        left, seconds = prompt.num_tokens - way.saved, self._prefill_seconds(prompt, way)
        return (
            Share("device", min(way.device.depth, way.hit) * a, 0, 0, 0.0),
            Share(
                "host", way.num_loaded * a, way.num_pages, size, host.load_seconds(size), host.lossy
            ),
            Share("compute", left, 0, 0, seconds),
        )


def cheapest(ways: list[Way]) -> Way:
    """The way that takes least time."""
    return min(ways, key=lambda way: (way.seconds, -way.saved, way.num_pages))
