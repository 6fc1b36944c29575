"""What callers intend with a prefix, which no cache can know: a pause, a return, an end.

A hint changes where entries are and for how long, never what a request reads. It evicts nothing
that a running request needs, and keeps to the budget of the prompt's tenant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..plan import OutOfPages
from ..prefix.pins import Pins, expiry_of
from ..prefix.tree import ResumePoint, Run
from ..spec import as_int
from .jobs import Job
from .match import TierMatch
from .places import Found, Place, Tier
from .watched import Watched

if TYPE_CHECKING:
    from .tiers import Tiers

Outcome = Literal["accepted", "clipped", "deferred", "refused"]
Intent = Literal["retain", "prefetch", "demote", "release"]


@dataclass(frozen=True)
class Answer:
    """What becomes of a hint.

    Attributes:
        outcome: ``"accepted"``; ``"clipped"``, where a shorter prefix is; ``"deferred"``: not now,
            ask again; ``"refused"``.
        num_tokens, num_bytes: of the prefix that it is done for, and of what is kept or loaded.
        reason: in words.
        job: of a prefetch: to run, or to wait for.
    """

    outcome: Outcome
    num_tokens: int
    num_bytes: int
    reason: str
    job: Job | None = field(default=None, repr=False)


class Hints:
    """Does what hints ask for.

    Args:
        tiers: of the cache.
        max_bytes: that the retained prefixes of one tenant (one salt) may have; None for no limit.
    """

    def __init__(self, tiers: Tiers, max_bytes: int | None) -> None:
        self._tiers = tiers
        self._max_bytes = None if max_bytes is None else as_int("max_hint_bytes", max_bytes, 0)
        self._pins = [Pins(t.index, t.index.pool.num_pages // 2) for t in tiers.tiers]
        # Priority and bytes of each retained entry, by tenant.
        self._retained: dict[bytes, dict[Run | ResumePoint, tuple[int, int]]] = {}

    # Bring it up before it is asked for.

    def prefetch(self, match: TierMatch, max_bytes: int | None) -> Answer:
        """Load what `match` says, or as long a prefix of it as `max_bytes` allow."""
        tiers, outcome = self._tiers, "accepted"
        if match.pending is not None:
            job = match.pending
            return Answer("accepted", job.num_tokens, 0, "it is being loaded", job)
        if match.num_saved_tokens == match.device.num_saved_tokens:
            saved = match.num_saved_tokens
            if saved:
                return Answer("accepted", saved, 0, "it is on the device")
            return Answer("refused", 0, 0, "nothing of it is kept that is worth a load")
        if max_bytes is not None and match.num_bytes > as_int("max_bytes", max_bytes, 0):
            shorter = self._within(match, max_bytes)
            if shorter is None:
                return Answer("refused", 0, 0, f"no part of it has at most {max_bytes} bytes")
            match, outcome = shorter, "clipped"
        made = tiers.load(match)
        if isinstance(made, OutOfPages):
            return Answer("deferred", 0, 0, str(made))
        assert made is not None
        for place in tiers.tiers:
            entry = self._entry(place, match, made.num_tokens // tiers.alignment)
            if entry is not None:
                _tell(place, entry, "prefetch")
        said = "all of it" if outcome == "accepted" else f"what {max_bytes} bytes allow"
        return Answer(
            "accepted" if outcome == "accepted" else "clipped", made.num_tokens, made.num_bytes,
            f"{said} is being loaded", made,
        )  # fmt: skip

    def _within(self, match: TierMatch, max_bytes: int) -> TierMatch | None:
        """The longest match of the same prompt whose load has at most `max_bytes`."""
        a, low, best = self._tiers.alignment, 0, None
        high = match.num_tokens // a
        while low < high:
            middle = (low + high + 1) // 2
            found = self._tiers.match(match.prompt, max_tokens=middle * a)
            if found.num_bytes <= max_bytes:
                low = middle
                if found.num_bytes:
                    best = found
            else:
                high = middle - 1
        return best

    # Keep it.

    def retain(self, match: TierMatch, now: float, ttl: float, priority: int) -> Answer:
        """Keep a prefix where it is until everything else is gone, or `ttl` seconds have passed.
        What is retained with a lower priority goes first, also for the tenant's budget."""
        expiry, priority = expiry_of(now, ttl), as_int("priority", priority, -(2**31), 2**31 - 1)
        limit = self._limit(match, priority)
        best: tuple[int, Found] | None = None
        for found in self._tiers.where(match.prompt, limit):
            place = found.place
            depth = place.index.resumable(found.run, found.depth, limit)
            if place.index.hybrid and found.point(depth) is None and place is not self._device:
                depth = max((d for d in _points(found) if d <= limit), default=0)
            if depth and (best is None or depth > best[0]):
                best = depth, found
        if best is None:
            why = "nothing of it is kept" if limit else "the tenant's budget is spent"
            return Answer("refused", 0, 0, why)
        (depth, found), place = best, best[1].place
        pins = self._pins_of(place)
        kept = pins.pin(found.run, depth, expiry, priority)
        if not kept:
            why = f"it is more than may be pinned on {place.name} beside what has a higher priority"
            return Answer("refused", 0, 0, why)
        size = self._size(depth)
        run, _ = place.index.find(match.prompt.keys, depth)
        run = place.index.end_at(run, depth)
        entry = run.points[depth] if place.index.hybrid else run
        self._retained.setdefault(match.prompt.root, {})[entry] = priority, size
        _tell(place, entry, "retain")
        tokens = depth * self._tiers.alignment
        if tokens < match.num_tokens:
            return Answer("clipped", tokens, size, f"kept on {place.name}: that is what fits")
        return Answer("accepted", tokens, size, f"kept on {place.name}")

    @property
    def _device(self) -> Place:
        return self._tiers.device

    def _pins_of(self, place: Place) -> Pins:
        if isinstance(place, Tier):
            return self._pins[self._tiers.tiers.index(place)]
        return self._tiers.device_pins

    def _size(self, depth: int) -> int:
        """Bytes of a prefix of `depth` segments."""
        layout = self._tiers.layout
        pages = depth * layout.pages_per_segment + layout.pages_per_point
        return pages * self._tiers.page_bytes

    def _limit(self, match: TierMatch, priority: int) -> int:
        """Segments that the tenant may retain of a prompt, once what it retains with a lower
        priority goes as far as it must."""
        segments = match.num_tokens // self._tiers.alignment
        if self._max_bytes is None or not segments:
            return segments
        self._forget_ended()
        mine = self._retained.get(match.prompt.root, {})
        left = self._max_bytes - sum(size for _, size in mine.values())
        for entry, (other, size) in sorted(mine.items(), key=lambda item: item[1][0]):
            if left >= self._size(segments) or other >= priority:
                break
            self._unpin(entry)
            left += size
        if left < self._size(1):
            return 0
        each = self._tiers.layout.pages_per_segment * self._tiers.page_bytes
        over = max(0, self._size(segments) - left)
        return segments - (-(-over // each) if each else 0)

    def _is_pinned(self, entry: Run | ResumePoint) -> bool:
        return any(entry in place.index.pins for place in self._tiers.places)

    def _unpin(self, entry: Run | ResumePoint) -> None:
        for place in self._tiers.places:
            if entry in place.index.pins:
                place.index.unpin(entry)

    def _forget_ended(self) -> None:
        for mine in self._retained.values():
            for entry in [e for e in mine if not self._is_pinned(e)]:
                del mine[entry]

    # Let it go.

    def demote(self, match: TierMatch) -> Answer:
        """A pause begins: what the device has of the prefix leaves it before all else (and is
        stored before, as any other entry that eviction would take next)."""
        depth = match.device.num_tokens // self._tiers.alignment
        entry = self._entry(self._device, match, depth)
        policy = self._device.index.policy
        if entry is None or not isinstance(policy, Watched):
            return Answer("refused", 0, 0, "nothing of it is on the device")
        if entry in self._device.index.pins:
            return Answer("refused", 0, 0, "it is pinned: release it first")
        run = entry.run if isinstance(entry, ResumePoint) else entry
        assert run is not None
        if run.locks:
            return Answer("deferred", 0, 0, "running requests or open jobs need it")
        policy.spare(entry)
        _tell(self._device, entry, "demote")
        size = self._tiers.num_bytes(entry)
        return Answer("accepted", depth * self._tiers.alignment, size, "it leaves the device first")

    def release(self, match: TierMatch) -> Answer:
        """End what `retain` and `demote` did to a prefix."""
        ended = 0
        for found in self._tiers.where(match.prompt, match.prompt.num_segments):
            place, policy = found.place, found.place.index.policy
            for depth in [*_points(found)] if place.index.hybrid else [found.depth]:
                entry = self._entry(place, match, depth)
                if entry is not None and entry in place.index.pins:
                    place.index.unpin(entry)
                    ended += 1
                elif entry is not None and place is self._device and isinstance(policy, Watched):
                    policy.needed(entry)
                if entry is not None:
                    _tell(place, entry, "release")
        self._forget_ended()
        tokens = match.num_tokens
        return Answer("accepted", tokens, 0, f"{ended} pins ended; it is an ordinary prefix again")

    def expire(self, now: float) -> int:
        """End the pins in tiers whose time has passed; returns how many."""
        return sum(pins.expire(now) for pins in self._pins)

    def _entry(self, place: Place, match: TierMatch, depth: int) -> Run | ResumePoint | None:
        """What the policy of a place ranks at boundary `depth` of a prompt."""
        found = Found(place, *place.index.find(match.prompt.keys, depth))
        if not depth or found.depth < depth:
            return None
        if place.index.hybrid:
            return found.point(depth)
        run = found.run
        return run if run.depth == depth and not run.children else None


def _tell(place: Place, entry: Run | ResumePoint, intent: Intent) -> None:
    """The policy of a place hears what is intended with one of its entries."""
    if isinstance(place.index.policy, Watched):
        place.index.policy.hinted(entry, intent)


def _points(found: Found) -> list[int]:
    """Boundaries of the chain in a place that have a resume point."""
    depths: list[int] = []
    run: Run | None = found.run
    while run is not None:
        depths += [d for d in run.depths if d <= found.depth]
        run = run.parent
    return sorted(depths)
