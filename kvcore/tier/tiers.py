"""`Tiers`: host memory and disk behind the pool of one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..attachments import attach
from ..plan import OutOfPages
from ..policies.adaptive import Adaptive
from ..policies.base import Entry
from ..prefix.extra_keys import ExtraKeys
from ..prefix.keys import KEY_BYTES, Prompt
from ..spec import as_int
from .jobs import Job
from .match import Planner, TierMatch
from .places import DEVICE, Place, Tails, Tier, TierSpec, as_rate
from .stores import Stores
from .transfers import Transfers
from .watched import Watched

if TYPE_CHECKING:
    from ..cache import KVCache


class Tiers:
    """Tiers behind the pool of a cache: what leaves the pool is kept there, and comes back.

    They keep whole entries, as the pool does: dense segments, each after its parent, and resume
    points, each with its chain. Pages are copied by the engine: `stores` and `load` hand out jobs,
    and `done` ends them. Nothing of it happens in the calls of a step.

    Args:
        kv: the cache, new or in use; one `Tiers` for each.
        host, disk: the tiers behind the device, the nearer first; at least one.
        prefill_tokens_per_second: what the engine computes; `computed` measures it.
        page_bytes: bytes of a page id, in all page tensors; by default those of one tensor.
        watermark: pages of the pool that are to be free, or to be had without a loss: so many of
            those that eviction takes next are copied before it comes. By default an eighth of
            each place.

    Attributes:
        tiers: those there are, the nearest first.
        jobs: that are open, the oldest first.

    Calls are to be made as those of the cache: one at a time, between steps. `load`, `done` and
    `cancel` void a plan that is not committed.

    Raises:
        ValueError: no tier, an argument out of range, a cache without caching, or with tiers.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        host: TierSpec | None = None,
        disk: TierSpec | None = None,
        prefill_tokens_per_second: float,
        page_bytes: int | None = None,
        watermark: int | None = None,
    ) -> None:
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
        rate = as_rate("prefill_tokens_per_second", prefill_tokens_per_second)
        size = kv.layout.page_bytes if page_bytes is None else as_int("page_bytes", page_bytes, 1)
        if watermark is not None:
            watermark = as_int("watermark", watermark, 0)
        self._kv = kv
        self.page_bytes = size
        self.jobs: dict[Job, None] = {}
        self._device = Place(DEVICE, kv.index)
        self.tiers: tuple[Tier, ...] = tuple(self._tier(name, spec) for name, spec in specs.items())
        tails = Tails(kv.layout)
        self._transfers = Transfers(tails, kv.alignment, size)
        self._planner = Planner(kv, self._device, [*self.tiers], tails, size, rate)
        self._stores = Stores(
            [self._device, *self.tiers], self._transfers, self._planner, watermark
        )
        self._loading: dict[bytes, Job] = {}  # by the key of the boundary
        self._watch()
        kv.tiers = self
        for spec in specs.values():
            attach(spec.policy)

    def _tier(self, name: str, spec: TierSpec) -> Tier:
        policy = Adaptive() if spec.policy is None else spec.policy
        return Tier(name, spec, policy, self._kv.layout, self._kv.index.span)

    def _watch(self) -> None:
        """Have the policies of all places go through `Watched`."""
        places: list[Place] = [self._device, *self.tiers]
        for i, place in enumerate(places):
            on_asked = self._asked if place is self._device else None
            index = place.index

            def on_pop(entry: Entry, i: int = i) -> None:
                self._stores.evicted(i, entry)

            index.policy = Watched(index.policy, on_pop, on_asked)

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
        return self._match(prompt, max_tokens)

    def _match(self, prompt: Prompt, max_tokens: int | None) -> TierMatch:
        pending = None
        if self._loading:
            for depth in range(prompt.num_segments, 0, -1):
                key = prompt.keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
                if (pending := self._loading.get(key)) is not None:
                    break
        return self._planner.match(prompt, max_tokens, pending)[0]

    # Stores.

    def stores(self, max_bytes: int) -> list[Job]:
        """Jobs that copy what eviction would take next, and what the next tier lacks, behind it.

        To be called between steps. An entry stays findable and readable while it is copied, and is
        not evicted; afterwards its eviction writes nothing. Parents come before children, and a
        resume point with the last of its chain.

        Args:
            max_bytes: of all jobs together; a first job may have more, when one segment does.

        Raises:
            ValueError: `max_bytes` is no int or negative. Other errors: those of a tier's policy.
        """
        max_bytes = as_int("max_bytes", max_bytes, 0)
        made = self._stores.due(max_bytes // self.page_bytes)
        self.jobs.update(dict.fromkeys(made))
        return made

    # Loads.

    def load(self, match: TierMatch) -> Job | OutOfPages | None:
        """The job that brings to the device what `match` says, looked up again.

        Device pages are reserved, and cached entries evicted for them as in `KVCache.plan`. Until
        the job is done nothing is findable that was not.

        Args:
            match: from `match`.

        Returns:
            Job; OutOfPages, and nothing changed; or None: there is nothing to load.

        Raises:
            ValueError: `match` is none of this cache's. Other errors: those of the policy.
        """
        if not isinstance(match, TierMatch):
            raise ValueError(f"match: expected what `Tiers.match` returned, got {match!r}")
        prompt = match.prompt
        _, way = self._planner.match(prompt, match.device.max_tokens, None)
        if not any(way.pages):
            return None
        self._changed()
        job = self._transfers.load(self._device, way, prompt)
        if job is None:
            return self._lacking(sum(way.pages))
        for place, pages in zip(self.tiers, way.pages[1:], strict=True):
            place.queued_bytes += pages * self.page_bytes
        if prompt.tokens is not None:
            parts, a = job.parts, self._kv.alignment
            rows = prompt.tokens[parts.first * a : (parts.first + len(parts.segments)) * a]
            parts.tokens = rows.reshape(-1, a)
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

    def _lacking(self, needed: int) -> OutOfPages:
        groups = self._kv.layout.groups
        return self._kv._steps.lacking(needed, dict.fromkeys((g.name for g in groups), needed))

    # The end of jobs.

    def done(self, job: Job, failed: Any = (), *, seconds: float | None = None) -> None:
        """A job's pages are copied: what came is findable where it went, from now on.

        A load may be called done as soon as its copies are queued, where all that reads these
        pages is queued behind them; if a copy fails after that, call `KVCache.evict_pages`.

        Args:
            job: that is open.
            failed: [n] ints, target pages whose copies failed. What they belong to is not adopted,
                nor what comes after it in the chain. Where a load fails, its source is dropped too,
                with what cannot be found without it; where a store does, it is tried again later.
            seconds: that the copies took: measures the link of a load.

        Raises:
            ValueError: the job is not open, or has no such pages. Nothing changed.
        """
        parts = self._open(job)
        rows = parts.failed_rows(failed)
        if seconds is not None:
            seconds = as_rate("seconds", seconds)
        self._close(job)
        if parts.is_void:
            parts.holding.end()
            return
        parts.target.index.tick += 1
        segments, is_new, came = self._transfers.adopt(parts, rows)
        self._let_go(job)
        if job.kind == "store":
            self._stores.ended(job, len(rows), segments, is_new, came)
            return
        parts_of = [(p, (parts.places == i)) for i, p in enumerate(parts.source_places)]
        ok = parts.units >= 0
        for place, mine in parts_of:
            if isinstance(place, Tier) and mine.any():
                count = place.counters
                bad = mine[rows]
                count["load_failures"] += bool(bad.any())
                count["loaded_pages"] += int(mine.sum()) - int(bad.sum())
                count["loaded_segments"] += len(set(parts.units[mine & ok].tolist()))
                count["loaded_points"] += bool((mine & ~ok).any())
                if bad.any():
                    place.drop(parts.sources[rows[bad]])
                elif seconds is not None and mine.all():
                    place.measured(job.num_bytes, seconds)

    def cancel(self, job: Job) -> None:
        """End a job whose copies do not run, or not any more: it brings nothing.

        Raises:
            ValueError: the job is not open.
        """
        self._open(job)
        self._close(job)
        self._let_go(job)

    def _open(self, job: Job) -> Any:
        if job not in self.jobs:
            raise ValueError(f"job: expected one that is open, got {job!r}")
        return job.parts

    def _close(self, job: Job) -> None:
        self._changed()
        del self.jobs[job]
        job.is_open = False
        key = job.parts.keys[-KEY_BYTES:]
        if self._loading.get(key) is job:
            del self._loading[key]
        if job.kind == "load":
            for i, place in enumerate(job.parts.source_places):
                if isinstance(place, Tier):
                    place.queued_bytes -= int((job.parts.places == i).sum()) * self.page_bytes

    def _let_go(self, job: Job) -> None:
        """End what an open job keeps; its own pages, but those adopted, are free again."""
        parts = job.parts
        parts.holding.end(used=False)
        self._let_go_of_sources(job)

    def _let_go_of_sources(self, job: Job) -> None:
        for holding in job.parts.holdings:
            holding.end(used=job.kind == "load")
        job.parts.holdings = []
        if job.parts.entry is not None:
            self._stores.unlocked(job)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """The engine computed the prefill of `num_tokens` in `seconds`: measures its rate."""
        rate = as_int("num_tokens", num_tokens, 1) / as_rate("seconds", seconds)
        planner = self._planner
        planner.prefill_tokens_per_second += 0.2 * (rate - planner.prefill_tokens_per_second)

    # All of it.

    def _changed(self) -> None:
        """The stack of free pages may change: the newest plan is void."""
        self._kv._steps.planned = None

    def clear(self) -> None:
        """Forget everything kept. Open jobs bring nothing, and keep their own pages until they are
        done. (`KVCache.clear` and `KVCache.reset` call this.)"""
        for job in self.jobs:
            parts = job.parts
            if not parts.is_void:
                parts.is_void = True
                parts.holding.detach()
                self._let_go_of_sources(job)
        self._loading.clear()
        for tier in self.tiers:
            tier.index.clear()

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
            }
            for name, value in {**tier.counters, **now}.items():
                found[f"tier_{name}/{tier.name}"] = value
        return found
