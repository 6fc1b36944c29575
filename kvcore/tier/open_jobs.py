"""The open jobs of `Tiers`: how they end, and what ends them before they are done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import NO_VALUES, Int32
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run
from .jobs import Job, JobParts
from .match import Share, Way
from .places import Found, Place, Tails, Tier, as_rate
from .stores import Stores
from .transfers import Transfers
from .wrong_rows import forget, held_by

if TYPE_CHECKING:
    from ..cache import KVCache


class OpenJobs:
    """The part of `Tiers` that ends jobs.

    Attributes:
        tiers: those there are, the nearest first.
        jobs: that are open, the oldest first.
        page_bytes: bytes of a page of a tier.
    """

    tiers: tuple[Tier, ...]
    jobs: dict[Job, None]
    page_bytes: int
    _kv: KVCache
    _device: Place
    _stores: Stores
    _transfers: Transfers
    _tails: Tails
    _loading: dict[bytes, Job]  # by the key of the boundary

    def done(
        self, job: Job, failed: Any = (), *, missing: Any = (), seconds: float | None = None
    ) -> tuple[Share, ...]:
        """A job's pages are copied: what came is findable where it went, from now on.

        A load may be called done as soon as its copies are queued, where all that reads these
        pages is queued behind them; if a copy fails after that, call `KVCache.evict_pages`.

        Args:
            job: that is open.
            failed: [n] ints, target pages whose copies failed. What they belong to is not adopted,
                nor what comes after it in the chain. Where a load fails, its source is dropped too,
                with what cannot be found without it; where a store does, it is tried again later.
            missing: [n] ints, target pages that nobody copied, as nobody waits for them any more.
                They are not adopted either, but say nothing about their sources, which stay.
            seconds: that the copies took: measures the link of a load.

        Returns:
            What a load brought from each place, with these seconds, which are of all its copies.

        Raises:
            ValueError: the job is not open, or has no such pages. Nothing changed.
        """
        parts = self._open(job)
        pages, left = job.failed_pages(failed), job.failed_pages(missing, "missing")
        if seconds is not None:
            seconds = as_rate("seconds", seconds)
        self._close(job)
        if parts.is_void:
            parts.holding.end()
            return ()
        parts.target.index.tick += 1
        segments, points, came = self._transfers.adopt(parts, np.concatenate([pages, left]))
        if isinstance(parts.target, Tier):
            parts.target.ledger.added(parts, came, segments, points)
        if job.kind == "load":
            self._mark_lossy(parts)
        self._let_go(job)
        bad = job.sources_of(pages)
        if job.kind == "store":
            num_failed = sum(map(len, bad.values()))
            self._stores.ended(job, num_failed, segments, len(points), num_missing=len(left))
            return ()
        shares = self._loaded(job, bad, job.sources_of(left), parts.first + came, seconds)
        if not bad and not len(left):
            self._have_spares(parts)
        return shares

    def _loaded(
        self, job: Job, bad: dict[str, Int32], left: dict[str, Int32], end: int,
        seconds: float | None,
    ) -> tuple[Share, ...]:  # fmt: skip
        """Counts what a load brought, segments up to `end`; drops the sources `bad` of the copies
        that failed, by the name of their place, and none of those that were `left` out."""
        way, shares = job.parts.way, []
        assert way is not None
        for i, (place, pages) in enumerate(zip(self.tiers, way.pages[1:], strict=True), 1):
            if not pages:
                continue
            wrong = bad.get(place.name, NO_VALUES)
            missing = len(left.get(place.name, NO_VALUES))
            count, num_pages = place.counters, pages - len(wrong) - missing
            segments = sum([max(0, min(stop, end) - at) for j, at, stop in way.ranges if j == i])
            count["load_failures"] += len(wrong) > 0
            count["loaded_pages"] += num_pages
            count["loaded_segments"] += segments
            count["loaded_points"] += i in way.tail and not bad and not left
            if len(wrong):
                place.drop(wrong)
            elif seconds is not None and not missing and pages == job.num_pages:
                place.rate.measured(job.num_bytes, seconds)
            size, tokens = num_pages * self.page_bytes, segments * self._kv.alignment
            shares.append(Share(place.name, tokens, num_pages, size, seconds or 0.0, place.lossy))
        return tuple(shares)

    def _mark_lossy(self, parts: JobParts) -> None:
        """Segments that a load brought from a lossy tier count as lossy, and so do those of whose
        tokens it brought rows of windows, or a state."""
        way, index, depth = parts.way, self._kv.index, len(parts.keys) // KEY_BYTES
        assert way is not None
        lossy = {i for i, tier in enumerate(self.tiers, 1) if tier.lossy}
        pages = [
            parts.segments[at - parts.first : end - parts.first].ravel()
            for i, at, end in way.ranges
            if i in lossy
        ]
        if any(way.tail[i].any() for i in lossy & way.tail.keys()):
            run, end = index.find(parts.keys, depth)
            pages.append(
                index.pages_between(run, max(0, depth - self._kv.layout.reach), end).ravel()
            )
        if pages:
            index.pool.mark_lossy(np.concatenate(pages))

    def _have_spares(self, parts: JobParts) -> None:
        """What a load brought is on the device and in the tiers that it came from."""
        depth = len(parts.keys) // KEY_BYTES
        for place in parts.sources:
            index = place.index
            if isinstance(place, Tier):
                found = Found(place, *index.find(parts.keys, depth))
                entry: Run | ResumePoint | None = found.point(depth)
                if not index.hybrid and found.depth == depth == found.run.depth:
                    entry = None if found.run.locks or found.run.children else found.run
                if entry is not None and entry not in index.pins:
                    self._stores.spare(place, entry)

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
        if job.parts.way is not None:
            self._end_waiting(job)
            self._queue(job.parts.way, -self.page_bytes)

    def _queue(self, way: Way, page_bytes: int) -> None:
        """The pages of a way are loaded from now on, or, where `page_bytes` is negative, no
        more."""
        for tier, pages in zip(self.tiers, way.pages[1:], strict=True):
            tier.queued_bytes += pages * page_bytes

    def _let_go(self, job: Job) -> None:
        """End what an open job keeps; its own pages, but those adopted, are free again."""
        parts = job.parts
        parts.holding.end(used=False)
        if not parts.is_void:  # else its sources were let go of then
            self._let_go_of_sources(job)

    def _let_go_of_sources(self, job: Job) -> None:
        for holding in job.parts.holdings:
            holding.end(used=job.kind == "load")
        job.parts.holdings = []
        if job.kind == "store":
            self._stores.unlocked(job)

    # What is forgotten.

    def _changed(self) -> None:
        """The stack of free pages may change: the newest plan is void."""
        self._kv._steps.planned = None

    def _void(self, job: Job) -> None:
        """An open job is to bring nothing; it keeps its own pages until it is done."""
        job.parts.is_void = True
        job.parts.holding.detach()
        self._let_go_of_sources(job)
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
        for tier in self.tiers:
            tier.index.clear(tell_each=True)
            tier.ledger.flush()

    def forget_copies(self, is_wanted: npt.NDArray[np.bool_]) -> None:
        """What the device's cached pages `is_wanted` [num_pages] hold is kept nowhere, nor what is
        found only through it; no open job brings it. (`KVCache.evict_pages` calls this.)"""
        held = held_by(self._device, is_wanted, self._tails)
        for job in self.jobs:
            parts = job.parts
            if parts.is_void:
                continue
            holdings = (parts.holding, *parts.holdings)
            is_hit = any(is_wanted[h.used].any() for h in holdings if h.index is self._kv.index)
            if is_hit or any(one.is_on(parts, self._tails) for one in held):
                self._void(job)
        for tier in self.tiers:
            forget(tier, held, self._tails)
