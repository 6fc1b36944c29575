"""How jobs are made, and what becomes of the pages that they brought."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import NO_VALUES, Int32, Int64
from ..policies.base import Entry
from ..prefix.holdings import Holding, adopt
from ..prefix.keys import KEY_BYTES, Prompt
from ..prefix.tree import ResumePoint, Run, path_to, point_before, run_of
from .jobs import Job, JobParts, copies_of
from .places import Found, Place, Tails

if TYPE_CHECKING:
    from .match import Way


@dataclass(slots=True)
class Lack:
    """A job that does not fit; nothing was changed.

    Attributes:
        needed, free, evictable: pages that it needs, that are free, and that eviction could free
            without what the job itself builds on.
        per_group: pages that each group needs.
    """

    needed: int
    free: int
    evictable: int
    per_group: list[int] = field(default_factory=list)


def end_of(entry: Run | ResumePoint) -> tuple[Run, int]:
    """The run in which the prefix of an entry ends, and its segments."""
    run = entry.run if isinstance(entry, ResumePoint) else entry
    assert run is not None
    return run, entry.depth


def chain_keys(run: Run, depth: int) -> bytes:
    """Keys of the first `depth` segments on the path to `run`."""
    return b"".join(bytes(node.keys) for node in path_to(run))[: depth * KEY_BYTES]


class Transfers:
    """Makes jobs and ends them.

    Args:
        tails: columns of pages.
        alignment: tokens of a segment.
        page_bytes: bytes of a page of a tier.

    Attributes:
        least_pages: of a job with one segment, or one resume point.
        most_parts: pages of a tier that a page of the device may need.
    """

    def __init__(self, tails: Tails, alignment: int, page_bytes: int) -> None:
        self._tails, self._alignment, self.page_bytes = tails, alignment, page_bytes
        self._width = len(tails.segments)
        self.least_pages = max(self._width, len(tails.points))
        self.most_parts = 1 + max([*tails.segments.parts.tolist(), *tails.points.parts.tolist()])
        self._underway: set[tuple[str, bytes]] = set()  # first segments of open stores

    def num_bytes(self, entry: Entry, segments: int) -> int:
        """Bytes that `entry`, of any place, takes in a tier, with so many segments."""
        point = len(self._tails.points) if isinstance(entry, ResumePoint) else 0
        return (segments * self._width + point) * self.page_bytes

    # Made.

    def store(
        self, source: Place, target: Place, entry: Run | ResumePoint, max_pages: int,
        is_admitted: Callable[[int, int], bool],
    ) -> Job | Lack | None:  # fmt: skip
        """The job that stores `entry` of `source` in `target`, or the first segments of it.

        Returns:
            Job; None where not even one segment is within `max_pages`, or where a job is open that
            brings the same segments; Lack where the target has no room.
        """
        run, depth = end_of(entry)
        keys = chain_keys(run, depth)
        there = Found(target, *target.index.find(keys, depth))
        first, known = there.depth, there.point(depth)
        next_key = keys[first * KEY_BYTES : (first + 1) * KEY_BYTES]
        if (target.name, next_key) in self._underway:
            return None
        columns = self._tails.points
        pages = self._tails.segments.of(source, source.index.pages_between(run, first, depth))
        point = None
        if isinstance(entry, ResumePoint) and known is None:
            point = columns.of(source, entry.pages)
        targets, used = self._shared(there, depth, point)
        new: Int64 = np.empty(0, dtype=np.int64)
        if point is not None:
            new = ((point != 0) & (targets == 0)).nonzero()[0]
        if not is_admitted(pages.size + len(new), depth - there.resumable()):
            return None
        if pages.size + len(new) > max_pages:
            n = min(len(pages), max_pages // self._width) if self._width else 0
            if not n:
                return None
            pages, point, new, used = pages[:n], None, new[:0], NO_VALUES
        holding = there.hold(first, used)
        taken = _take(target, holding, pages.size + len(new))
        if isinstance(taken, Lack):
            return taken
        segments = taken[: pages.size].reshape(pages.shape)
        sources = pages.ravel()
        if point is not None:
            targets[new] = taken[pages.size :]
            sources = np.concatenate([sources, point[new]])
        whole = entry.pages if isinstance(entry, ResumePoint) else NO_VALUES
        reading = Found(source, run, depth).hold(depth, whole)
        if isinstance(entry, ResumePoint):  # to evict it now would free nothing
            source.index.withdraw(entry)
        end = first + len(pages)
        places = np.zeros(len(sources), dtype=np.int64)
        parts = JobParts(
            target, keys[: end * KEY_BYTES], first, segments, None if point is None else targets,
            holding, [reading], sources, places, taken, self._units(len(pages), new), [source],
            entry,
        )  # fmt: skip
        if len(pages):
            self._underway.add(parts.first_key)
        return self._job("store", parts, new, end)

    def is_over(self, parts: JobParts) -> None:
        """A store ends."""
        if len(parts.segments):
            self._underway.remove(parts.first_key)

    def load(self, device: Place, way: Way, prompt: Prompt) -> Job | Lack:
        """The job of a way."""
        found, first = way.found, way.found[0].depth
        columns, width = self._tails.points, self._tails.segments.num_pages
        point, used, new = None, NO_VALUES, np.empty(0, dtype=np.int64)
        places = lacking = np.empty(0, dtype=np.int64)
        if way.tail is not None:
            places, pages = way.tail
            new = ((places != 0) & (pages != 0)).nonzero()[0]
            point = np.zeros(columns.num_pages, dtype=np.int32)
            point[columns.pages] = np.where(places == 0, pages, 0)
            lacking = np.unique(columns.pages[new])
            used = point[point != 0]
        depth = way.hit if way.tail is not None else way.dense
        end = max([first, *(stop for _, _, stop in way.ranges)])
        # A point within what the device has needs the chain before it alone.
        first = min(first, depth)
        num_segments = max(0, end - first) if way.ranges else 0
        # Everything is looked up before locks split runs.
        parts = [
            found[i].place.index.pages_between(found[i].run, a, b).ravel() for i, a, b in way.ranges
        ]
        numbers = [np.full(len(p), i) for (i, _, _), p in zip(way.ranges, parts, strict=True)]
        units = self._units(num_segments, new)
        if len(new):
            parts.append(pages[new])
            numbers.append(places[new])
        sources = np.concatenate([NO_VALUES, *parts])
        source_of = np.concatenate([np.empty(0, np.int64), *numbers])
        holding = found[0].hold(first, used)
        taken = _take(device, holding, num_segments * width + len(lacking))
        if isinstance(taken, Lack):
            groups, part_of = self._groups_and_parts(num_segments, new)
            taken.per_group = np.bincount(groups[part_of == 0]).tolist()
            return taken
        segments = taken[: num_segments * width].reshape(num_segments, width)
        targets = self._tails.segments.of(device, segments).ravel()
        if point is not None:
            point[lacking] = taken[num_segments * width :]
            targets = np.concatenate([targets, columns.of(device, point)[new]])
        holdings = []
        for i, f in enumerate(found[1:], 1):
            mine = sources[(source_of == i) & (units == -1)]
            ends = [stop for j, _, stop in way.ranges if j == i]
            if ends or len(mine):
                upto = max([*ends, min(depth, f.depth)])
                holdings.append(f.hold(upto, mine))
        made = JobParts(
            device, prompt.keys[: (first + num_segments) * KEY_BYTES], first, segments, point,
            holding, holdings, sources, source_of, targets, units, [f.place for f in found],
            prompt=prompt,
        )  # fmt: skip
        return self._job("load", made, new, depth)

    def _units(self, num_segments: int, new: Int64) -> Int64:
        """Segments of the copies of so many, and of columns `new` of a resume point."""
        segments = np.arange(num_segments).repeat(self._width)
        return np.concatenate([segments, np.full(len(new), -1)])

    def _groups_and_parts(self, num_segments: int, new: Int64) -> tuple[Int64, Int32]:
        """Groups and parts of the same copies."""
        segments, points = self._tails.segments, self._tails.points
        return (
            np.concatenate([np.tile(segments.groups, num_segments), points.groups[new]]),
            np.concatenate([np.tile(segments.parts, num_segments), points.parts[new]]),
        )

    def _shared(self, found: Found, depth: int, point: Int32 | None) -> tuple[Int32, Int32]:
        """Pages of a point at `depth` that the one before it has there, and these alone."""
        if point is None:
            return NO_VALUES, NO_VALUES
        targets = np.zeros(len(point), dtype=np.int32)
        before = None
        if found.depth:
            before = point_before(run_of(found.run, found.depth), min(depth, found.depth + 1))
        if before is None:
            return targets, NO_VALUES
        later, earlier = self._tails.shared(depth - before.depth)
        targets[later] = before.pages[earlier]
        return targets, targets[targets != 0]

    def _job(self, kind: str, parts: JobParts, new: Int64, depth: int) -> Job:
        copies = copies_of(*self._groups_and_parts(len(parts.segments), new), parts)
        size = len(parts.sources)
        return Job(
            "load" if kind == "load" else "store", copies, size, size * self.page_bytes,
            depth * self._alignment,
            parts=parts,
        )  # fmt: skip

    # Ended.

    def adopt(self, parts: JobParts, failed: Int64) -> tuple[int, bool, int]:
        """Make entries of what came, up to the first segment of which a page failed.

        Returns:
            (new segments, whether the resume point is new, segments that came).
        """
        holding, index = parts.holding, parts.target.index
        bad = parts.units[failed]
        n = int(min(bad[bad >= 0], default=len(parts.segments)))
        whole = not len(failed) and parts.point is not None
        point = parts.point if whole else None
        given_back = [parts.segments[n:].ravel()]
        if not whole and parts.point is not None:
            given_back.append(np.unique(parts.targets[parts.units == -1]))
        holding.taken = np.concatenate(given_back)
        noted = None if parts.noted is None else parts.noted[:n]
        segments, is_new = adopt(
            index, parts.keys[: (parts.first + n) * KEY_BYTES], parts.first, parts.segments[:n],
            point, noted,
        )  # fmt: skip
        return segments, is_new, n


def _take(place: Place, holding: Holding, num_pages: int) -> Int32 | Lack:
    """Take pages for a job, and evict where it must. Where there is no room, and where the policy
    raises, the holding ends."""
    try:
        if place.make_room(num_pages):
            return holding.take(num_pages)
        lack = Lack(num_pages, place.num_free, place.index.num_evictable)
    except BaseException:
        holding.end()
        raise
    holding.end()
    return lack
