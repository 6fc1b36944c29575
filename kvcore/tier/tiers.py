"""`Tiers`: host memory and disk behind the pool of one cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..attachments import attach
from ..cache import KVCache
from ..events import Event
from ..plan import OutOfPages
from ..policies.adaptive import Adaptive
from ..policies.base import Entry
from ..prefix.extra_keys import ExtraKeys
from ..prefix.keys import KEY_BYTES, Prompt
from ..prefix.pins import Pins
from ..spec import MOST_PARTS, Layout, as_int
from .hints import Answer, Hints, Intent
from .jobs import Job
from .ledger import TierAnnouncer, noted_of
from .match import Planner, TierMatch, cheapest
from .open_jobs import OpenJobs
from .places import DEVICE, Found, Place, Tails, Tier, TierSpec, as_rate
from .stores import Stores
from .transfers import Lack, Transfers
from .watched import Watched

LEAST_WORTH = 1e-9  # seconds: an entry whose load takes longer than its prefill
MEDIA = {"host": "CPU", "disk": "DISK"}  # in events


class Tiers(OpenJobs):
    """Tiers behind the pool of a cache: what leaves the pool is kept there, and comes back.

    They keep whole entries, as the pool does: dense segments, each after its parent, and resume
    points, each with its chain. Pages are copied by the engine: `stores` and `load` hand out jobs,
    and `done` ends them. Nothing of it happens in the calls of a step.

    Args:
        kv: the cache, new or in use; one `Tiers` for each.
        host, disk: the tiers behind the device, the nearer first; at least one.
        prefill_tokens_per_second: what the engine computes; `computed` measures it.
        page_bytes: bytes of a page of a tier; by default those of a page of the pool in one tensor.
        parts: [num_groups] pages of a tier that a page of each group takes there, by default 1. The
            pool's pages are equal; where a group leaves some of its own unused, smaller pages in
            tiers need not keep that. `Copies.parts` says which part of a page goes where.
        watermark: pages of the pool that are to be free, or to be had without a loss: so many of
            those that eviction takes next are copied before it comes. By default an eighth of
            each place.
        max_hint_bytes: that the prefixes which one tenant (one salt) retains by hints may have;
            None for no limit but that of pins.

    Attributes:
        tiers: those there are, the nearest first.
        jobs: that are open, the oldest first.
        layout: the groups in pages of tiers.

    Calls are to be made as those of the cache: one at a time, between steps. `load`, `done` and
    `cancel` void a plan that is not committed.

    Raises:
        ValueError: no tier, an argument out of range, no `KVCache` with caching, or one with tiers.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        host: TierSpec | None = None,
        disk: TierSpec | None = None,
        prefill_tokens_per_second: float,
        page_bytes: int | None = None,
        parts: Sequence[int] | None = None,
        watermark: int | None = None,
        max_hint_bytes: int | None = None,
    ) -> None:
        if not isinstance(kv, KVCache):
            raise ValueError(f"kv: expected a KVCache, got {kv!r}")
        if not kv.enable_caching:
            raise ValueError("kv: expected a cache with enable_caching, got one without")
        if kv.tiers is not None:
            raise ValueError("kv: expected a cache without tiers, got one that has some")
        specs = {name: s for name, s in (("host", host), ("disk", disk)) if s is not None}
        if not specs:
            raise ValueError("host, disk: expected at least one TierSpec, got None")
        for name, spec in specs.items():
            if not isinstance(spec, TierSpec):
                raise ValueError(f"{name}: expected a TierSpec, got {spec!r}")
        if len({spec.lossy for spec in specs.values()}) > 1:
            raise ValueError("lossy: expected the same of host and disk, got True and False")
        rate = as_rate("prefill_tokens_per_second", prefill_tokens_per_second)
        size = kv.layout.page_bytes if page_bytes is None else as_int("page_bytes", page_bytes, 1)
        if watermark is not None:
            watermark = as_int("watermark", watermark, 0)
        self._kv = kv
        self.page_bytes = size
        self.layout = kv.layout.in_parts(size, _checked_parts(parts, kv.layout))
        self.jobs: dict[Job, None] = {}
        self._device = Place(DEVICE, kv.index)
        self.tiers: tuple[Tier, ...] = tuple(self._tier(name, spec) for name, spec in specs.items())
        self._tails = tails = Tails(kv.layout, self.layout)
        self._transfers = Transfers(tails, kv.alignment, size)
        self._planner = Planner(kv, self._device, [*self.tiers], tails, size, rate)
        self._stores = Stores(self.places, self._transfers, self._planner, watermark)
        self._loading: dict[bytes, Job] = {}  # by the key of the boundary
        self._hints = Hints(self, max_hint_bytes)
        self._watch()
        kv.tiers = self
        for spec in specs.values():
            attach(spec.policy)

    def _tier(self, name: str, spec: TierSpec) -> Tier:
        policy = spec.policy
        if policy is None:
            policy = self._adaptive(lambda entry: self._worth(name, entry))
        kv, announcer = self._kv, None
        if kv._announcer is not None:
            log, medium = kv._announcer.log, MEDIA[name]
            announcer = TierAnnouncer(log, kv.layout, kv.sequences, medium)
        return Tier(name, spec, policy, self.layout, kv.index.span, announcer)

    def _adaptive(self, worth: Callable[[Entry], float]) -> Adaptive:
        """The policy of a tier that brings none: it learns with that of the cache if it can."""
        policy = self._kv.index.policy
        return policy.behind(worth) if isinstance(policy, Adaptive) else Adaptive(worth=worth)

    def _worth(self, name: str, entry: Entry) -> float:
        """Seconds that an entry of a tier saves for each byte that its eviction frees."""
        tier = next(tier for tier in self.tiers if tier.name == name)
        load = entry.num_pages * self.page_bytes / tier.bytes_per_second
        saved = self._planner.compute_seconds(entry.gain) - load
        return max(saved, LEAST_WORTH) / ((entry.freed or 1) * self.page_bytes)

    def _watch(self) -> None:
        """Have the policies of all places go through `Watched`."""
        for i, place in enumerate(self.places):
            on_asked = self._asked if place is self._device else None
            index = place.index

            def on_pop(entry: Entry, i: int = i) -> None:
                self._stores.evicted(i, entry)

            index.policy = Watched(index.policy, on_pop, on_asked, self._stores.discarded)

    def _asked(self, keys: bytes, hit: int, kept: Sequence[int]) -> None:
        for tier in self.tiers:
            tier.index.policy.asked(keys, hit, kept)

    # What is where.

    def match(
        self,
        token_ids: Any,
        *,
        salt: bytes | None = None,
        extra_keys: ExtraKeys | None = None,
        max_tokens: int | None = None,
    ) -> TierMatch:
        """Where a prompt is, and the quickest way to have it. Changes nothing.

        Args:
            token_ids, salt, extra_keys, max_tokens: as of `KVCache.match`.

        Raises:
            ValueError: as `KVCache.match`.
        """
        prompt = self._kv._lookup.prompt(token_ids, salt, extra_keys)
        return self._planner.match(prompt, max_tokens, self.pending(prompt))

    def pending(self, prompt: Prompt) -> Job | None:
        """The open load that brings most of a prompt, if there is one."""
        if self._loading:
            for depth in range(prompt.num_segments, 0, -1):
                key = prompt.keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
                if (job := self._loading.get(key)) is not None:
                    return job
        return None

    # Stores.

    def stores(self, max_bytes: int | Mapping[str, int], *, everything: bool = False) -> list[Job]:
        """Jobs that copy what eviction would take next, and what the next tier lacks, behind it.

        To be called between steps. An entry stays findable and readable while it is copied, and is
        not evicted; afterwards its eviction writes nothing. Parents come before children, and a
        resume point with the last of its chain.

        Args:
            max_bytes: of all jobs together, those from the device first, or of the jobs into each
                tier by its name (0 or no name: none), so that a slow one holds no other up. A first
                job may have more, when one segment does.
            everything: whatever the last tier lacks, straight there, as at the end of a process.
                (Call it again, but not for ever: where it lacks room, there is always something.)

        Raises:
            ValueError: `max_bytes` is no int or negative, or names no tier. Other errors: those of
                a tier's policy.
        """
        if not isinstance(max_bytes, int) and isinstance(max_bytes, Mapping):
            names = [tier.name for tier in self.tiers]
            if others := [name for name in max_bytes if name not in names]:
                raise ValueError(f"max_bytes: expected bytes by names of {names}, got {others}")
            max_pages: int | dict[str, int] = {
                name: as_int(f"max_bytes[{name!r}]", n, 0) // self.page_bytes or min(n, 1)
                for name, n in max_bytes.items()
            }
        else:
            max_pages = as_int("max_bytes", max_bytes, 0) // self.page_bytes
        made = self._stores.begin(max_pages, everything)
        for job in made:
            parts = job.parts
            listener = parts.sources[0].index.announcer
            if listener is not None:
                parts.noted = noted_of(listener, parts.keys[parts.first * KEY_BYTES :])
            self.jobs[job] = None
        return made

    # Loads.

    def load(self, match: TierMatch | Prompt) -> Job | OutOfPages | None:
        """The job that brings a prompt to the device, as far as it is quicker than computing it;
        looked up now.

        Device pages are reserved, and cached entries evicted for them as in `KVCache.plan`. Until
        the job is done nothing is findable that was not.

        Args:
            match: from `match`, or the prompt of one, such as that of `KVCache.match`.

        Returns:
            Job; OutOfPages, and nothing changed; or None: there is nothing to load.

        Raises:
            ValueError: `match` is none of this cache's. Other errors: those of the policy.
        """
        if not isinstance(match, (TierMatch, Prompt)):
            raise ValueError(f"match: expected what `Tiers.match` returned, got {match!r}")
        if isinstance(match, TierMatch):
            prompt, max_tokens = match.prompt, match.device.max_tokens
        else:
            prompt, max_tokens = match, None
        now, ways = self._planner.ways(prompt, max_tokens)
        way = cheapest(ways)
        if way.saved == now.num_saved_tokens:
            return None
        self._changed()
        job = self._transfers.load(self._device, way, prompt)
        if isinstance(job, Lack):
            return self._out_of_pages(job)
        self._queue(way, self.page_bytes)
        if self._kv._announcer is not None:
            parts = job.parts
            last = parts.first + len(parts.segments)
            parts.noted = self._kv._announcer.of_prompt(prompt, parts.first, last)
        self._use_sources(job)
        self.jobs[job] = None
        self._loading[job.parts.keys[-KEY_BYTES:]] = job
        return job

    def _use_sources(self, job: Job) -> None:
        """What a load reads counts as used now."""
        for holding in job.parts.holdings:
            index, run = holding.index, holding.run
            index.tick += 1
            if index.hybrid:
                point = run.points.get(run.depth)
                if point is not None:
                    point.num_uses += 1
                    index.renew(run)
            else:
                run.num_uses += 1

    def _out_of_pages(self, lack: Lack) -> OutOfPages:
        groups = self._kv.layout.groups
        counts = [*lack.per_group, *[0] * (len(groups) - len(lack.per_group))]
        per_group = {g.name: n for g, n in zip(groups, counts, strict=True)}
        most = max(per_group, key=lambda name: per_group[name])
        return OutOfPages(lack.needed, lack.free, lack.evictable, most, per_group)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """The engine computed the prefill of `num_tokens` in `seconds`: measures its rate."""
        num_tokens, seconds = as_int("num_tokens", num_tokens, 1), as_rate("seconds", seconds)
        self._planner.prefill.measured(num_tokens, seconds)

    def prefill_seconds(self, num_tokens: int) -> float:
        """Seconds that the prefill of `num_tokens` takes, as measured."""
        return num_tokens / self._planner.prefill.value

    # What callers intend.

    def hint(
        self,
        match: TierMatch,
        intent: Intent,
        *,
        now: float | None = None,
        ttl: float | None = None,
        priority: int = 0,
        max_bytes: int | None = None,
    ) -> Answer:
        """What the caller intends with a prefix. It never changes what a request reads, evicts
        nothing that a running request needs, and keeps to the tenant's budget.

        Args:
            match: from `match`; what it found is looked up again.
            intent: ``"retain"``: keep it where it is until everything else is gone, for `ttl`
                seconds from `now` on (`KVCache.expire_pins` ends it); what has a lower `priority`
                goes before it. ``"prefetch"``: bring it to the device, at most `max_bytes` of it.
                ``"demote"``: it leaves the device first. ``"release"``: it is an ordinary prefix
                again; what is retained of its chain besides stays, and pins of `KVCache.pin`.

        Raises:
            ValueError: another intent, an argument that it needs is missing or out of range, or
                `match` is none of this cache's.
        """
        if not isinstance(match, TierMatch):
            raise ValueError(f"match: expected what `Tiers.match` returned, got {match!r}")
        return self._hints.take(match, intent, now, ttl, priority, max_bytes)

    def expire_pins(self, now: float) -> int:
        """End the pins in tiers whose time has passed; returns how many. (`KVCache.expire_pins`
        calls this.)"""
        return self._hints.expire(now)

    # For those inside.

    @property
    def places(self) -> list[Place]:
        """The device and the tiers."""
        return [self._device, *self.tiers]

    @property
    def device(self) -> Place:
        """The pool of the cache."""
        return self._device

    @property
    def device_pins(self) -> Pins:
        """Pins of the cache."""
        return self._kv._pins

    @property
    def alignment(self) -> int:
        """Tokens of a segment."""
        return self._kv.alignment

    def num_bytes(self, entry: Entry) -> int:
        """Bytes that an entry takes in a tier, with the segments that it gains."""
        return self._transfers.num_bytes(entry, entry.gain)

    def where(self, prompt: Prompt, limit: int) -> list[Found]:
        """Where the first `limit` segments of a prompt end in each place."""
        device = Found(self._device, *self._device.index.find(prompt.keys, limit))
        return [device, *self._planner.behind(prompt, limit)]

    def noted(self) -> list[tuple[Iterator[Event], int]]:
        """The events of all that tiers hold now, for `KVCache.announce`."""
        announcers = [(tier, tier.ledger.announcer) for tier in self.tiers]
        return [a.noted(tier.index.runs()) for tier, a in announcers if a is not None]

    def pages_by_group(self) -> dict[str, list[int]]:
        """Pages of each tier that its entries have now, by group; it looks at each resume point."""
        return {tier.name: self._tails.count(tier) for tier in self.tiers}

    def stats(self) -> dict[str, int]:
        """Counters since the start, and pages by state now, of each tier: ``"name/tier"``."""
        found: dict[str, int] = {}
        for tier in self.tiers:
            index = tier.index
            now = {
                "points": index.num_points,
                "segments": index.num_segments,
                "free_pages": index.pool.num_free,
                "queued_bytes": tier.queued_bytes,
                "journal_errors": tier.ledger.num_errors,
            }
            for name, value in {**tier.counters, **now}.items():
                found[f"tier_{name}/{tier.name}"] = value
        return found


def _checked_parts(parts: Sequence[int] | None, layout: Layout) -> list[int]:
    """`parts` of `Tiers`.

    Raises:
        ValueError: they are none.
    """
    groups = layout.groups
    if parts is None:
        return [1] * len(groups)
    if not isinstance(parts, Sequence) or len(parts) != len(groups):
        raise ValueError(f"parts: expected {len(groups)} ints, one a group, got {parts!r}")
    return [
        as_int(f"parts[{i}]", n, 1, MOST_PARTS // g.pages_per_block)
        for i, (n, g) in enumerate(zip(parts, groups, strict=True))
    ]
