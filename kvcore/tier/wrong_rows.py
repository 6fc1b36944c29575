"""Find in the host what pages of the device hold: for rows that turned out wrong.

Keys and boundaries tell it, not pages. A window's block is held by several points, and the host may
have others of them than the device:

    tokens                     0    32   64   96   128        a wrong page of the device holds the
    window block                           [b]                block b, and a point at 128 names it;
    points that may hold it                 [==========]      the host may have another one, at 96
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays import NO_VALUES, Flags, Int32, Int64
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run
from .jobs import JobParts
from .places import Place, Tails, Tier
from .transfers import chain_keys


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Blocks of one segment that wrong pages hold.

    Attributes:
        keys: of the chain up to that segment.
        end: boundary after that segment.
        depth: boundary of a resume point that holds them; 0: they are dense, and all of the segment
            counts as wrong.
        columns: [n] of the point, in the host.
    """

    keys: bytes
    end: int
    depth: int = 0
    columns: Int64 | None = None

    def is_on(self, parts: JobParts, tails: Tails) -> bool:
        """Whether a job brings them, or builds on them, or locks them where it reads."""
        if self.columns is None and parts.locked_keys.startswith(self.keys):
            return True
        if not parts.keys.startswith(self.keys):
            return False
        return self.columns is None or any(len(self._columns_at(d, tails)) for d in parts.depths)

    def points_in(self, tier: Tier, tails: Tails) -> list[ResumePoint]:
        """Resume points of the host that hold them."""
        run, depth = tier.index.find(self.keys, self.end)
        if depth < self.end or self.columns is None:
            return []
        near = _points(run, self.end, self.end - 1 + tails.longest)
        return [p for p in near if p.pages[self._columns_at(p.depth, tails)].any()]

    def pages_in(self, tier: Tier) -> Int32:
        """Pages of the segment in the host, where they are dense."""
        run, depth = tier.index.find(self.keys, self.end)
        if depth < self.end or self.columns is not None:
            return NO_VALUES
        return tier.index.pages_between(run, self.end - 1, self.end).ravel()

    def _columns_at(self, depth: int, tails: Tails) -> Int64:
        """Columns of a point at another boundary that have the same blocks."""
        assert self.columns is not None
        if depth == self.depth:
            return self.columns
        later, earlier = tails.shared(abs(depth - self.depth))
        if depth > self.depth:
            return later[np.isin(earlier, self.columns)]
        return earlier[np.isin(later, self.columns)]


def held_by(device: Place, is_wanted: Flags, tails: Tails) -> list[Held]:
    """What the cached pages `is_wanted` [num_pages] of the device hold; of a run's dense segments
    the first, as the others are found through it."""
    found: list[Held] = []
    for run in device.index.runs():
        wrong = np.flatnonzero(is_wanted[run.look()].any(axis=1))
        points = [p for p in run.points.values() if is_wanted[p.pages].any()]
        if not (len(wrong) or points):
            continue
        keys = chain_keys(run, run.depth)
        if len(wrong):
            end = run.start + int(wrong[0]) + 1
            found.append(Held(keys[: end * KEY_BYTES], end))
        for point in points:
            columns = np.flatnonzero(is_wanted[tails.points.of(device, point.pages)])
            ends = point.depth - tails.back[columns]
            for end in {*ends.tolist()}:
                mine = columns[ends == end]
                found.append(Held(keys[: end * KEY_BYTES], end, point.depth, mine))
    return found


def forget(tier: Tier, held: list[Held], tails: Tails) -> None:
    """Evict what has what is `held`, and what is found only through it. No open job has it."""
    for one in held:
        for point in one.points_in(tier, tails):
            tier.index.drop_point(point)
    tier.drop(np.concatenate([NO_VALUES, *(one.pages_in(tier) for one in held)]))


def _points(run: Run, first: int, last: int) -> Iterator[ResumePoint]:
    """Resume points at boundaries `first` to `last` of `run` and of the runs below it."""
    runs = [run]
    for node in runs:  # which grows
        yield from (node.points[d] for d in node.depths if first <= d <= last)
        if node.depth < last:
            runs.extend(node.children.values())
