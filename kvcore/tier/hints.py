"""What callers intend with a prefix, which no cache can know: a pause, a return, an end.

A hint changes where entries are and for how long, never what a request reads. It evicts nothing
that a running request needs, and keeps to the budget of the prompt's tenant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..plan import OutOfPages
from ..prefix.keys import KEY_BYTES
from ..prefix.pins import Pins, expiry_of
from ..prefix.tree import ResumePoint, Run, path_to
from ..spec import as_int
from .jobs import Job
from .match import TierMatch
from .places import Found, Place, Tier

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


@dataclass(frozen=True, slots=True)
class Kept:
    """A pin that a hint made.

    Attributes:
        root: of the keys of its tenant.
        place: where it is.
        key: of the boundary that is pinned. asked: of the one that was asked for.
        priority: as asked for.
    """

    root: bytes
    place: Place
    key: bytes
    asked: bytes
    priority: int


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
        self._kept: dict[Run | ResumePoint, Kept] = {}
        # The same by tenant, the oldest first.
        self._retained: dict[bytes, dict[Run | ResumePoint, Kept]] = {}
        for place in tiers.places:
            place.index.on_pin_end = self._forget

    def take(
        self, match: TierMatch, intent: Intent, now: float | None, ttl: float | None,
        priority: int, max_bytes: int | None,
    ) -> Answer:  # fmt: skip
        """As `Tiers.hint`. All arguments are checked before anything is done."""
        expiry = math.inf
        if intent == "retain":
            if now is None or ttl is None:
                raise ValueError(f"now, ttl: expected seconds to retain, got {now!r} and {ttl!r}")
            expiry = expiry_of(now, ttl)
            priority = as_int("priority", priority, -(2**31), 2**31 - 1)
        elif intent == "prefetch":
            max_bytes = None if max_bytes is None else as_int("max_bytes", max_bytes, 0)
        elif intent not in ("demote", "release"):
            raise ValueError(
                f"intent: expected 'retain', 'prefetch', 'demote' or 'release', got {intent!r}"
            )
        match = self._tiers.match(match.prompt, max_tokens=match.device.max_tokens)
        if intent == "retain":
            return self.retain(match, expiry, priority)
        if intent == "prefetch":
            return self.prefetch(match, max_bytes)
        return self.demote(match) if intent == "demote" else self.release(match)

    # Bring it up before it is asked for.

    def prefetch(self, match: TierMatch, max_bytes: int | None) -> Answer:
        """Load what `match`, of now, says, or as long a prefix of it as `max_bytes` allow."""
        tiers, job = self._tiers, match.pending
        if job is not None:
            if job.num_tokens < match.num_tokens:
                why = "a shorter prefix is being loaded: ask again once it is there"
                return Answer("clipped", job.num_tokens, 0, why, job)
            return Answer("accepted", job.num_tokens, 0, "it is being loaded", job)
        is_all, wanted = max_bytes is None or match.num_bytes <= max_bytes, match
        if max_bytes is not None and not is_all:
            shorter = self._within(match, max_bytes)
            if shorter is None:
                return Answer("refused", 0, 0, f"no part of it has at most {max_bytes} bytes")
            wanted = shorter
        made = tiers.load(wanted)
        if isinstance(made, OutOfPages):
            return Answer("deferred", 0, 0, str(made))
        if made is None:
            saved = match.num_saved_tokens
            if saved:
                return Answer("accepted", saved, 0, "it is on the device")
            return Answer("refused", 0, 0, "nothing of it is kept that is worth a load")
        for place in tiers.tiers:
            entry = self._entry(place, match, made.num_tokens // tiers.alignment)
            if entry is not None:
                place.policy.hinted(entry, "prefetch")
        said = "all of it" if is_all else f"what {max_bytes} bytes allow"
        return Answer(
            "accepted" if is_all else "clipped", made.num_tokens, made.num_bytes,
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

    def retain(self, match: TierMatch, expiry: float, priority: int) -> Answer:
        """Keep a prefix where it is until everything else is gone, or it is `expiry`. Where the
        tenant's budget is spent, what it retains with a lower priority goes first."""
        segments, root = match.num_tokens // self._tiers.alignment, match.prompt.root
        longest = self._longest(match, lambda found: segments)
        if longest is None:
            return Answer("refused", 0, 0, "nothing of it is kept")
        if self._max_bytes is not None:
            longest = self._affordable(match, priority, self._max_bytes)
        if longest is None:
            return Answer("refused", 0, 0, "the tenant's budget is spent")
        depth, found = longest
        place, pins, key = found.place, self._pins_of(found.place), _key(match, depth)
        if not pins.fits(found.run, depth, priority):
            why = f"it is more than may be pinned on {place.name} beside what has a higher priority"
            return Answer("refused", 0, 0, why)
        end = place.index.end_at(found.run, depth)
        entry = end.points[depth] if place.index.hybrid else end
        if entry in self._kept or place.index.pins.get(entry, -math.inf) < expiry:
            if entry not in self._kept and self._max_bytes is not None:
                self._make_room(root, end, priority, self._max_bytes)
            pins.pin(end, depth, expiry, priority)
            kept = Kept(root, place, key, _key(match, _most(match)), priority)
            self._kept[entry] = self._retained.setdefault(root, {})[entry] = kept
        place.policy.hinted(entry, "retain")
        tokens, size = depth * self._tiers.alignment, self._size(depth)
        if depth < segments:
            return Answer("clipped", tokens, size, f"kept on {place.name}: that is what fits")
        return Answer("accepted", tokens, size, f"kept on {place.name}")

    @property
    def _device(self) -> Place:
        return self._tiers.device

    def _pins_of(self, place: Place) -> Pins:
        if isinstance(place, Tier):
            return self._pins[self._tiers.tiers.index(place)]
        return self._tiers.device_pins

    def _longest(self, match: TierMatch, limit: Callable[[Found], int]) -> tuple[int, Found] | None:
        """The longest prefix of `match` that a place can keep, `limit` of it segments or less."""
        best: tuple[int, Found] | None = None
        for found in self._tiers.where(match.prompt, match.num_tokens // self._tiers.alignment):
            depth = _boundary(found, limit(found))
            if depth and (best is None or depth > best[0]):
                best = depth, found
        return best

    # The budget of a tenant. What several of its prefixes share counts once.

    def _size(self, depth: int) -> int:
        """Bytes of a prefix of `depth` segments."""
        layout = self._tiers.layout
        pages = depth * layout.pages_per_segment + layout.pages_per_point
        return pages * self._tiers.page_bytes

    def _used(self, entries: Iterable[Run | ResumePoint]) -> tuple[int, set[Run]]:
        """Bytes of retained entries, and the runs of their chains."""
        runs: set[Run] = set()
        num_bytes = segments = 0
        for entry in entries:
            num_bytes += self._size(0)
            run = entry.run if isinstance(entry, ResumePoint) else entry
            while run is not None and run.parent is not None and run not in runs:
                runs.add(run)
                segments += run.length
                run = run.parent
        return num_bytes + self._size(segments) - self._size(0), runs

    def _affordable(
        self, match: TierMatch, priority: int, max_bytes: int
    ) -> tuple[int, Found] | None:
        """`_longest` of what is retained already, or would be within `max_bytes` once all that the
        tenant retains with a lower priority is gone."""
        segments, each = match.num_tokens // self._tiers.alignment, self._size(1) - self._size(0)
        mine = self._retained.get(match.prompt.root, {})
        known = {(kept.place, kept.key) for kept in mine.values()}
        used, runs = self._used(e for e, kept in mine.items() if kept.priority >= priority)
        left = max_bytes - used - self._size(0)

        def limit(found: Found) -> int:
            if (found.place, _key(match, _boundary(found, segments))) in known:
                return segments
            shared = [min(r.depth, found.depth) for r in path_to(found.run) if r in runs]
            if not each:
                return segments if left >= 0 else 0
            return min(segments, max(shared, default=0) + max(0, left) // each)

        best = self._longest(match, limit)
        if best is None or left >= 0 or (best[1].place, _key(match, best[0])) in known:
            return best
        return None

    def _make_room(self, root: bytes, end: Run, priority: int, max_bytes: int) -> None:
        """End pins of a tenant that have a lower priority, the lowest and oldest first, until one
        at the end of a run is within `max_bytes`."""
        mine = self._retained.get(root, {})
        lower = [entry for entry, kept in mine.items() if kept.priority < priority]
        for entry in sorted(lower, key=lambda entry: mine[entry].priority):
            used, runs = self._used(mine)
            new = sum(run.length for run in path_to(end) if run not in runs)
            if used + self._size(new) <= max_bytes:
                return
            mine[entry].place.index.unpin(entry)

    def _forget(self, entry: Run | ResumePoint) -> None:
        """A pin ended, or somebody made it anew."""
        kept = self._kept.pop(entry, None)
        if kept is not None:
            mine = self._retained[kept.root]
            del mine[entry]
            if not mine:
                del self._retained[kept.root]

    # Let it go.

    def demote(self, match: TierMatch) -> Answer:
        """A pause begins: what the device has of the prefix leaves it before all else (and is
        stored before, as any other entry that eviction would take next)."""
        depth = match.device.num_tokens // self._tiers.alignment
        entry = self._entry(self._device, match, depth)
        if entry is None:
            return Answer("refused", 0, 0, "nothing of it is on the device")
        if entry in self._device.index.pins:
            return Answer("refused", 0, 0, "it is pinned: release it first")
        run = entry.run if isinstance(entry, ResumePoint) else entry
        assert run is not None
        if run.locks:
            return Answer("deferred", 0, 0, "running requests or open jobs need it")
        self._device.policy.spare(entry)
        self._device.policy.hinted(entry, "demote")
        size = self._tiers.num_bytes(entry)
        return Answer("accepted", depth * self._tiers.alignment, size, "it leaves the device first")

    def release(self, match: TierMatch) -> Answer:
        """End what `retain` and `demote` did to a prefix. Others of its chain stay as they are, and
        pins that no hint made."""
        a, asked = self._tiers.alignment, _key(match, _most(match))
        ends: dict[Place, set[int]] = {p: {match.num_tokens // a} for p in self._tiers.tiers}
        ends[self._device] = {match.device.num_tokens // a}
        mine = self._retained.get(match.prompt.root, {})
        found = [(e, kept.place) for e, kept in mine.items() if asked in (kept.key, kept.asked)]
        for entry, place in found:
            ends[place].add(entry.depth)
            place.index.unpin(entry)
        for place, boundaries in ends.items():
            for depth in boundaries:
                ranked = self._entry(place, match, depth)
                if ranked is None:
                    continue
                if place is self._device:
                    place.policy.needed(ranked)
                place.policy.hinted(ranked, "release")
        why = f"{len(found)} pins ended; it is an ordinary prefix again"
        return Answer("accepted", match.num_tokens, 0, why)

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


def _boundary(found: Found, limit: int) -> int:
    """The longest boundary up to `limit` where a place can keep a prefix."""
    index = found.place.index
    if index.hybrid and isinstance(found.place, Tier):  # which makes no points of their neighbours
        point = found.before(limit + 1)
        return 0 if point is None else point.depth
    return index.resumable(found.run, found.depth, limit)


def _most(match: TierMatch) -> int:
    """Segments that a hit of the prompt may have."""
    prompt, most = match.prompt, match.device.max_tokens
    usable = min((prompt.num_tokens - 1) // prompt.alignment, prompt.num_segments)
    return usable if most is None else min(usable, most // prompt.alignment)


def _key(match: TierMatch, depth: int) -> bytes:
    """Of the prefix of `depth` segments."""
    return match.prompt.keys[max(0, depth - 1) * KEY_BYTES : depth * KEY_BYTES]
