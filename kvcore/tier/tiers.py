"""`Tiers`: host memory behind the pool of one cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..announcer import Announcer
from ..arrays import Int64
from ..attachments import attach
from ..cache import KVCache
from ..events import Event, split_keys
from ..plan import OutOfPages
from ..policies.adaptive import Adaptive
from ..policies.base import Entry, EvictionPolicy
from ..policies.lru import LRU
from ..prefix.extra_keys import ExtraKeys
from ..prefix.keys import KEY_BYTES, Prompt
from ..spec import MOST_PARTS, Layout, as_int
from .jobs import Job, JobParts
from .match import Planner, Share, TierMatch, cheapest
from .places import HOST, Place, Tails, Tier, TierSpec, as_rate
from .stores import Stores
from .transfers import Lack, Transfers
from .wrong_rows import forget, held_by

LEAST_WORTH = 1e-9  # seconds: an entry whose load takes longer than its prefill


class Tiers:
    """Host memory behind the pool of a cache: what leaves the pool is kept there, and comes back.

    It keeps whole entries, as the pool does: dense segments, each after its parent, and resume
    points, each with its chain. Pages are copied by the engine: `stores` and `load` hand out jobs,
    and `done` ends them. Nothing of it happens in the calls of a step.

    Args:
        kv: the cache, new or in use; one `Tiers` for each.
        host: room in host memory, and its link.
        prefill_tokens_per_second: what the engine computes; `computed` measures it.
        page_bytes: bytes of a page of the host; by default those of a page of the pool in one
            tensor.
        parts: [num_groups] pages of the host that a page of each group takes there, by default 1.
            The pool's pages are equal; where a group leaves some of its own unused, smaller pages
            in the host need not keep that. `Copies.parts` says which part of a page goes where.
        watermark: pages of the pool to be free or to have a copy: entries that eviction takes next
            are copied until it is reached. By default an eighth of the pool.

    Attributes:
        host: pages, link and counters of the host.
        jobs: the open jobs, the oldest first.
        layout: the groups in pages of the host.

    Calls are to be made as those of the cache: one at a time, between steps. `load`, `done` and
    `cancel` void a plan that is not committed.

    Raises:
        ValueError: an argument out of range, no `KVCache` with caching, or one with tiers.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        host: TierSpec,
        prefill_tokens_per_second: float,
        page_bytes: int | None = None,
        parts: Sequence[int] | None = None,
        watermark: int | None = None,
    ) -> None:
        if not isinstance(kv, KVCache):
            raise ValueError(f"kv: expected a KVCache, got {kv!r}")
        if not kv.enable_caching:
            raise ValueError("kv: expected a cache with enable_caching, got one without")
        if kv.tiers is not None:
            raise ValueError("kv: expected a cache without tiers, got one that has some")
        if not isinstance(host, TierSpec):
            raise ValueError(f"host: expected a TierSpec, got {host!r}")
        rate = as_rate("prefill_tokens_per_second", prefill_tokens_per_second)
        size = kv.layout.page_bytes if page_bytes is None else as_int("page_bytes", page_bytes, 1)
        if watermark is not None:
            watermark = as_int("watermark", watermark, 0)
        self._kv = kv
        self.page_bytes = size
        self.layout = kv.layout.in_parts(size, _checked_parts(parts, kv.layout))
        self.jobs: dict[Job, None] = {}
        self._device = device = Place(kv.index)
        announcer = None
        if kv._announcer is not None:
            announcer = Announcer(kv._announcer.log, kv.layout, kv.sequences, "CPU")
        policy = self._policy() if host.policy is None else host.policy
        self.host = Tier(host, policy, self.layout, kv.index.span, announcer)
        self._tails = tails = Tails(kv.layout, self.layout)
        self._transfers = Transfers(device, self.host, tails, kv.alignment, size)
        self._planner = Planner(kv, device, self.host, tails, size, rate)
        self._stores = Stores(device, self.host, self._transfers, self._planner, watermark)
        self._loading: dict[bytes, Job] = {}  # by the key of the boundary
        kv.tiers = self
        attach(host.policy)

    def _policy(self) -> EvictionPolicy:
        """The policy of a host that brings none: it learns with that of the cache if it can."""
        policy = self._kv.index.policy
        return policy.behind(self._worth) if isinstance(policy, Adaptive) else LRU()

    def _worth(self, entry: Entry) -> float:
        """Seconds that an entry of the host saves for each byte that its eviction frees."""
        load = entry.num_pages * self.page_bytes / self.host.bytes_per_second
        saved = self._planner.compute_seconds(entry.gain) - load
        return max(saved, LEAST_WORTH) / ((entry.freed or 1) * self.page_bytes)

    # Look-up.

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

    # Stores and loads.

    def stores(self, max_bytes: int) -> list[Job]:
        """Make jobs that copy to the host what eviction would take next, before it does.

        To be called between steps. An entry stays findable and readable while it is copied, and is
        not evicted; afterwards its eviction writes nothing. Parents come before children, and a
        resume point with the last of its chain.

        Args:
            max_bytes: of all jobs together. The first job may have more, when one segment does.

        Raises:
            ValueError: `max_bytes` is no int or negative. Other errors: those of the host's policy.
        """
        made = self._stores.begin(as_int("max_bytes", max_bytes, 0) // self.page_bytes)
        announcer = self._kv._announcer
        for job in made:
            if announcer is not None:
                parts = job.parts
                parts.noted = announcer.of_segments(
                    split_keys(parts.keys[parts.first * KEY_BYTES :])
                )
            self.jobs[job] = None
        return made

    def load(self, match: TierMatch | Prompt) -> Job | OutOfPages | None:
        """Make the job that brings a prompt to the device, as far as it is quicker than computing
        it; looked up now.

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
        job = self._transfers.load(way, prompt)
        if isinstance(job, Lack):
            return self._out_of_pages(job)
        self.host.queued_bytes += job.num_bytes
        parts = job.parts
        if self._kv._announcer is not None:
            last = parts.first + len(parts.segments)
            parts.noted = self._kv._announcer.of_prompt(prompt, parts.first, last)
        self._use_source(parts)
        self.jobs[job] = None
        self._loading[parts.keys[-KEY_BYTES:]] = job
        return job

    def _use_source(self, parts: JobParts) -> None:
        """What a load reads counts as used now."""
        assert parts.reading is not None
        index, run = self.host.index, parts.reading.run
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
        """Measure the prefill rate: the engine computed `num_tokens` in `seconds`."""
        num_tokens, seconds = as_int("num_tokens", num_tokens, 1), as_rate("seconds", seconds)
        self._planner.prefill.measured(num_tokens, seconds)

    def prefill_seconds(self, num_tokens: int) -> float:
        """Seconds that the prefill of `num_tokens` takes, as measured."""
        return num_tokens / self._planner.prefill.value

    # The end of a job.

    def done(self, job: Job, failed: Any = (), *, seconds: float | None = None) -> Share | None:
        """End a job whose pages are copied: what came is findable where it went, from now on.

        A load may be called done as soon as its copies are queued, where all that reads these
        pages is queued behind them; if a copy fails after that, call `KVCache.evict_pages`.

        Args:
            job: an open job.
            failed: [n] ints, target pages whose copies failed. What they belong to is not adopted,
                nor what comes after it in the chain. Where a load fails, its source is dropped too,
                with what cannot be found without it; where a store does, it is tried again later.
            seconds: that the copies took: measures the link of a load.

        Returns:
            What a load brought; None of a store, or if nothing of the load is wanted any more.

        Raises:
            ValueError: the job is not open, or has no such pages. Nothing changed.
        """
        parts = self._open(job)
        pages = job.failed_pages(failed)
        if seconds is not None:
            seconds = as_rate("seconds", seconds)
        self._close(job)
        if parts.is_void:
            parts.holding.end()
            return None
        parts.holding.index.tick += 1
        segments, points, came = self._transfers.adopt(parts, pages)
        if job.kind == "load":
            self._mark_lossy(parts)
        self._let_go(job)
        if job.kind == "store":
            self._stores.ended(job, len(pages), segments, len(points))
            return None
        return self._loaded(job, pages, parts.first + came, seconds)

    def _loaded(self, job: Job, failed: Int64, end: int, seconds: float | None) -> Share:
        """Count what a load brought, segments up to `end`; drop the sources of copies that
        failed."""
        way, host = job.parts.way, self.host
        assert way is not None
        num_pages = way.num_pages - len(failed)
        segments = max(0, min(way.dense, end) - way.device.depth)
        host.counters["load_failures"] += len(failed) > 0
        host.counters["loaded_pages"] += num_pages
        host.counters["loaded_segments"] += segments
        host.counters["loaded_points"] += HOST in way.tail and not len(failed)
        if len(failed):
            host.drop(job.sources_of(failed))
        elif seconds is not None:
            host.rate.measured(job.num_bytes, seconds)
        size, tokens = num_pages * self.page_bytes, segments * self._kv.alignment
        return Share("host", tokens, num_pages, size, seconds or 0.0, host.lossy)

    def _mark_lossy(self, parts: JobParts) -> None:
        """Segments that a load brought from a lossy host count as lossy, and so do those of whose
        tokens it brought rows of windows, or a state."""
        way, index, depth = parts.way, self._kv.index, len(parts.keys) // KEY_BYTES
        assert way is not None
        if not self.host.lossy:
            return
        pages = [parts.segments[way.device.depth - parts.first :].ravel()]
        if HOST in way.tail and way.tail[HOST].any():
            run, end = index.find(parts.keys, depth)
            first = max(0, depth - self._kv.layout.reach)
            pages.append(index.pages_between(run, first, end).ravel())
        index.pool.mark_lossy(np.concatenate(pages))

    def cancel(self, job: Job) -> None:
        """End a job whose copies do not run, or not any more: it brings nothing.

        Raises:
            ValueError: the job is not open.
        """
        self._open(job)
        self._close(job)
        self._let_go(job)

    def _open(self, job: Job) -> JobParts:
        if job not in self.jobs:
            raise ValueError(f"job: expected one that is open, got {job!r}")
        return job.parts

    def _close(self, job: Job) -> None:
        self._changed()
        del self.jobs[job]
        job.is_open = False
        if job.kind == "load":
            self._end_waiting(job)
            self.host.queued_bytes -= job.num_bytes

    def _let_go(self, job: Job) -> None:
        """End what an open job keeps; its own pages, but those adopted, are free again."""
        job.parts.holding.end(used=False)
        self._let_go_of_source(job)

    def _let_go_of_source(self, job: Job) -> None:
        """End what an open job reads, once."""
        reading, job.parts.reading = job.parts.reading, None
        if reading is None:
            return
        reading.end(used=job.kind == "load")
        if job.kind == "store":
            self._stores.unlocked(job)

    def _changed(self) -> None:
        """The stack of free pages may change: the newest plan is void."""
        self._kv._planned = None

    # What is forgotten.

    def _void(self, job: Job) -> None:
        """An open job is to bring nothing; it keeps its own pages until it is done."""
        job.parts.is_void = True
        job.parts.holding.detach()
        self._let_go_of_source(job)
        self._end_waiting(job)

    def _end_waiting(self, job: Job) -> None:
        key = job.parts.keys[-KEY_BYTES:]
        if self._loading.get(key) is job:
            del self._loading[key]

    def clear(self) -> None:
        """Forget everything kept. Open jobs bring nothing, and keep their own pages until they are
        done. (`KVCache.clear` and `KVCache.reset` call this.)"""
        for job in self.jobs:
            if not job.parts.is_void:
                self._void(job)
        self.host.index.clear(tell_each=True)
        self._stores.clear()

    def forget_copies(self, is_wanted: npt.NDArray[np.bool_]) -> None:
        """Forget the copies of what the device's cached pages `is_wanted` [num_pages] hold, and
        what is found only through it; no open job brings it. (`KVCache.evict_pages` calls this.)"""
        held = held_by(self._device, is_wanted, self._tails)
        for job in self.jobs:
            parts = job.parts
            if parts.is_void:
                continue
            on_device = parts.holding if job.kind == "load" else parts.reading
            assert on_device is not None
            is_hit = is_wanted[on_device.used].any()
            if is_hit or any(one.is_on(parts, self._tails) for one in held):
                self._void(job)
        forget(self.host, held, self._tails)

    # Reports.

    def noted(self) -> list[tuple[Iterator[Event], int]]:
        """The events of all that the host holds now, for `KVCache.announce`."""
        announcer = self.host.index.announcer
        return [] if announcer is None else [announcer.noted(self.host.index.runs())]

    def pages_by_group(self) -> list[int]:
        """[num_groups] pages of the host that its entries have now; looks at each resume point."""
        return self._tails.count(self.host.index)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and pages by state now."""
        index = self.host.index
        now = {
            "points": index.num_points,
            "segments": index.num_segments,
            "free_pages": index.pool.num_free,
            "queued_bytes": self.host.queued_bytes,
        }
        return {f"tier_{name}/host": n for name, n in {**self.host.counters, **now}.items()}


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
