"""Choose the entries to copy to the host before they are evicted from the device."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter
from typing import TypeGuard

from ..policies.base import Entry
from ..prefix.eviction import EvictableTree
from ..prefix.tree import ResumePoint, Run, path_to
from .jobs import Job
from .match import Planner
from .places import Found, Place, Tier
from .transfers import Chain, Lack, Transfers, end_of

LOOKED_AT = 64, 4096  # entries of the device in a call, at first and at most
REMEMBERED = 4096  # keys that wait
STORED, LONGEST = 6, 10  # binary logarithms of calls: the first wait of what was stored, any wait
DEPTH = attrgetter("depth")


class Stores:
    """Chooses what to store, and remembers what is stored.

    Args:
        device, host: the places.
        transfers: makes the jobs.
        planner: knows what a prefill costs.
        watermark: pages of the device, see `Tiers`.
    """

    def __init__(
        self, device: Place, host: Tier, transfers: Transfers, planner: Planner,
        watermark: int | None,
    ) -> None:  # fmt: skip
        self._device, self._host, self._transfers, self._planner = device, host, transfers, planner
        num_pages = device.index.pool.num_pages
        self._watermark = num_pages // 8 if watermark is None else watermark
        # Entries of the device, and their copies in the host.
        self._copies: dict[Run | ResumePoint, Run | ResumePoint] = {}
        # Entries of open stores, and pages that their eviction would have freed before.
        self._busy: dict[Run | ResumePoint, int] = {}
        # By key: how often it was stored, failed or found no room, and the call before which it is
        # not tried again.
        self._tries: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._calls = 0

    def begin(self, max_pages: int) -> list[Job]:
        """Make the jobs to start now; the first may have more pages, when one segment does."""
        self._calls += 1
        jobs: list[Job] = []
        due = self._due()
        for path in _paths([entry for entry in due if self._may_store(entry)]):
            most = max_pages if jobs else max(max_pages, self._transfers.least_pages)
            if most <= 0:
                break
            job = self._store(path, most, due)
            if job is not None:
                jobs.append(job)
                max_pages -= job.num_pages
        return jobs

    def _due(self) -> dict[Run | ResumePoint, int]:
        """Entries of the device that are to have a copy but have none, in the order in which they
        would go, and the pages that each would free."""
        busy = [n for entry, n in self._busy.items() if is_there(entry)]
        needed = self._watermark - self._device.num_free - sum(busy)
        due: dict[Run | ResumePoint, int] = {}
        if needed <= 0:
            return due
        looked, seen = LOOKED_AT[0], 0
        while True:
            entries = coming(self._device.index, looked)
            for entry in entries[seen:]:
                if self._copy_of(entry) is None:
                    due[entry] = entry.freed
                needed -= entry.freed
                if needed <= 0:
                    return due
            seen = len(entries)
            if seen < looked or looked >= LOOKED_AT[1]:
                return due
            looked *= 4

    def _may_store(self, entry: Run | ResumePoint) -> bool:
        """Whether `entry` was not tried lately, and a load of it would save time."""
        if self._tries and self._calls < self._tries.get(entry.key, (0, 0))[1]:
            return False
        num_bytes = self._transfers.num_bytes(entry, entry.gain)
        load = num_bytes / self._host.bytes_per_second
        return load < self._planner.compute_seconds(entry.gain)

    def _store(
        self, entries: list[Run | ResumePoint], max_pages: int, freed: dict[Run | ResumePoint, int]
    ) -> Job | None:
        """Make the job that stores `entries`, of one path, shortest first, or the first of them.
        Where the host has no room for all, the first one goes alone.

        Args:
            freed: pages that the eviction of each would free now.
        """
        chain = Chain.of(self._host, entries[-1])
        job = self._transfers.store(chain, entries, max_pages)
        if isinstance(job, Lack) and len(entries) > 1:
            entries = entries[:1]
            job = self._transfers.store(chain, entries, max_pages)
        if isinstance(job, Lack):
            self._host.counters["refused_stores"] += 1
            self._wait(entries[0].key)
            return None
        if job is not None:
            self._busy |= {entry: freed[entry] for entry in job.parts.entries}
        return job

    def _copy_of(self, entry: Run | ResumePoint) -> Run | ResumePoint | None:
        """The host's copy of `entry`; of a chain, the run in which it ends."""
        copy = self._copies.get(entry)
        if copy is not None and _is_copy(copy, entry):
            return copy
        copy = _copy_in(Chain.of(self._host, entry).there, entry)
        if copy is not None:
            self._remember(entry, copy)
        return copy

    def _remember(self, entry: Run | ResumePoint, copy: Run | ResumePoint) -> None:
        self._copies[entry] = copy
        if len(self._copies) > 4 * (self._device.index.num_segments + REMEMBERED):
            self._copies = {e: c for e, c in self._copies.items() if is_there(e)}

    def clear(self) -> None:
        """Forget what was stored when, as the host forgets everything."""
        self._tries.clear()
        self._copies.clear()

    # The end of a job.

    def unlocked(self, job: Job) -> None:
        """End a store, whatever came of it: its entries may be evicted."""
        self._transfers.is_over(job.parts)
        index = self._device.index
        for entry in job.parts.entries:
            self._busy.pop(entry, None)
            if isinstance(entry, ResumePoint) and is_there(entry) and entry not in index.pins:
                index.offer(entry)

    def ended(self, job: Job, num_failed: int, segments: int, points: int) -> None:
        """Count what a store brought; each of its entries is stored again only later.

        Args:
            num_failed: copies that failed.
            segments, points: that are new in the host.
        """
        count = self._host.counters
        count["stored_segments"] += segments
        count["stored_points"] += points
        count["stored_pages"] += job.num_pages - num_failed
        count["store_failures"] += bool(num_failed)
        for entry in filter(is_there, job.parts.entries):
            if self._copy_of(entry) is not None:
                self._wait(entry.key, STORED)
            elif num_failed:
                self._wait(entry.key)

    def _wait(self, key: bytes, least: int = 1) -> None:
        """Try `key` again after 2**least calls, and after twice as many each time: what was stored
        and is lost again would else be written again and again to a host that is too small."""
        times = min(max(least, self._tries.get(key, (0, 0))[0] + 1), LONGEST)
        self._tries[key] = times, self._calls + 2**times
        self._tries.move_to_end(key)
        if len(self._tries) > REMEMBERED:
            self._tries.popitem(last=False)


