"""How jobs are made, and what becomes of the pages that they brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..arrays import NO_VALUES, ZERO32, Flags, Int32, Int64, count_true
from ..policies.base import Entry
from ..prefix.holdings import Holding
from ..prefix.keys import KEY_BYTES, Prompt
from ..prefix.tree import ResumePoint, Run, path_to
from .jobs import Copies, Job, JobParts, copies_of
from .places import HOST, Found, Place, Tails, Tier

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
    return b"".join([node.keys for node in path_to(run)])[: depth * KEY_BYTES]


NO_POINTS: Int32 = np.empty((0, 0), dtype=np.int32)
BY_GROUP = attrgetter("group")


class _Chosen:
    """What a store takes.

    Args:
        end: segments of the chain that the target has.
        sources: [n, columns] pages of resume points.

    Attributes:
        entries: that are taken. end: segments of the chain that the target has then.
        depths: of the resume points among them, a row each.
        num_pages: to copy.
        targets: [n, columns] pages of the target; 0 where it has none yet.
        is_new: [n, columns] those to copy.
        links: columns of a row that have the pages of other columns of the row before it.
    """

    def __init__(self, end: int, sources: Int32) -> None:
        self.end, self.sources, self.num_pages = end, sources, 0
        self.targets, self.is_new = np.zeros(sources.shape, dtype=np.int32), sources != ZERO32
        self.entries: list[Run | ResumePoint] = []
        self.depths: list[int] = []
        self.links: dict[int, tuple[Int64, Int64]] = {}
        self._shares = False

    def build_on(
        self, i: int, later: Int64, earlier: Int64, before: ResumePoint | None
    ) -> tuple[Int64, Int64] | None:
        """Columns `later` of row `i` are columns `earlier` of a point of the target, or of the row
        before; returns these then."""
        if before is not None:
            self.targets[i, later] = before.pages[earlier]
            self.is_new[i] &= self.targets[i] == 0
            self._shares = True
            return None
        has = self.sources[i - 1, earlier] != 0
        self.is_new[i, later[has]] = False
        return later[has], earlier[has]

    def built_on(self) -> Int32:
        """Pages of points of the target that `targets` names."""
        return self.targets[self.targets.nonzero()] if self._shares else NO_VALUES

    def only_chosen(self) -> None:
        """Forget the rows that were not taken."""
        n = len(self.depths)
        self.sources, self.targets, self.is_new = (
            self.sources[:n],
            self.targets[:n],
            self.is_new[:n],
        )

    def fill(self, pages: Int32) -> Int32:
        """`targets`, once there are pages for those that are new."""
        if len(pages) == self.targets.size:  # all of them are new
            return pages.reshape(self.targets.shape)
        self.targets[self.is_new] = pages
        for i, (later, earlier) in self.links.items():
            self.targets[i, later] = self.targets[i - 1, earlier]
        return self.targets


@dataclass(slots=True)
class Chain:
    """The chain of an entry, and what a place has of it.

    Attributes:
        keys: of its segments.
        there: where it ends in the place.
    """

    keys: bytes
    there: Found

    @classmethod
    def of(cls, place: Place, entry: Run | ResumePoint) -> Chain:
        """The chain of `entry` of the device, in `place`."""
        run, depth = end_of(entry)
        keys = chain_keys(run, depth)
        return cls(keys, Found(place, *place.index.find(keys, depth)))


class Transfers:
    """Makes jobs and ends them.

    Args:
        device, host: the places.
        tails: columns of pages.
        alignment: tokens of a segment.
        page_bytes: bytes of a page of the host.

    Attributes:
        least_pages: of a job with one segment, or one resume point.
    """

    def __init__(
        self, device: Place, host: Tier, tails: Tails, alignment: int, page_bytes: int
    ) -> None:
        self._device, self._host = device, host
        self._tails, self._alignment, self.page_bytes = tails, alignment, page_bytes
        self._width = len(tails.segments)
        self.least_pages = max(self._width, len(tails.points))
        self._underway: set[bytes] = set()  # keys of the first segments of open stores

    def num_bytes(self, entry: Entry, segments: int) -> int:
        """Bytes that `entry` takes in the host, with so many segments."""
        point = len(self._tails.points) if isinstance(entry, ResumePoint) else 0
        return (segments * self._width + point) * self.page_bytes

    # Made.

    def store(
        self, chain: Chain, entries: Sequence[Run | ResumePoint], max_pages: int
    ) -> Job | Lack | None:
        """Make the job that stores `entries` of the device in the host, or the first of them.

        Args:
            chain: of the longest of them, or a longer one.
            entries: the shortest first; the host has none of them.

        Returns:
            Job; None where not even one segment is within `max_pages`, or where a job is open that
            brings the same segments; Lack where the host has no room.
        """
        source = self._device
        run, depth = end_of(entries[-1])
        keys, there = chain.keys, chain.there
        first = there.depth = min(there.depth, depth)
        first_key = keys[first * KEY_BYTES : (first + 1) * KEY_BYTES]
        if first_key in self._underway:
            return None
        chosen = self._choose(there, entries, max_pages)
        if not chosen.entries:
            return None
        # Everything is looked up before locks split runs.
        dense = self._tails.segments.of(source, source.index.pages_between(run, first, chosen.end))
        holding = there.hold(first, chosen.built_on())
        taken = _take(self._host, holding, chosen.num_pages)
        if isinstance(taken, Lack):
            return taken
        segments = taken[: dense.size].reshape(dense.shape)
        points = chosen.fill(taken[dense.size :])
        is_new = None if dense.size + points.size == len(taken) else chosen.is_new
        run, depth = end_of(chosen.entries[-1])
        stored = [entry for entry in chosen.entries if isinstance(entry, ResumePoint)]
        used = [point.pages for point in stored]
        read = used[0] if len(used) == 1 else np.concatenate([NO_VALUES, *used])
        reading = Holding(source.index, source.index.end_at(run, depth), read)
        for point in stored:  # to evict it now would free nothing
            source.index.withdraw(point)
        copies = copies_of(self._tails.segments, dense, segments)
        copies += copies_of(self._tails.points, chosen.sources, points, is_new)
        parts = JobParts(
            keys[: chosen.end * KEY_BYTES], first, segments, chosen.depths, points, holding,
            reading, keys[: depth * KEY_BYTES], chosen.entries,
        )  # fmt: skip
        if len(segments):
            self._underway.add(first_key)
        return self._job("store", parts, copies, len(taken), chosen.end)

    def _choose(
        self, there: Found, entries: Sequence[Run | ResumePoint], max_pages: int
    ) -> _Chosen:
        """Choose from `entries`, up to `max_pages`; see `store`."""
        tails, points = self._tails, [e.pages for e in entries if isinstance(e, ResumePoint)]
        if points:
            rows = points[0][None] if len(points) == 1 else np.array(points)
            pages = tails.points.of(self._device, rows)
        else:
            pages = NO_POINTS
        made = _Chosen(there.depth, pages)
        last = 0  # boundary of the last point that is chosen
        for i, entry in enumerate(entries):
            known, link = there.depth, None
            if points:
                before = there.before(entry.depth)
                known = 0 if before is None else before.depth
                if known or last:
                    later, earlier = tails.shared(entry.depth - max(known, last))
                    if len(later):
                        link = made.build_on(i, later, earlier, before if known > last else None)
            segments = max(0, entry.depth - made.end)
            n = segments * self._width
            n += count_true(made.is_new[i]) if points else 0
            is_part = n > max_pages - made.num_pages
            if is_part:  # its first segments alone
                room = max_pages - made.num_pages
                segments = min(segments, room // self._width) if self._width else 0
                if not segments:
                    break
                n = segments * self._width
            made.end, made.num_pages = made.end + segments, made.num_pages + n
            made.entries.append(entry)
            if is_part:
                break
            if link is not None:
                made.links[i] = link
            if points:
                made.depths.append(last := entry.depth)
        if len(made.depths) < len(made.sources):
            made.only_chosen()
        return made

    def is_over(self, parts: JobParts) -> None:
        """A store ends."""
        if len(parts.segments):
            self._underway.remove(parts.first_key)

    def load(self, way: Way, prompt: Prompt) -> Job | Lack:
        """Make the job of a way."""
        device, columns = self._device, self._tails.points
        depth = way.hit if way.tail else way.dense
        # A point within what the device has needs the chain before it alone.
        first = min(way.device.depth, depth)
        n = way.dense - way.device.depth
        # Everything is looked up before locks split runs.
        dense = self._host.index.pages_between(way.host.run, way.device.depth, way.dense)
        point = np.zeros(columns.num_pages, dtype=np.int32)
        lacking = np.zeros(columns.num_pages, dtype=np.bool_)
        for i, pages in way.tail.items():
            if i:
                lacking[columns.pages[pages.nonzero()]] = True
            else:
                point[columns.pages] = pages
        holding = way.device.hold(first, point[point.nonzero()])
        num_dense = n * self._tails.segments.num_pages
        taken = _take(device, holding, num_dense + count_true(lacking))
        if isinstance(taken, Lack):
            taken.per_group = self._per_group(n, lacking[columns.pages])
            return taken
        segments = taken[:num_dense].reshape(n, self._tails.segments.num_pages)
        point[lacking] = taken[num_dense:]
        into, own = self._tails.segments.of(device, segments), columns.of(device, point)[None]
        copies = copies_of(self._tails.segments, dense, into)
        pages = way.tail.get(HOST, NO_VALUES)
        reading = way.host.hold(max(way.dense if n else 0, min(depth, way.host.depth)), pages)
        if len(pages):
            row = pages[None]
            copies += copies_of(columns, row, own, row != ZERO32)
        parts = JobParts(
            prompt.keys[: (first + n) * KEY_BYTES], first, segments, [depth] if way.tail else [],
            point[None] if way.tail else NO_POINTS, holding, reading, way=way,
        )  # fmt: skip
        return self._job("load", parts, copies, way.num_pages, depth)

    def _per_group(self, num_segments: int, new: Flags) -> list[int]:
        """Pages of the pool that so many segments and columns `new` of a point take, by group."""
        segments, points = self._tails.segments, self._tails.points
        dense = segments.groups[segments.parts == 0]
        tail = points.groups[new][points.parts[new] == 0]
        n = 1 + int(max([*segments.groups.tolist(), *points.groups.tolist()]))
        counts = np.bincount(dense, minlength=n) * num_segments + np.bincount(tail, minlength=n)
        return [int(count) for count in counts]

    def _job(
        self, kind: Literal["store", "load"], parts: JobParts, copies: list[Copies], size: int,
        depth: int,
    ) -> Job:  # fmt: skip
        copies.sort(key=BY_GROUP)
        return Job(
            kind, tuple(copies), size, size * self.page_bytes, depth * self._alignment, parts=parts
        )

    # Ended.

    def adopt(self, parts: JobParts, failed: Int64) -> tuple[int, list[int], int]:
        """Make entries of what came: segments up to the first of which a page failed, and resume
        points after these.

        Args:
            failed: target pages.

        Returns:
            (new segments, boundaries of new resume points, segments that came).
        """
        holding, n, depths, points = parts.holding, len(parts.segments), parts.depths, parts.points
        back = NO_VALUES
        if len(failed):
            wrong = np.flatnonzero(np.isin(parts.segments, failed).any(axis=1))
            n = int(wrong[0]) if len(wrong) else n
            whole = ~np.isin(points, failed).any(axis=1)
            whole &= np.array(depths, dtype=np.int64) <= parts.first + n
            depths = [depth for depth, is_whole in zip(depths, whole, strict=True) if is_whole]
            points = points[whole]
            taken = holding.taken
            back = taken[
                ~np.isin(taken, np.concatenate([parts.segments[:n].ravel(), points.ravel()]))
            ]
        holding.taken = back
        noted = None if parts.noted is None else parts.noted[:n]
        segments, are_new = holding.adopt(
            parts.keys[: (parts.first + n) * KEY_BYTES], parts.first, parts.segments[:n], depths,
            points, noted,
        )  # fmt: skip
        return segments, are_new, n


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
