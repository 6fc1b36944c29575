"""What is stored when: the entries that eviction would take next, before it does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from operator import attrgetter

from ..policies.base import Entry
from ..prefix.eviction import EvictableTree
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run, path_to
from .admission import Admission
from .jobs import Job
from .match import Planner
from .places import Found, Place, Tier
from .transfers import Chain, Lack, Transfers, end_of
from .watched import coming, is_there

LOOKED_AT = 16, 4096  # entries of a place in a call, more than in the last one and at most
RECOUNT = 64  # calls, after which pages to be had without a loss are counted again at the latest
SLACK = 16  # of so many pages to be had without a loss one may be missing
REMEMBERED = 1024  # failures
LONGEST_WAIT = 5  # of what found no room, which others give back soon: 2**5 calls
DEPTH = attrgetter("depth")


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
        self._onward = list(pairwise(places))
        self._next = dict(self._onward)
        # Resume points of a place, and their copies in the next one.
        self._copies: dict[ResumePoint, ResumePoint] = {}
        # Copies, and the spare entries whose they are, one in a place; those of them that may be
        # gone.
        self._spared: dict[Run | ResumePoint, dict[Place, Run | ResumePoint]] = {}
        self._doubtful: dict[Run | ResumePoint, None] = {}
        self._counted: dict[Place, int] = {}  # calls in which pages to be had were counted
        # Entries of open stores, whose place, and pages that their eviction would free without
        # these.
        self._busy: dict[Run | ResumePoint, tuple[Place, int]] = {}
        self._leaving: set[Run | ResumePoint] = set()  # of these, those that are to leave first
        # Failures in a row of an entry, by its key, and the call before which it is not tried
        # again.
        self._failures: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lacks: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # of room, as these
        self._due_before: dict[Place, int] = {}  # entries, in the last call
        self._calls = 0
        self._admission = Admission(planner, transfers.num_bytes)

    def begin(self, max_pages: int | dict[str, int], everything: bool) -> list[Job]:
        """The jobs to start now: of what eviction would take next, or of all that the last place
        lacks.

        Args:
            max_pages: of all of them together, or by the name of the tier that they are for.
        """
        self._calls += 1
        self._admission.begin()
        if self._doubtful:
            self._check_copies()
        jobs: list[Job] = []
        for source, target in self._ways(everything):
            assert isinstance(target, Tier)
            most, together = max_pages, jobs
            if isinstance(most, dict):
                most = most.get(target.name, 0)
                together = [job for job in jobs if job.parts.target is target]
                if not most:
                    continue
            room = most - sum([job.num_pages for job in together])
            jobs += self._begin(source, target, room, everything, not together)
        return jobs

    def _begin(
        self, source: Place, target: Tier, max_pages: int, everything: bool, is_first: bool
    ) -> list[Job]:
        """Jobs from one place to another; a first one may have more pages, when one segment does."""
        jobs: list[Job] = []
        freed = self._not_behind(source) if everything else self._due(source)
        entries = [entry for entry in freed if self._may_lack(entry, everything)]
        for path in _paths(entries):
            if max_pages <= 0 and not is_first:
                break
            least = self._transfers.least_pages if is_first else 0
            most = max(max_pages, least)
            job = self._store(source, target, path, most, everything, freed)
            if job is not None:
                jobs.append(job)
                max_pages, is_first = max_pages - job.num_pages, False
        return jobs

    def _ways(self, everything: bool) -> list[tuple[Place, Place]]:
        """From where to where: to the next place, or from all to the last, the nearest to it first,
        so that nothing has to leave a full tier between for what only passes through."""
        if everything:
            return [(source, self._places[-1]) for source in self._places[-2::-1]]
        return self._onward

    def _not_behind(self, source: Place) -> dict[Run | ResumePoint, int]:
        """Entries of a place that no tier between it and the last has: those go from there. And
        what their eviction would free."""
        between = self._places[self._places.index(source) + 1 : -1]
        return {
            entry: entry.freed
            for entry in every(source.index)
            if not any(self.copy_of(source, place, entry) for place in between)
        }

    def _due(self, source: Place) -> dict[Run | ResumePoint, int]:
        """Entries of a place that are to have a copy, in the order in which they would go, and what
        that would free."""
        index, policy = source.index, source.policy
        needed = self._low(source) - source.num_free - self._underway(source)
        if self._calls >= self._counted.setdefault(source, self._calls) + RECOUNT:
            policy.count()
            self._counted[source] = self._calls
        # To look passes over all that are kept.
        if needed - policy.kept_pages <= policy.kept_pages // SLACK:
            return {}
        if policy.kept_pages:
            needed -= policy.count()
        if needed <= 0:
            return {}
        looked = self._due_before.get(source, 0) + LOOKED_AT[0]
        due: dict[Run | ResumePoint, int] = {}
        while True:
            entries = coming(index, looked, kept=False)
            for entry in entries[len(due) :]:
                due[entry] = freed = entry.freed
                needed -= freed
                if needed <= 0:
                    self._due_before[source] = len(due)
                    return due
            if len(due) < looked or looked >= LOOKED_AT[1]:
                return due
            looked *= 4

    def _underway(self, source: Place) -> int:
        """Pages of `source` that are had without a loss once its open stores are done."""
        busy = self._busy.items()
        if not busy:
            return 0
        return sum([n for entry, (place, n) in busy if place is source and is_there(entry)])

    def _low(self, place: Place) -> int:
        """Pages of a place that are to be free, or to be had without a loss."""
        device, num_pages = self._places[0], place.index.pool.num_pages
        if place is device:
            return num_pages // 8 if self._watermark is None else self._watermark
        # What the device may send next must find a place.
        low = self._low(device) * self._transfers.most_parts
        return min(max(low, num_pages // 8), num_pages - 1)

    def _may_lack(self, entry: Run | ResumePoint, everything: bool) -> bool:
        """Whether a job may have to bring `entry` to the next place now. Where `everything` is to
        go, that there was no room, or too much else, says nothing."""
        copy = self._copies.get(entry) if isinstance(entry, ResumePoint) else None
        if (copy is not None and copy.run is not None) or entry in self._busy:
            return False
        if self._failures and self._calls < self._failures.get(entry.key, (0, 0))[1]:
            return False
        if everything:
            return True
        if self._lacks and self._calls < self._lacks.get(entry.key, (0, 0))[1]:
            return False
        return not self._admission.is_refused(entry)

    def _store(
        self, source: Place, target: Tier, entries: list[Run | ResumePoint], max_pages: int,
        everything: bool, freed: dict[Run | ResumePoint, int],
    ) -> Job | None:  # fmt: skip
        """The job that stores those of `entries`, of one path, shortest first, that the target
        lacks, or the first of them. Where it has no room for all, the first one goes alone.

        Args:
            freed: pages that the eviction of each would free now.
        """
        chain = Chain.of(target, entries[-1])
        entries = [e for e in entries if self._copy_in(chain.there, source, e) is None]
        if not entries:
            return None
        admits, policy = partial(self._admission.admits, source, chain.there), source.policy
        spare = [e for e in entries if policy.is_spare(e)]  # they are not once they are locked
        job = self._transfers.store(source, chain, entries, max_pages, admits)
        if isinstance(job, Lack) and len(entries) > 1:
            entries = entries[:1]
            job = self._transfers.store(source, chain, entries, max_pages, admits)
        if isinstance(job, Lack):
            target.counters["refused_stores"] += 1
            if not everything:
                self._wait(self._lacks, entries[0].key, LONGEST_WAIT)
            return None
        if job is not None:
            taken = job.parts.entries
            self._busy |= {e: (source, freed[e]) for e in taken}
            self._leaving.update(e for e in spare if e in taken)
            self._admission.came(taken)
        return job

    def copy_of(
        self, source: Place, target: Place, entry: Run | ResumePoint
    ) -> Run | ResumePoint | None:
        """What `target` has of what `entry` of `source` is; of a chain, the run that it ends in."""
        if isinstance(entry, ResumePoint):
            copy = self._copies.get(entry)
            if copy is not None and copy.run is not None:
                return copy
        return self._copy_in(Chain.of(target, entry).there, source, entry)

    def _copy_in(
        self, there: Found, source: Place, entry: Run | ResumePoint
    ) -> Run | ResumePoint | None:
        """As `copy_of`, where the chain of `entry`, or a longer one, is known to end in the
        target."""
        if isinstance(entry, ResumePoint):
            copy = there.point(entry.depth)
            if copy is not None and self._next.get(source) is there.place:
                self._remember(source, entry, copy)
            return copy
        return there.run if there.depth == entry.depth else None

    def _remember(self, source: Place, entry: ResumePoint, copy: ResumePoint) -> None:
        self._copies[entry] = copy
        if len(self._copies) > 4 * (source.index.num_points + REMEMBERED):
            self._copies = {e: c for e, c in self._copies.items() if e.run and c.run}

    def spare(self, place: Place, entry: Run | ResumePoint) -> None:
        """The device has `entry` of a tier as well: it goes first, once no open store reads it."""
        if entry in self._busy:
            self._leaving.add(entry)
        elif not place.policy.is_spare(entry):
            place.policy.spare(entry)

    def evicted(self, place: int, entry: Entry) -> None:
        """A place's policy took out `entry`: it is lost where the next tier lacks it."""
        assert isinstance(entry, (Run, ResumePoint))
        self._lost(entry)
        if place + 1 == len(self._places):
            return
        source, target = self._places[place], self._places[place + 1]
        assert isinstance(target, Tier)
        if not is_there(entry):
            return
        copy = self.copy_of(source, target, entry)
        if copy is None:
            target.counters["lost"] += 1
        else:
            target.policy.needed(copy)

    def discarded(self, entry: Entry) -> None:
        """A place's policy may not evict `entry` any more: somebody uses it, or it is gone."""
        if entry in self._spared:
            assert isinstance(entry, (Run, ResumePoint))
            self._doubtful[entry] = None

    def _check_copies(self) -> None:
        """What has lost its copy is spare no more."""
        for copy in [*self._doubtful]:
            if not is_there(copy):
                self._lost(copy)
            elif isinstance(copy, Run) and copy in self._spared:
                continue  # others go on from its end: it may become part of them unheard
            del self._doubtful[copy]

    def _lost(self, copy: Run | ResumePoint) -> None:
        """The entries whose copy this was are spare no more."""
        for place, entry in self._spared.pop(copy, {}).items():
            place.policy.needed(entry)

    # The end of a job.

    def unlocked(self, job: Job) -> None:
        """A job of a store ends: its entries may be evicted."""
        self._transfers.is_over(job.parts)
        source = job.parts.sources[0]
        for entry in job.parts.entries:
            self._busy.pop(entry, None)
            is_leaving = entry in self._leaving
            self._leaving.discard(entry)
            if not _may_go(source.index, entry):
                continue
            if isinstance(entry, ResumePoint):
                source.index.offer(entry)
            if is_leaving:
                source.policy.spare(entry)

    def ended(
        self, job: Job, num_failed: int, segments: int, points: int, *, num_missing: int = 0
    ) -> None:
        """A store is done: what has a copy now is to leave first.

        Args:
            num_failed: copies that failed. num_missing: that were not begun.
            segments, points: that are new in the target.
        """
        parts, target = job.parts, job.parts.target
        assert isinstance(target, Tier)
        count = target.counters
        count["stored_segments"] += segments
        count["stored_points"] += points
        count["stored_pages"] += job.num_pages - num_failed - num_missing
        count["store_failures"] += bool(num_failed)
        source, depth = parts.sources[0], len(parts.keys) // KEY_BYTES
        there = Found(target, *target.index.find(parts.keys, depth))
        for entry in filter(is_there, parts.entries):
            copy = self._copy_in(there, source, entry)
            if copy is not None and _may_go(source.index, entry):
                self._spare(source, entry, copy)
            if copy is None and num_failed:
                self._wait(self._failures, entry.key, 16)
            elif self._failures or self._lacks:
                self._failures.pop(entry.key, None)
                self._lacks.pop(entry.key, None)

    def _spare(self, source: Place, entry: Run | ResumePoint, copy: Run | ResumePoint) -> None:
        source.policy.spare(entry, kept=True)
        self._spared.setdefault(copy, {})[source] = entry
        if len(self._spared) > 4 * (source.index.num_points + REMEMBERED):
            known = self._spared.items()
            self._spared = {c: e for c, e in known if any(map(is_there, e.values()))}

    def _wait(self, tries: OrderedDict[bytes, tuple[int, int]], key: bytes, most: int) -> None:
        """Try `key` again later, and later each time, after 2**most calls at most."""
        times = min(tries.get(key, (0, 0))[0] + 1, most)
        tries[key] = times, self._calls + 2**times
        tries.move_to_end(key)
        if len(tries) > REMEMBERED:
            tries.popitem(last=False)


def _may_go(index: EvictableTree, entry: Run | ResumePoint) -> bool:
    """Whether the policy of an index may choose `entry`."""
    if entry in index.pins or not is_there(entry):
        return False
    return isinstance(entry, ResumePoint) or not (entry.locks or entry.children)


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


def every(index: EvictableTree) -> list[Run | ResumePoint]:
    """Entries of `index`, the one used least recently first."""
    entries: list[Run | ResumePoint] = []
    for run in index.runs():
        if index.hybrid:
            entries += run.points.values()
        elif not run.children:
            entries.append(run)
    return sorted(entries, key=lambda entry: entry.last_used)
