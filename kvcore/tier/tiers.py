"""`Tiers`: host memory behind the pool of one cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from ..announcer import Announcer
from ..arrays import Flags, Int32
from ..attachments import attach, check_policy
from ..cache import KVCache
from ..events import Event, split_keys
from ..pages import PagePool
from ..policies.adaptive import Adaptive
from ..policies.base import Entry, EvictionPolicy
from ..policies.lru import LRU
from ..prefix.extra_keys import ExtraKeys
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES, Prompt
from ..prefix.lookup import limited_by
from ..prefix.tree import ResumePoint, Run
from ..spec import as_int
from .jobs import Brought, Job, adopt, begin, let_go, make_void
from .match import Limit, TierMatch
from .stores import Stores, by_path, run_at
from .wrong_rows import copies_of

MOST_PAGES = 2**31 - 1  # ids are int32
LENGTH = attrgetter("num_tokens")
LEAST_WORTH = 1e-9  # seconds: an entry whose load takes longer than its prefill
COUNTERS = (
    "stored_pages", "stored_points", "stored_segments", "store_failures",
    "loaded_pages", "loaded_points", "loaded_segments", "load_failures",
)  # fmt: skip


class Tiers:
    """Host memory behind the pool of a cache: what leaves the pool is kept there, and comes back.

    It is the same index over a second pool. So it keeps whole entries, as the cache does: dense
    segments, each after its parent, and resume points, each with its chain. The engine copies the
    pages: `stores` and `load` hand out jobs, and `done` ends them. Nothing of it happens in the
    calls of a step.

    Args:
        kv: the cache, new or in use; one `Tiers` for each. Its policy must have `coming`.
        num_pages: pages of host memory, as large as those of the pool; page 0 (never used) included.
        bytes_per_second: how quickly pages come from it.
        prefill_tokens_per_second: what the engine computes.
        page_bytes: of a page in all tensors behind its id; by default in one, as of `GroupSpec`.
        policy: eviction policy of the host alone; nothing calls its `asked`. By default, where the
            cache has `Adaptive`, one that learns with it and ranks entries by the seconds saved for
            each byte; else `LRU`.
        watermark: pages of the pool to be free or to have a copy: entries that eviction takes next
            are copied until it is reached. By default an eighth of the pool.

    Attributes:
        index: what the host holds.
        jobs: the open jobs, the oldest first.
        page_bytes: of a page.
        bytes_per_second, prefill_tokens_per_second: may be set anew by who measures them.
        counters: since the start, see `stats`.

    Calls are to be made as those of the cache: one at a time, between steps. `load`, `done` and
    `cancel` void a plan that is not committed.

    Raises:
        ValueError: an argument out of range, no `KVCache` with caching, or one with tiers.
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
            raise ValueError(f"kv: expected a KVCache, got {kv!r}")
        if not kv.enable_caching:
            raise ValueError("kv: expected a cache with enable_caching, got one without")
        if kv.tiers is not None:
            raise ValueError("kv: expected a cache without tiers, got one that has some")
        if not hasattr(kv.index.policy, "coming"):
            raise ValueError(f"kv: expected a policy with coming(n), got {kv.index.policy!r}")
        if policy is not None:
            check_policy(policy)
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
        if kv._announcer is not None:
            self.index.announcer = Announcer(kv._announcer.log, layout, kv.sequences, "CPU")
        self.jobs: dict[Job, None] = {}
        self.counters = dict.fromkeys(COUNTERS, 0)
        kv.tiers = self
        attach(policy)

    def _worth(self, entry: Entry) -> float:
        """Seconds that an entry of the host saves for each byte that its eviction frees."""
        saved = self._prefill_seconds(entry.gain) - self._load_seconds(entry.num_pages)
        return max(saved, LEAST_WORTH) / ((entry.freed or 1) * self.page_bytes)

    def _prefill_seconds(self, num_segments: int) -> float:
        return num_segments * self._kv.alignment / self.prefill_tokens_per_second

    def _load_seconds(self, num_pages: int) -> float:
        return num_pages * self.page_bytes / self.bytes_per_second

    # Look-up.

    def match(
        self,
        token_ids: Any,
        *,
        salt: bytes | None = None,
        extra_keys: ExtraKeys | None = None,
        max_tokens: int | None = None,
    ) -> TierMatch:
        """Where a prompt is, and whether to load more of it. Changes nothing.

        The host has the whole chain of each of its resume points, so there is one load to consider:
        for the longest hit there, what the device lacks of it. It is worth its time if that is less
        than the prefill of the tokens that it saves.

        Args:
            token_ids, salt, extra_keys, max_tokens: as of `KVCache.match`.

        Raises:
            ValueError: as `KVCache.match`.
        """
        kv, a, index = self._kv, self._kv.alignment, self.index
        prompt = kv._lookup.prompt(token_ids, salt, extra_keys)
        device = kv._lookup.find(prompt, max_tokens)[0]
        run, depth = index.find(prompt.keys, prompt.num_segments)
        usable = min((prompt.num_tokens - 1) // a, prompt.num_segments)
        most = usable if max_tokens is None else min(usable, max_tokens // a)
        hit = index.resumable(run, depth, most)
        dense = max(depth, device.dense_tokens // a)
        why: Limit = limited_by(True, usable, most, dense, device.num_tokens // a)
        as_is = TierMatch(device, device.num_saved_tokens, 0, 0.0, why, dense * a)
        as_is = replace(as_is, pending=self._pending(prompt))
        if hit * a <= device.num_saved_tokens:
            return as_is
        num_pages = max(0, hit - device.dense_tokens // a) * index.pages_per_segment
        num_pages += kv.layout.pages_per_point
        queued = sum(len(job.sources) for job in self.jobs if job.kind == "load")
        seconds = self._load_seconds(queued + num_pages)
        if seconds >= (hit * a - device.num_saved_tokens) / self.prefill_tokens_per_second:
            return replace(as_is, limited_by="slower")
        why = limited_by(True, usable, most, dense, hit)
        return replace(
            as_is, num_saved_tokens=hit * a, num_bytes=num_pages * self.page_bytes,
            seconds=seconds, limited_by=why,
        )  # fmt: skip

    def _pending(self, prompt: Prompt) -> Job | None:
        """The open load that brings most of a prompt, if there is one."""
        loads = [job for job in self.jobs if job.kind == "load" and not job.brings.is_void]
        loads = [job for job in loads if prompt.keys.startswith(job.brings.keys)]
        return max(loads, key=LENGTH, default=None)

    # Jobs.

    def stores(self, max_bytes: int) -> list[Job]:
        """Make jobs that copy to the host what eviction would take next, before it does.

        To be called between steps. An entry stays findable and readable while it is copied, and is
        not evicted; afterwards its eviction writes nothing. Parents come before children, and a
        resume point with the last of its chain. A segment is in one open job at a time.

        Args:
            max_bytes: of all jobs together, about: a resume point goes whole.

        Raises:
            ValueError: `max_bytes` is no int or negative. Other errors: those of the policies.
        """
        room = as_int("max_bytes", max_bytes, 0) // self.page_bytes
        stores = [job for job in self.jobs if job.kind == "store"]
        begun = {job.brings.first_key for job in stores}
        made, width = list[Job](), self.index.pages_per_segment
        under_way = sum(len(job.sources) for job in stores)
        due = self._stores.due(self._device, self.index, under_way)
        due = {entry: found for entry, found in due.items() if self._is_worth(entry)}
        try:
            for path in by_path(due):
                if room <= 0:
                    break
                entry, (keys, first) = path[-1], due[path[-1]]
                key = keys[first * KEY_BYTES : (first + 1) * KEY_BYTES]
                if key and key in begun:
                    continue
                end = min(entry.depth, first + max(1, room // width)) if width else entry.depth
                points = [p for p in path if isinstance(p, ResumePoint) and p.depth <= end]
                job = self._begin_store(run_at(entry), keys[: end * KEY_BYTES], points)
                if job is None:  # all that the host has is needed
                    break
                made.append(job)
                begun.add(key)
                room -= len(job.sources)
                for one in points if end < entry.depth else path:
                    del due[one]
        except BaseException:
            for job in made:
                self.cancel(job)
            raise
        finally:
            for entry in due:
                self._stores.again(entry)
        return made

    def _begin_store(self, run: Run, keys: bytes, points: list[ResumePoint]) -> Job | None:
        found = begin(self._device, self.index, run, keys, points)
        if found is None:
            return None
        brings = found[0]
        for point in points:
            self._device.withdraw(point)  # to evict it now would free nothing
        if self._kv._announcer is not None:
            new = split_keys(keys[brings.first * KEY_BYTES :])
            brings.noted = self._kv._announcer.of_segments(new)
        return self._job("store", *found)

    def _is_worth(self, entry: Run | ResumePoint) -> bool:
        """Whether a load of `entry` would take less time than its prefill."""
        return self._load_seconds(entry.num_pages) < self._prefill_seconds(entry.gain)

    def load(self, match: TierMatch) -> Job | None:
        """Make the job that brings a prompt to the device as `match` says; looked up again.

        Device pages are reserved, and cached entries evicted for them as in `KVCache.plan`. Until
        the job is done nothing is findable that was not.

        Returns:
            Job; or None, and nothing changed: there is nothing to load, or no room for it.

        Raises:
            ValueError: `match` is none of this cache's. Other errors: those of the policy.
        """
        if not isinstance(match, TierMatch):
            raise ValueError(f"match: expected what `Tiers.match` returned, got {match!r}")
        match = self.match(match.prompt, max_tokens=match.device.max_tokens)
        if not match.num_bytes:
            return None
        index, depth = self.index, match.num_saved_tokens // self._kv.alignment
        keys = match.prompt.keys[: depth * KEY_BYTES]
        self._changed()
        run = index.end_at(index.find(keys, depth)[0], depth)
        point = index.point_at(run) if index.hybrid else None  # made of its neighbours if need be
        found = begin(index, self._device, run, keys, [] if point is None else [point])
        if found is None:
            return None
        index.tick += 1
        index.use(run)
        brings = found[0]
        if self._kv._announcer is not None:
            brings.noted = self._kv._announcer.of_prompt(match.prompt, brings.first, depth)
        return self._job("load", *found)

    def _job(
        self, kind: Literal["store", "load"], brings: Brought, sources: Int32, targets: Int32
    ) -> Job:
        num_tokens = len(brings.keys) // KEY_BYTES * self._kv.alignment
        job = Job(kind, sources, targets, len(sources) * self.page_bytes, num_tokens, brings)
        self.jobs[job] = None
        return job

    def done(self, job: Job, *, failed: bool = False) -> bool:
        """End a job: what it copied is findable where it went, from now on.

        Args:
            job: an open job.
            failed: some of its copies failed: it brings nothing. What a load was to bring leaves
                the host, with what cannot be found without it.

        Returns:
            Whether it brought anything: False also where that was forgotten meanwhile.

        Raises:
            ValueError: the job is not open.
        """
        brings, sources = self._close(job), job.sources
        is_void = brings.is_void
        came = not (failed or is_void)
        if came:
            brings.holding.index.tick += 1
            segments, points = adopt(brings)
            how = "stored" if job.kind == "store" else "loaded"
            self.counters[f"{how}_pages"] += len(sources)
            self.counters[f"{how}_segments"] += segments
            self.counters[f"{how}_points"] += points
        let_go(brings, used=job.kind == "load")
        if failed:
            self.counters[f"{job.kind}_failures"] += 1
            if job.kind == "load" and not is_void:
                self._drop(sources)
        return came

    def cancel(self, job: Job) -> None:
        """End a job whose copies do not run, or not any more: it brings nothing.

        Raises:
            ValueError: the job is not open.
        """
        let_go(self._close(job), used=False)

    def _close(self, job: Job) -> Brought:
        if job not in self.jobs:
            raise ValueError(f"job: expected one that is open, got {job!r}")
        self._changed()
        del self.jobs[job]
        return job.brings

    def _changed(self) -> None:
        """The stack of free pages may change: the newest plan is void."""
        self._kv._steps.planned = None

    # What is forgotten.

    def _drop(self, pages: Int32) -> None:
        """Evict from the host what holds `pages`, and what is found only through it; what open jobs
        read or build on stays."""
        is_wanted = np.zeros(self.index.pool.num_pages, dtype=np.bool_)
        is_wanted[pages] = True
        is_wanted[0] = False
        self.index.drop_pages(is_wanted)

    def _void_jobs(self) -> None:
        """Open jobs are to bring nothing; they keep their own pages until they are done."""
        for job in self.jobs:
            if not job.brings.is_void:
                make_void(job.brings)

    def clear(self) -> None:
        """Forget everything kept. (`KVCache.clear` and `KVCache.reset` call this.)"""
        self._void_jobs()
        self.index.clear(tell_each=True)

    def forget_copies(self, is_wanted: Flags) -> None:
        """Forget the copies of what the device's cached pages `is_wanted` [num_pages] hold, and
        whatever open jobs bring. (`KVCache.evict_pages` calls this.)"""
        self._void_jobs()
        self._drop(copies_of(is_wanted, self._device, self.index, self._kv.layout.reach))

    # Reports.

    def noted(self) -> list[tuple[Iterator[Event], int]]:
        """The events of all that the host holds now, for `KVCache.announce`."""
        announcer = self.index.announcer
        return [] if announcer is None else [announcer.noted(self.index.runs())]

    def stats(self) -> dict[str, int]:
        """Counters since the start, and pages by state now."""
        now = {
            "points": self.index.num_points,
            "segments": self.index.num_segments,
            "free_pages": self.index.pool.num_free,
        }
        return {f"tier_{name}/host": n for name, n in {**self.counters, **now}.items()}


def _rate(name: str, value: Any) -> float:
    """`value`, a finite number above 0; ValueError otherwise."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
    return float(value)
