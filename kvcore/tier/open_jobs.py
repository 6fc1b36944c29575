"""The open jobs of `Tiers`: how they end, and what ends them before they are done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run
from .jobs import Job, JobParts
from .match import Share
from .places import Found, Place, Tier, as_rate
from .stores import Stores
from .transfers import Transfers, chain_keys
from .watched import Watched

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
    _loading: dict[bytes, Job]  # by the key of the boundary

    def done(
        self, job: Job, failed: Any = (), *, seconds: float | None = None
    ) -> tuple[Share, ...]:
        """A job's pages are copied: what came is findable where it went, from now on.

        A load may be called done as soon as its copies are queued, where all that reads these
        pages is queued behind them; if a copy fails after that, call `KVCache.evict_pages`.

        Args:
            job: that is open.
            failed: [n] ints, target pages whose copies failed. What they belong to is not adopted,
                nor what comes after it in the chain. Where a load fails, its source is dropped too,
                with what cannot be found without it; where a store does, it is tried again later.
            seconds: that the copies took: measures the link of a load.

        Returns:
            What a load brought from each place, with these seconds, which are of all its copies.

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
            return ()
        parts.target.index.tick += 1
        segments, points, came = self._transfers.adopt(parts, rows)
        if isinstance(parts.target, Tier):
            parts.target.ledger.added(parts, came, segments, points)
        if job.kind == "load":
            self._mark_lossy(parts)
        self._let_go(job)
        if job.kind == "store":
            self._stores.ended(job, len(rows), segments, len(points))
            return ()
        shares = self._loaded(job, rows, came, seconds)
        if not len(rows):
            self._have_spares(parts)
        return shares

    def _loaded(self, job: Job, rows: Int64, came: int, seconds: float | None) -> tuple[Share, ...]:
        """Counts what a load brought, but the copies `rows`, which failed; drops their sources.

        Args:
            came: segments of the job, from the first on.
        """
        parts, shares = job.parts, []
        num_dense, n = len(parts.segments) * parts.width, len(parts.source_places)
        bad = np.bincount(parts.places[rows], minlength=n).tolist()
        pages = np.bincount(parts.places, minlength=n).tolist()
        tails = np.bincount(parts.places[num_dense:], minlength=n).tolist()
        of_segments = parts.places[: came * parts.width : parts.width or 1]
        segments = np.bincount(of_segments, minlength=n).tolist()
        for i, place in enumerate(parts.source_places):
            if not isinstance(place, Tier) or not pages[i]:
                continue
            count, num_pages = place.counters, pages[i] - bad[i]
            count["load_failures"] += bool(bad[i])
            count["loaded_pages"] += num_pages
            count["loaded_segments"] += segments[i]
            count["loaded_points"] += bool(tails[i]) and not len(rows)
            if bad[i]:
                place.drop(parts.sources[rows[parts.places[rows] == i]])
            elif seconds is not None and pages[i] == job.num_pages:
                place.measured(job.num_bytes, seconds)
            size, tokens = num_pages * self.page_bytes, segments[i] * self._kv.alignment
            shares.append(Share(place.name, tokens, num_pages, size, seconds or 0.0, place.lossy))
        return tuple(shares)

    def _mark_lossy(self, parts: JobParts) -> None:
        """Segments that a load brought from a lossy tier count as lossy, and so do those of whose
        tokens it brought rows of windows, or a state."""
        is_lossy = np.array([isinstance(p, Tier) and p.lossy for p in parts.source_places])
        rows, num_dense = is_lossy[parts.places], len(parts.segments) * parts.width
        if not rows.any():
            return
        index, depth = self._kv.index, len(parts.keys) // KEY_BYTES
        came = rows[:num_dense].reshape(-1, parts.width).any(axis=1)
        pages = parts.segments[came].ravel()
        if rows[num_dense:].any():
            run, end = index.find(parts.keys, depth)
            seen = index.pages_between(run, max(0, depth - self._kv.layout.reach), end)
            pages = np.concatenate([pages, seen.ravel()])
        index.pool.mark_lossy(pages)

    def _have_spares(self, parts: JobParts) -> None:
        """What a load brought is on the device and in the tiers that it came from."""
        depth = len(parts.keys) // KEY_BYTES
        for place in parts.source_places:
            index, policy = place.index, place.index.policy
            if isinstance(place, Tier) and isinstance(policy, Watched):
                found = Found(place, *index.find(parts.keys, depth))
                entry: Run | ResumePoint | None = found.point(depth)
                if not index.hybrid and found.depth == depth == found.run.depth:
                    entry = None if found.run.locks or found.run.children else found.run
                if entry is not None and entry not in index.pins:
                    policy.spare(entry)

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
        self._end_waiting(job)
        if job.kind == "load":
            places = job.parts.source_places
            counts = np.bincount(job.parts.places, minlength=len(places)).tolist()
            for place, pages in zip(places, counts, strict=True):
                if isinstance(place, Tier):
                    place.queued_bytes -= pages * self.page_bytes

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
        """What the device's pages `is_wanted` [num_pages] hold is kept nowhere, nor what is found
        only through it; no open job brings it. (`KVCache.evict_pages` calls this.)"""
        for job in list(self.jobs):
            parts = job.parts
            own = [h.used for h in (parts.holding, *parts.holdings) if h.index is self._kv.index]
            if parts.source_places[0] is self._device and job.kind == "store":
                own.append(parts.sources)
            if not parts.is_void and any(is_wanted[pages].any() for pages in own):
                self._void(job)
        for run in self._kv.index.runs():
            ends = [d for d in run.depths if is_wanted[run.points[d].pages].any()]
            wrong = np.flatnonzero(is_wanted[run.look()].any(axis=1))
            first = run.start + int(wrong[0]) + 1 if len(wrong) else 0
            if not (ends or first):
                continue
            keys = chain_keys(run, run.depth)
            for tier in self.tiers:
                found = Found(tier, *tier.index.find(keys, run.depth))
                points = [p for d in ends if (p := found.point(d)) is not None]
                gone = [p.pages for p in points]
                if 0 < first <= found.depth:
                    gone.append(tier.index.pages_between(found.run, first - 1, first).ravel())
                for point in points:
                    tier.index.drop_point(point)
                if gone:
                    tier.drop(np.concatenate(gone))
