"""`Tiers`: host memory behind the page pool of one cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from ..arguments import as_int, as_number, as_unused, refusal, take_ownership
from ..arrays import Int32
from ..cache import KVCache
from ..event_writer import EventWriter
from ..events import Event, split_keys
from ..pages import PagePool
from ..policies.adaptive import Adaptive
from ..policies.base import LRU, Entry, EvictionPolicy, is_policy
from ..prefix.evict_pages import evict_pages
from ..prefix.extra_keys import ExtraKeys
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES, Prompt
from ..prefix.lookup import find_limit
from ..prefix.tree import ResumePoint, Run
from .jobs import Job, begin_job
from .match import Limit, TierMatch
from .stores import Stores, by_path, run_at

MOST_PAGES = 2**31 - 1  # ids are int32
LEAST_WORTH = 1e-9  # seconds, for entries slower to load than to compute
COUNTERS = (
    "stored_pages", "stored_points", "stored_segments", "store_failures",
    "loaded_pages", "loaded_points", "loaded_segments", "load_failures",
)  # fmt: skip
LENGTH = attrgetter("num_tokens")


class Tiers:
    """Keep what leaves the pool of a cache in host memory, and bring it back.

    The host is a second pool with an index of the same kind. The engine copies pages: `stores` and
    `load` return jobs, `done` ends them. Call them between steps; `load`, `done` and `cancel` void
    a plan that is not committed.

    Args:
        kv: cache, new or in use, without tiers. Its policy must have `coming`.
        num_pages: host pages, of the same size as pool pages; page 0 (never used) included.
        bytes_per_second: bandwidth from host to device.
        prefill_tokens_per_second: prefill rate of the engine.
        page_bytes: bytes of a page in all tensors together; by default those in one tensor.
        policy: eviction policy of the host, by default `LRU`; with an `Adaptive` cache one that
            shares its statistics and ranks entries by seconds saved per byte.
        watermark: pool pages to be free or to have a copy; by default an eighth.

    Attributes:
        index: content of the host.
        jobs: open jobs, oldest first.
        counters: see `stats`.

    A wrong argument of a call raises ValueError, and nothing has changed.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        num_pages: int,
        bytes_per_second: float,
        prefill_tokens_per_second: float,
        page_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        watermark: int | None = None,
    ) -> None:
        if not isinstance(kv, KVCache):
            raise refusal("kv", "a KVCache", repr(kv))
        if not kv.enable_caching:
            raise refusal("kv", "a cache with enable_caching", "one without")
        if kv.tiers is not None:
            raise refusal("kv", "a cache without tiers", "one that has some")
        if not hasattr(kv.index.policy, "coming"):
            raise refusal("kv", "a policy with coming(n)", repr(kv.index.policy))
        if policy is not None:
            as_unused("policy", policy, "an eviction policy, such as LRU()", is_policy(policy))
        pool = PagePool(as_int("num_pages", num_pages, 2, MOST_PAGES))
        watermark = kv.num_pages // 8 if watermark is None else watermark
        page_bytes = kv.layout.page_bytes if page_bytes is None else page_bytes
        self._kv, self._device, layout = kv, kv.index, kv.layout
        self._stores = Stores(as_int("watermark", watermark, 0))
        self.page_bytes = as_int("page_bytes", page_bytes, 1)
        self.bytes_per_second = _rate("bytes_per_second", bytes_per_second)
        self.prefill_tokens_per_second = _rate(
            "prefill_tokens_per_second", prefill_tokens_per_second
        )
        if policy is None:
            own = kv.index.policy
            policy = own.behind(self._worth) if isinstance(own, Adaptive) else LRU()
        self.index = PrefixIndex(
            pool,
            layout.pages_per_segment,
            layout.hybrid,
            policy,
            kv.index.span,
            layout.tail_between,
        )
        if kv._event_writer is not None:
            self.index.event_writer = EventWriter(kv._event_writer.log, layout, kv.sequences, "CPU")
        self.jobs: dict[Job, None] = {}
        self.counters = dict.fromkeys(COUNTERS, 0)
        kv.tiers = self
        take_ownership(policy)

    def _load_seconds(self, num_pages: int) -> float:
        return num_pages * self.page_bytes / self.bytes_per_second

    def _prefill_seconds(self, num_segments: int) -> float:
        return num_segments * self._kv.alignment / self.prefill_tokens_per_second

    def _worth(self, entry: Entry) -> float:
        """Seconds saved by a host entry for each byte freed by its eviction."""
        saved = self._prefill_seconds(entry.gain) - self._load_seconds(entry.num_pages)
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
        """Find a prompt in both places, and decide to load more only if prefill would take longer.
        Changes nothing. The arguments are those of `KVCache.match`."""
        kv, a, index = self._kv, self._kv.alignment, self.index
        prompt = kv._lookup.to_prompt(token_ids, salt, extra_keys)
        device = kv._lookup.find(prompt, max_tokens)[0]
        run, depth = index.find(prompt.keys, prompt.num_segments)
        usable = min((prompt.num_tokens - 1) // a, prompt.num_segments)
        most = usable if max_tokens is None else min(usable, max_tokens // a)
        hit = index.resumable(run, depth, most)
        dense = max(depth, device.dense_tokens // a)
        why: Limit = find_limit(True, usable, most, dense, device.num_tokens // a)
        without = TierMatch(
            device, device.num_saved_tokens, 0, 0.0, why, dense * a, self._pending(prompt)
        )
        num_pages = max(0, hit - device.dense_tokens // a) * index.pages_per_segment
        num_pages += kv.layout.pages_per_point
        if hit * a <= device.num_saved_tokens or not num_pages:
            return without
        queued = sum(len(job.sources) for job in self.jobs if job.kind == "load")
        seconds = self._load_seconds(queued + num_pages)
        if seconds >= (hit * a - device.num_saved_tokens) / self.prefill_tokens_per_second:
            return replace(without, limited_by="slower")
        why = find_limit(True, usable, most, dense, hit)
        return replace(
            without, num_saved_tokens=hit * a, num_bytes=num_pages * self.page_bytes,
            seconds=seconds, limited_by=why,
        )  # fmt: skip

    def _pending(self, prompt: Prompt) -> Job | None:
        loads = [job for job in self.jobs if job.kind == "load" and not job.is_void]
        loads = [job for job in loads if prompt.keys.startswith(job.keys)]
        return max(loads, key=LENGTH, default=None)

    # Jobs.

    def stores(self, max_bytes: int) -> list[Job]:
        """Begin to copy entries to the host before they are evicted; they stay cached meanwhile.
        Parents are copied before children, a resume point with the last segment of its chain.

        Args:
            max_bytes: approximate limit for all jobs together; a resume point is not split.

        Raises:
            ValueError: `max_bytes` is not an int, or negative. After an error of a policy no job
                is begun, too.
        """
        pages_left = as_int("max_bytes", max_bytes, 0) // self.page_bytes
        stores = [job for job in self.jobs if job.kind == "store"]
        begun = {job.first_key for job in stores}
        made, width = list[Job](), self.index.pages_per_segment
        under_way = sum(len(job.sources) for job in stores)
        due = self._stores.due(self._device, self.index, under_way)
        due = {entry: found for entry, found in due.items() if self._is_worth(entry)}
        try:
            for path in by_path(due):
                if pages_left <= 0:
                    break
                entry, (keys, first) = path[-1], due[path[-1]]
                key = keys[first * KEY_BYTES : (first + 1) * KEY_BYTES]
                if key and key in begun:
                    continue
                end = (
                    min(entry.depth, first + max(1, pages_left // width)) if width else entry.depth
                )
                points = [p for p in path if isinstance(p, ResumePoint) and p.depth <= end]
                job = self._begin_store(run_at(entry), keys[: end * KEY_BYTES], points)
                if job is None:  # everything in the host is in use
                    break
                made.append(job)
                begun.add(key)
                pages_left -= len(job.sources)
                # Of a chain that is copied in part, only the points in that part are done.
                for one in points if end < entry.depth else path:
                    del due[one]
        except BaseException:
            for job in made:
                self.cancel(job)
            raise
        finally:
            for entry in due:
                self._stores.inspect_again(entry)
        return made

    def _is_worth(self, entry: Run | ResumePoint) -> bool:
        return self._load_seconds(entry.num_pages) < self._prefill_seconds(entry.gain)

    def _begin_store(self, run: Run, keys: bytes, points: list[ResumePoint]) -> Job | None:
        job = self._begin("store", run, keys, points)
        if job is None:
            return None
        for point in points:
            self._device.withdraw(point)  # its eviction would free no page now
        if self._kv._event_writer is not None:
            new = split_keys(keys[job.first * KEY_BYTES :])
            job.contents = self._kv._event_writer.of_segments(new)
        return job

    def load(self, match: TierMatch) -> Job | None:
        """Begin to load a prompt to device pages, evicting cached entries as `KVCache.plan` does.
        It is looked up again, and nothing becomes findable before `done`. None without anything to
        load, or room: then nothing was evicted. A plan made before is void. ValueError if `match`
        is not a `TierMatch`."""
        if not isinstance(match, TierMatch):
            raise refusal("match", "what `Tiers.match` returned", repr(match))
        match = self.match(match.prompt, max_tokens=match.device.max_tokens)
        if not match.num_bytes:
            return None
        index, depth = self.index, match.num_saved_tokens // self._kv.alignment
        keys = match.prompt.keys[: depth * KEY_BYTES]
        self._changed()
        run = index.end_at(index.find(keys, depth)[0], depth)
        point = index.point_at(run) if index.hybrid else None  # perhaps made of its neighbours
        job = self._begin("load", run, keys, [] if point is None else [point])
        if job is None:
            return None
        index.tick += 1
        index.use(run)
        if self._kv._event_writer is not None:
            job.contents = self._kv._event_writer.of_prompt(match.prompt, job.first, depth)
        return job

    def _begin(
        self, kind: Literal["store", "load"], run: Run, keys: bytes, points: list[ResumePoint]
    ) -> Job | None:
        ends = (self._device, self.index) if kind == "store" else (self.index, self._device)
        job = begin_job(kind, *ends, run, keys, points, self.page_bytes, self._kv.alignment)
        if job is not None:
            self.jobs[job] = None
        return job

    def done(self, job: Job, *, failed: bool = False) -> bool:
        """End an open job: the copied entries become findable in the target. False if none did,
        as a copy `failed` or they were forgotten meanwhile. After a failed load its source
        entries leave the host, with everything found only through them."""
        self._close(job)
        is_void = job.is_void
        is_good = not (failed or is_void)
        if is_good:
            job.target.index.tick += 1
            segments, points = job.adopt()
            how = "stored" if job.kind == "store" else "loaded"
            self.counters[f"{how}_pages"] += len(job.sources)
            self.counters[f"{how}_segments"] += segments
            self.counters[f"{how}_points"] += points
        job.end(used=job.kind == "load")
        if failed:
            self.counters[f"{job.kind}_failures"] += 1
            if job.kind == "load" and not is_void:
                self._drop(job.sources)
        return is_good

    def cancel(self, job: Job) -> None:
        """End an open job; no entry is added or dropped."""
        self._close(job)
        job.end(used=False)

    def _close(self, job: Job) -> None:
        if job not in self.jobs:
            raise refusal("job", "one that is open", repr(job))
        self._changed()
        del self.jobs[job]

    def _changed(self) -> None:
        self._kv._planned = None

    # Called by the cache.

    def clear(self) -> None:
        """Forget all entries, and those of open jobs (for `KVCache.clear` and others)."""
        for job in self.jobs:
            if not job.is_void:
                job.void()
        self.index.clear(tell_each=True)
        self._stores.inspect_all_again()

    def _drop(self, pages: Int32) -> None:
        """Evict host entries with any of `pages`, and everything found only through them."""
        is_wanted = np.zeros(self.index.pool.num_pages, dtype=np.bool_)
        is_wanted[pages] = True
        is_wanted[0] = False
        evict_pages(self.index, is_wanted)

    def snapshot_events(self) -> list[tuple[Iterator[Event], int]]:
        """Events of all host entries; for `KVCache.announce`."""
        event_writer = self.index.event_writer
        return [] if event_writer is None else [event_writer.snapshot(self.index.runs())]

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the current content; for `KVCache.stats`."""
        now = {
            "points": self.index.num_points,
            "segments": self.index.num_segments,
            "free_pages": self.index.pool.num_free,
        }
        return {f"tier_{name}/host": n for name, n in {**self.counters, **now}.items()}


def _rate(name: str, value: Any) -> float:
    rate = as_number(name, value, "a finite number > 0")
    if rate <= 0:
        raise refusal(name, "a finite number > 0", repr(value))
    return rate
