"""The radix tree of segments: `Run`, `ResumePoint`, and how to walk, split and merge runs.

A `Run` is a stretch of segments that were cached one after another, with their keys and pages in
arrays. Prompts that part in the middle of a run split it there:

    prompt 1: segments A B C D        prompt 2: segments A B X

    root -- run [0, 2): A B -+- run [2, 4): C D
                             +- run [2, 3): X

A resume point belongs to the run that has the segment before its boundary, and moves with it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np

from ..arrays import Int32
from .keys import KEY_BYTES

# Pages [end - first, pages_per_segment] of a request's segments [first, end).
Source = Callable[[int, int], Int32]


class ResumePoint:
    """Window and state pages that make one boundary resumable: an `Entry` of policies."""

    __slots__ = ("depth", "last_used", "num_uses", "pages", "run")

    def __init__(self, run: Run, depth: int, pages: Int32, tick: int) -> None:
        self.run: Run | None = run  # None once evicted
        self.depth = depth
        self.pages = pages
        self.last_used = tick
        self.num_uses = 0

    @property
    def key(self) -> bytes:
        assert self.run is not None
        return self.run.segment_key(self.depth - self.run.start - 1)

    @property
    def shorter(self) -> ResumePoint | None:
        return point_before(self.run, self.depth)

    @property
    def gain(self) -> int:
        run = self.run
        if run is not None and run.depths[0] < self.depth:  # which is quick to find
            return self.depth - run.depths[bisect_left(run.depths, self.depth) - 1]
        shorter = self.shorter
        return self.depth - (0 if shorter is None else shorter.depth)

    @property
    def num_pages(self) -> int:
        assert self.run is not None
        return len(self.pages) + self.gain * self.run.pages_per_segment

    @property
    def freed(self) -> int:
        run = self.run
        assert run is not None
        if run.locks or run.children or run.depths[-1] > self.depth:
            return len(self.pages)
        return len(self.pages) + min(self.gain, self.depth - run.start) * run.pages_per_segment


class Run:
    """Segments [start, start + length) of one chain.

    Attributes:
        keys: length * 32 bytes.
        source: reads the pages of the newest segments from the table of the request that prolongs
            the run. None: the run has all.
        locks, pins: running requests and copies of the host tier, and pins, whose prefix ends in
            this run or below it.
        depths: sorted depths (segments from the root) of the resume points here.
    """

    __slots__ = (
        "_pages", "children", "depths", "keys", "last_used", "length", "locks", "num_uses",
        "parent", "pins", "points", "source", "start",
    )  # fmt: skip

    def __init__(self, parent: Run | None, start: int, keys: bytes, pages: Int32) -> None:
        self.parent = parent  # None for the root, and once evicted
        self.start = start
        self.keys = bytearray(keys)
        self.length = len(keys) // KEY_BYTES
        self._pages = pages  # of the first segments; `source` has the others
        self.source: Source | None = None
        self.children: dict[bytes, Run] = {}
        self.points: dict[int, ResumePoint] = {}
        self.depths: list[int] = []
        self.locks = 0
        self.pins = 0
        self.last_used = 0
        self.num_uses = 0

    @property
    def depth(self) -> int:
        """Segments from the root to the end of this run."""
        return self.start + self.length

    @property
    def key(self) -> bytes:
        return self.segment_key(self.length - 1)

    @property
    def gain(self) -> int:
        return self.length

    @property
    def num_pages(self) -> int:
        return self.length * self.pages_per_segment

    @property
    def freed(self) -> int:
        return self.num_pages

    @property
    def shorter(self) -> None:
        return None

    @property
    def pages(self) -> Int32:
        """[length, pages_per_segment] int32."""
        self._pages = pages = self.look()
        return pages

    def look(self) -> Int32:
        """`pages`, not copied from the source for good."""
        known = len(self._pages)
        if known == self.length:
            return self._pages
        assert self.source is not None
        newest = self.source(self.start + known, self.depth)
        return np.concatenate([self._pages, newest])

    def drop_source(self) -> None:
        """Copy the pages that the source still has, and drop it."""
        if self.source is not None:
            self._pages, self.source = self.look(), None

    @property
    def pages_per_segment(self) -> int:
        return int(self._pages.shape[1])

    def segment_key(self, i: int) -> bytes:
        return bytes(self.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])

    def common(self, keys: bytes, offset: int, limit: int) -> int:
        """Number of segments of this run that equal `keys` from segment `offset` on; at least 1."""
        low, high = 1, min(self.length, limit - offset)
        mid = high  # most often all of them do
        while low < high:
            a, b = (mid - 1) * KEY_BYTES, (offset + mid - 1) * KEY_BYTES
            if self.keys[a : a + KEY_BYTES] == keys[b : b + KEY_BYTES]:
                low = mid
            else:
                high = mid - 1
            mid = (low + high + 1) // 2
        return low

    def cut(self, length: int) -> None:
        self._pages = self.pages[:length]
        del self.keys[length * KEY_BYTES :]
        self.length = length

    @property
    def useless(self) -> int:
        """Segments past the last resume point: in a leaf of a hybrid model they serve no hit."""
        return self.depth - max(self.start, self.depths[-1] if self.depths else 0)


def run_of(run: Run, depth: int) -> Run:
    """The run of segment `depth - 1` on the path to `run`."""
    while run.start >= depth:
        assert run.parent is not None
        run = run.parent
    return run


def path_to(run: Run) -> list[Run]:
    """Runs from the first to `run`, without the root (which has no parent)."""
    runs = []
    while run.parent is not None:
        runs.append(run)
        run = run.parent
    return runs[::-1]


def point_before(run: Run | None, depth: int) -> ResumePoint | None:
    """The last resume point before `depth` on the path to `run`."""
    while run is not None:
        i = bisect_left(run.depths, depth)
        if i:
            return run.points[run.depths[i - 1]]
        run = run.parent
    return None


def point_after(run: Run, depth: int, most: int, but: Run | None = None) -> ResumePoint | None:
    """A resume point in (depth, most] of `run` or of the runs below it, except `but`."""
    i = bisect_right(run.depths, depth)
    if i < len(run.depths):
        return run.points[run.depths[i]] if run.depths[i] <= most else None
    runs = [child for child in run.children.values() if child is not but]
    while runs:
        run = runs.pop()
        if run.start < most and not run.depths:
            runs.extend(run.children.values())
        elif run.depths and run.depths[0] <= most:
            return run.points[run.depths[0]]
    return None


def split(run: Run, depth: int) -> Run:
    """Cut `run` at `depth`; returns the upper part. `run` itself stays the lower part."""
    k = depth - run.start
    assert 0 < k < run.length and run.parent is not None
    upper = Run(run.parent, run.start, bytes(run.keys[: k * KEY_BYTES]), run.pages[:k].copy())
    upper.locks, upper.pins = run.locks, run.pins
    upper.last_used, upper.num_uses = run.last_used, run.num_uses
    run.parent.children[upper.segment_key(0)] = upper
    run.parent, run.start = upper, depth
    del run.keys[: k * KEY_BYTES]
    run._pages = run.pages[k:].copy()
    run.length -= k
    upper.children[run.segment_key(0)] = run
    cut = bisect_right(run.depths, depth)
    upper.depths, run.depths = run.depths[:cut], run.depths[cut:]
    for d in upper.depths:
        point = upper.points[d] = run.points.pop(d)
        point.run = upper
    return upper


def merge(run: Run, hybrid: bool) -> None:
    """Undo a split at the end of `run`: its only child takes its segments. `run` stays if a request
    or pin ends there or, where ends of runs are entries, if it was used later than the child.
    """
    if len(run.children) != 1 or run.parent is None:
        return
    (child,) = run.children.values()
    if (run.locks, run.pins) != (child.locks, child.pins):
        return
    if not hybrid and (run.last_used, run.num_uses) > (child.last_used, child.num_uses):
        return
    parent, above = run.parent, run.pages
    parent.children[run.segment_key(0)] = child
    child.parent, child.start = parent, run.start
    child.keys[:0] = run.keys
    child._pages = np.concatenate([above, child._pages])
    child.length += run.length
    child.depths[:0] = run.depths
    child.points.update(run.points)
    for point in run.points.values():
        point.run = child
    run.parent, run.length, run.children, run.points, run.depths = None, 0, {}, {}, []
