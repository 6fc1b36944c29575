"""What is stored when: the entries that eviction would take next, before it does."""

from __future__ import annotations

from collections import OrderedDict

from ..policies.base import Entry
from ..prefix.eviction import EvictableTree
from ..prefix.tree import ResumePoint, Run
from .admission import Admission
from .jobs import Job
from .match import Planner
from .places import Found, Place, Tier
from .transfers import Lack, Transfers, chain_keys, end_of
from .watched import Watched, coming, is_there

LOOKED_AT = 64, 4096  # entries of a place in a call, at first and at most
REMEMBERED = 1024  # failures


class Stores:
    """Chooses what to store, and remembers what is.

    Args:
        places: the device and the tiers.
        transfers: makes the jobs.
        planner: knows what a prefill costs.
        watermark: pages of the device, see `Tiers`.
    """

    def __init__(
        self, places: list[Place], transfers: Transfers, planner: Planner, watermark: int | None
    ) -> None:
        self._places, self._transfers, self._planner = places, transfers, planner
        self._watermark = watermark
        # Resume points of a place, and their copies in the next one.
        self._copies: dict[ResumePoint, ResumePoint] = {}
        self._busy: dict[Run | ResumePoint, Job] = {}
        self._leaving: set[Run | ResumePoint] = set()  # of these, those that are to leave first
        # Failures in a row of an entry, by its key, and the call before which it is not tried
        # again.
        self._failures: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._calls = 0
        self._admission = Admission(planner, transfers.num_bytes)

    def due(self, max_pages: int) -> list[Job]:
        """The jobs to start now, of at most `max_pages` pages."""
        self._calls += 1
        self._admission.begin()
        jobs: list[Job] = []
        for source, target in zip(self._places, self._places[1:], strict=False):
            assert isinstance(target, Tier)
            max_pages -= self._due_between(source, target, max_pages, jobs)
        return jobs

    def _due_between(self, source: Place, target: Tier, max_pages: int, jobs: list[Job]) -> int:
        """Add to `jobs` those from `source` to `target`; returns their pages."""
        pool, total = source.index.pool, 0
        low = self._low(self._places[0])
        if source is not self._places[0]:  # what the device may send next must find a place
            low = max(low * self._transfers.most_parts, self._low(source))
            low = min(low, pool.num_pages - 1)
        needed = low - source.num_free - self._underway(source)
        looked, seen = LOOKED_AT[0], 0
        while needed > 0:
            entries = coming(source.index, looked)
            for entry in entries[seen:]:
                needed -= entry.freed
                if entry not in self._busy and self.copy_of(source, target, entry) is None:
                    if max_pages <= total and jobs:
                        return total
                    job = self._store(source, target, entry, max_pages - total, not jobs)
                    if job is not None:
                        jobs.append(job)
                        total += job.num_pages
                if needed <= 0:
                    return total
            seen = len(entries)
            if seen < looked or looked >= LOOKED_AT[1]:
                return total
            looked *= 4
        return total

    def _underway(self, source: Place) -> int:
        """Pages of `source` that are had without a loss once its open stores are done."""
        return sum(
            entry.freed
            for entry, job in self._busy.items()
            if job.parts.source_places[0] is source and is_there(entry)
        )

    def _low(self, place: Place) -> int:
        """Pages of a place that are to be free, or to be had without a loss."""
        if place is self._places[0] and self._watermark is not None:
            return self._watermark
        return place.index.pool.num_pages // 8

    def everything(self, max_pages: int) -> list[Job]:
        """The jobs, of at most `max_pages` pages, that bring what a place holds to the next one."""
        self._calls += 1
        jobs: list[Job] = []
        total = 0
        for source, target in zip(self._places, self._places[1:], strict=False):
            assert isinstance(target, Tier)
            for entry in every(source.index):
                if entry not in self._busy and self.copy_of(source, target, entry) is None:
                    if max_pages <= total and jobs:
                        return jobs
                    job = self._store(source, target, entry, max_pages - total, not jobs)
                    if job is not None:
                        jobs.append(job)
                        total += job.num_pages
        return jobs

    def _store(
        self, source: Place, target: Tier, entry: Run | ResumePoint, max_pages: int, is_first: bool
    ) -> Job | None:
        """The job that stores `entry`, or its first segments; the first one of a call has at least
        a segment or a point."""
        if self._admission.is_refused(entry):
            return None
        key = entry.key
        if self._calls < self._failures.get(key, (0, 0))[1]:
            return None
        if is_first:
            max_pages = max(max_pages, self._transfers.least_pages)
        is_spare = isinstance(source.index.policy, Watched) and source.index.policy.is_spare(entry)
        job = self._transfers.store(
            source, target, entry, max_pages,
            lambda n, gain: self._admission.admits(source, target, entry, n, gain),
        )  # fmt: skip
        if isinstance(job, Lack):
            target.counters["refused_stores"] += 1
            self._failed(key)
            return None
        if job is not None:
            self._busy[entry] = job
            if is_spare:
                self._leaving.add(entry)
        return job

    def copy_of(
        self, source: Place, target: Place, entry: Run | ResumePoint
    ) -> Run | ResumePoint | None:
        """What `target` has of what `entry` of `source` is; of a chain, the run that it ends in."""
        if isinstance(entry, ResumePoint):
            copy = self._copies.get(entry)
            if copy is not None:
                if copy.run is not None:
                    return copy
                del self._copies[entry]
        run, depth = end_of(entry)
        found = Found(target, *target.index.find(chain_keys(run, depth), depth))
        if isinstance(entry, ResumePoint):
            copy = found.point(depth)
            if copy is not None:
                self._remember(source, entry, copy)
            return copy
        return found.run if found.depth == depth else None

    def _remember(self, source: Place, entry: ResumePoint, copy: ResumePoint) -> None:
        self._copies[entry] = copy
        if len(self._copies) > 4 * (source.index.num_points + REMEMBERED):
            self._copies = {e: c for e, c in self._copies.items() if e.run and c.run}

    def evicted(self, place: int, entry: Entry) -> None:
        """A place's policy took out `entry`: it is lost where the next tier lacks it."""
        if place + 1 == len(self._places):
            return
        source, target = self._places[place], self._places[place + 1]
        assert isinstance(entry, (Run, ResumePoint)) and isinstance(target, Tier)
        if not is_there(entry):
            return
        copy = self.copy_of(source, target, entry)
        if copy is None:
            target.counters["lost"] += 1
        elif isinstance(target.index.policy, Watched):
            target.index.policy.needed(copy)

    # The end of a job.

    def unlocked(self, job: Job) -> None:
        """A job of a store ends: its entry may be evicted."""
        entry = job.parts.entry
        assert entry is not None
        self._busy.pop(entry, None)
        self._transfers.is_over(job.parts)
        index = job.parts.source_places[0].index
        is_leaving = entry in self._leaving
        self._leaving.discard(entry)
        if entry in index.pins:
            return
        if isinstance(entry, ResumePoint):
            if entry.run is None:
                return
            index.offer(entry)
        elif entry.locks or entry.children or entry.parent is None:
            return
        if is_leaving and isinstance(index.policy, Watched):
            index.policy.spare(entry)

    def ended(self, job: Job, num_failed: int, segments: int, is_new: bool, came: int) -> None:
        """A store is done.

        Args:
            num_failed: copies that failed. segments, is_new, came: what `Transfers.adopt` says.
        """
        parts, target = job.parts, job.parts.target
        entry = parts.entry
        assert isinstance(target, Tier) and entry is not None
        count = target.counters
        count["stored_segments"] += segments
        count["stored_points"] += is_new
        count["stored_pages"] += job.num_pages - num_failed
        if not is_there(entry):
            return
        if num_failed:
            count["store_failures"] += 1
            self._failed(entry.key)
        else:
            self._failures.pop(entry.key, None)
            self.copy_of(parts.source_places[0], target, entry)

    def _failed(self, key: bytes) -> None:
        """Try `key` again later, and later each time."""
        failures = min(self._failures.get(key, (0, 0))[0] + 1, 16)
        self._failures[key] = failures, self._calls + 2**failures
        self._failures.move_to_end(key)
        if len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)


def every(index: EvictableTree) -> list[Run | ResumePoint]:
    """Entries of `index`, the one used least recently first."""
    entries: list[Run | ResumePoint] = []
    for run in index.runs():
        if index.hybrid:
            entries += run.points.values()
        elif not run.children:
            entries.append(run)
    return sorted(entries, key=lambda entry: entry.last_used)
