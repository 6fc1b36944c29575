"""How jobs are made, and what becomes of the pages that they brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    return b"".join([node.keys for node in path_to(run)])[: depth * KEY_BYTES]


IsAdmitted = Callable[["Run | ResumePoint", int, int, int], bool]
NO_POINTS: Int32 = np.empty((0, 0), dtype=np.int32)
BY_GROUP = attrgetter("group")


class _Chosen:
    """What a store takes.

    Args:
        end: segments of the chain that the target has.
        sources: [n, columns] pages of resume points.

    Attributes:
        entries: that are taken. end: segments of the chain that the target has then.
        depths: of the resume points among them, a row each. rows: which of all rows these are.
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
        self.rows: list[int] = []
        self.links: dict[int, tuple[Int64, Int64]] = {}
        self._shares = False

    def build_on(
        self, i: int, later: Int64, earlier: Int64, before: ResumePoint | None
    ) -> tuple[Int64, Int64] | None:
        """Columns `later` of row `i` are columns `earlier` of a point of the target, or of the last
        row that was taken; returns these then."""
        if before is not None:
            self.targets[i, later] = before.pages[earlier]
            self.is_new[i] &= self.targets[i] == 0
            self._shares = True
            return None
        has = self.sources[self.rows[-1], earlier] != 0
        self.is_new[i, later[has]] = False
        return later[has], earlier[has]

    def built_on(self) -> Int32:
        """Pages of points of the target that `targets` names."""
        return self.targets[self.targets.nonzero()] if self._shares else NO_VALUES

    def only_chosen(self) -> None:
        """Forget the rows that were not taken."""
        self.sources, self.targets = self.sources[self.rows], self.targets[self.rows]
        self.is_new = self.is_new[self.rows]

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
        """That of `entry`, of any place, in `place`."""
        run, depth = end_of(entry)
        keys = chain_keys(run, depth)
        return cls(keys, Found(place, *place.index.find(keys, depth)))


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
        parts: list[int] = [*tails.segments.parts.tolist(), *tails.points.parts.tolist()]
        self.most_parts = 1 + max(parts)
        self._underway: set[tuple[str, bytes]] = set()  # first segments of open stores

    def num_bytes(self, entry: Entry, segments: int) -> int:
        """Bytes that `entry`, of any place, takes in a tier, with so many segments."""
        point = len(self._tails.points) if isinstance(entry, ResumePoint) else 0
        return (segments * self._width + point) * self.page_bytes

    # Made.

    def store(
        self, source: Place, chain: Chain, entries: Sequence[Run | ResumePoint], max_pages: int,
        is_admitted: IsAdmitted,
    ) -> Job | Lack | None:  # fmt: skip
        """The job that stores `entries` of `source` in a target, or the first of them.

        Args:
            chain: of the longest of them, or a longer one.
            entries: the shortest first; the target has none of them.
            is_admitted: asked of each, with the pages that it would take and the boundary of the
                next shorter entry, beside those before it, and the pages that these take.

        Returns:
            Job; None where not even one segment is within `max_pages`, or where a job is open that
            brings the same segments; Lack where the target has no room.
        """
        run, depth = end_of(entries[-1])
        keys, there, target = chain.keys, chain.there, chain.there.place
        first = there.depth = min(there.depth, depth)
        first_key = target.name, keys[first * KEY_BYTES : (first + 1) * KEY_BYTES]
        if first_key in self._underway:
            return None
        chosen = self._choose(source, there, entries, max_pages, is_admitted)
        if not chosen.entries:
            return None
        # Everything is looked up before locks split runs.
        dense = self._tails.segments.of(source, source.index.pages_between(run, first, chosen.end))
        holding = there.hold(first, chosen.built_on())
        taken = _take(target, holding, chosen.num_pages)
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
        copies = copies_of(self._tails.segments, source, target, dense, segments)
        copies += copies_of(self._tails.points, source, target, chosen.sources, points, is_new)
        parts = JobParts(
            [source], target, keys[: chosen.end * KEY_BYTES], first, segments, chosen.depths,
            points, holding, [reading], keys[: depth * KEY_BYTES], chosen.entries,
        )  # fmt: skip
        if len(segments):
            self._underway.add(first_key)
        return self._job("store", parts, copies, len(taken), chosen.end)

    def _choose(
        self, source: Place, there: Found, entries: Sequence[Run | ResumePoint], max_pages: int,
        is_admitted: IsAdmitted,
    ) -> _Chosen:  # fmt: skip
        """Those of `entries` that are admitted, up to `max_pages`; see `store`."""
        tails, points = self._tails, [e.pages for e in entries if isinstance(e, ResumePoint)]
        if points:
            rows = points[0][None] if len(points) == 1 else np.array(points)
            pages = tails.points.of(source, rows)
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
            if not is_admitted(entry, n, max(known, last), made.num_pages):
                continue
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
                made.links[len(made.rows)] = link
            if points:
                made.rows.append(i)
                made.depths.append(last := entry.depth)
        if len(made.rows) < len(made.sources):
            made.only_chosen()
        return made

    def is_over(self, parts: JobParts) -> None:
        """A store ends."""
        if len(parts.segments):
            self._underway.remove(parts.first_key)

    def load(self, device: Place, way: Way, prompt: Prompt) -> Job | Lack:
        """The job of a way."""
        found, columns = way.found, self._tails.points
        depth = way.hit if way.tail else way.dense
        # A point within what the device has needs the chain before it alone.
        first = min(found[0].depth, depth)
        n = way.ranges[-1][2] - first if way.ranges else 0
        # Everything is looked up before locks split runs.
        dense = [found[i].place.index.pages_between(found[i].run, a, b) for i, a, b in way.ranges]
        point = np.zeros(columns.num_pages, dtype=np.int32)
        lacking = np.zeros(columns.num_pages, dtype=np.bool_)
        for i, pages in way.tail.items():
            if i:
                lacking[columns.pages[pages.nonzero()]] = True
            else:
                point[columns.pages] = pages
        holding = found[0].hold(first, point[point.nonzero()])
        num_dense = n * self._tails.segments.num_pages
        taken = _take(device, holding, num_dense + count_true(lacking))
        if isinstance(taken, Lack):
            taken.per_group = self._per_group(n, lacking[columns.pages])
            return taken
        segments = taken[:num_dense].reshape(n, self._tails.segments.num_pages)
        point[lacking] = taken[num_dense:]
        copies, at = list[Copies](), 0
        into, own = self._tails.segments.of(device, segments), columns.of(device, point)[None]
        for (i, _, _), rows in zip(way.ranges, dense, strict=True):
            rest = into[at : at + len(rows)]
            copies += copies_of(self._tails.segments, found[i].place, device, rows, rest)
            at += len(rows)
        holdings = []
        for i, f in enumerate(found[1:], 1):
            ends = [stop for j, _, stop in way.ranges if j == i]
            if ends or way.pages[i]:
                pages = way.tail.get(i, NO_VALUES)
                holdings.append(f.hold(max([*ends, min(depth, f.depth)]), pages))
                if len(pages):
                    row = pages[None]
                    copies += copies_of(columns, f.place, device, row, own, row != ZERO32)
        parts = JobParts(
            [f.place for f in found], device, prompt.keys[: (first + n) * KEY_BYTES], first,
            segments, [depth] if way.tail else [], point[None] if way.tail else NO_POINTS,
            holding, holdings, way=way,
        )  # fmt: skip
        return self._job("load", parts, copies, sum(way.pages), depth)

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