def _is_copy(copy: Run | ResumePoint, entry: Run | ResumePoint) -> bool:
    """Whether what was the copy of `entry` still is."""
    if isinstance(copy, ResumePoint):
        return copy.run is not None
    if copy.parent is None or not copy.start < entry.depth <= copy.depth:
        return False
    return copy.segment_key(entry.depth - copy.start - 1) == entry.key


def _copy_in(there: Found, entry: Run | ResumePoint) -> Run | ResumePoint | None:
    """The copy of `entry`, whose chain ends in the host as `there` says."""
    if isinstance(entry, ResumePoint):
        return there.point(entry.depth)
    return there.run if there.depth == entry.depth else None


def _paths(entries: list[Run | ResumePoint]) -> Iterator[list[Run | ResumePoint]]:
    """Entries, each with those on the path to it, the shortest first. Runs may be split meanwhile."""
    if len(entries) < 2:
        yield from ([entry] for entry in entries)
        return
    on_run: dict[Run, list[Run | ResumePoint]] = {}
    for entry in entries:
        on_run.setdefault(end_of(entry)[0], []).append(entry)
    for entry in entries:
        run, _ = end_of(entry)
        if run in on_run:  # else it went with another
            path = [e for node in path_to(run) for e in on_run.pop(node, ())]
            yield sorted(path, key=DEPTH)


def coming(index: EvictableTree, n: int) -> list[Run | ResumePoint]:
    """The entries of `index` that eviction would take next, at most `n`, without any effect. Those
    used least recently stand in where the policy has no `coming`."""
    tell = getattr(index.policy, "coming", None)
    found = None if tell is None else tell(n)
    if found is None:
        entries: list[Run | ResumePoint] = []
        for run in index.runs():
            if index.hybrid:
                entries += run.points.values()
            elif not (run.locks or run.children):
                entries.append(run)
        found = heapq.nsmallest(n, entries, key=lambda e: (e.last_used, -e.depth))
    return [entry for entry in found if is_there(entry) and entry not in index.pins]


def is_there(entry: Entry) -> TypeGuard[Run | ResumePoint]:
    """Whether `entry` is still one of its index."""
    if isinstance(entry, ResumePoint):
        return entry.run is not None
    return isinstance(entry, Run) and entry.parent is not None
