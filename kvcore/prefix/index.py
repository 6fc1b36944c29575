"""The prefix index: a radix tree of dense segments, and resume points at boundaries.

A `Run` is a stretch of segments that were cached one after another, with their keys and pages in
arrays. Keys are chained, so a prompt that matches segment i matches all before it: a look-up is a
binary search per run. A resume point belongs to the segment that ends at its boundary and holds the
window pages needed to resume there; it is looked up, used and evicted whole. Two resume points of a chain that are no further
apart than a window tail hold between them the tails of all boundaries in between: hits end there too, and the first one
makes a resume point of its own.

Order of eviction: dense segments past the last resume point of their chain (they can serve no hit),
then resume points by the policy's rank. In models without window groups each chain's end is itself
the entry that the policy ranks. A parent is never evicted before its children, and segments
on the path of a running request are locked.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np

from ..events import Announcer
from ..pages import PagePool
from ..policies.base import EvictionPolicy
from ..spec import Int32
from .keys import KEY_BYTES

# Pages [end - first, pages_per_segment] of a request's segments [first, end).
Source = Callable[[int, int], Int32]


class ResumePoint:
    """Window pages that make one boundary resumable."""

    __slots__ = ("depth", "last_used", "num_uses", "pages", "run")

    def __init__(self, run: Run, depth: int, pages: Int32, tick: int) -> None:
        self.run: Run | None = run  # None once evicted
        self.depth = depth
        self.pages = pages
        self.last_used = tick
        self.num_uses = 0

    @property
    def key(self) -> bytes:
        """Key of the prefix that ends here."""
        assert self.run is not None
        return self.run.segment_key(self.depth - self.run.start - 1)

    @property
    def shorter(self) -> ResumePoint | None:
        """The resume point before it."""
        return PrefixIndex._point_before(self.run, self.depth)

    @property
    def gain(self) -> int:
        """Segments that a hit here saves over one at the resume point before it."""
        run = self.run
        if run is not None and run.depths[0] < self.depth:  # which is quick to find
            return self.depth - run.depths[bisect_left(run.depths, self.depth) - 1]
        shorter = self.shorter
        return self.depth - (0 if shorter is None else shorter.depth)

    @property
    def num_pages(self) -> int:
        """Window pages of this point, and dense pages of the segments that it gains."""
        assert self.run is not None
        return len(self.pages) + self.gain * self.run.pages_per_segment

    @property
    def freed(self) -> int:
        """Window pages of this point, and dense pages that serve neither a running request nor anything longer."""
        run = self.run
        assert run is not None
        if run.locks or run.children or run.depths[-1] > self.depth:
            return len(self.pages)
        return len(self.pages) + min(self.gain, self.depth - run.start) * run.pages_per_segment


class Run:
    """Segments [start, start + length) of one chain.

    Attributes:
        keys: length * 32 bytes.
        source: gives the pages of segments [first, end) from the table of the running request that prolongs the run: the run
            copies them when somebody asks, or the request ends. None where the run has all its pages.
        locks, pins: running requests, and pins, whose prefix ends in this run or below it.
        depths: sorted boundaries (in segments, absolute) that have a resume point here.
    """

    __slots__ = (
        "_pages", "children", "depths", "keys", "last_used", "length", "locks", "num_uses", "parent",
        "pins", "points", "source", "start",
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
        """Boundary at the end of this run, in segments."""
        return self.start + self.length

    @property
    def key(self) -> bytes:
        """Key of the prefix that ends with this run."""
        return self.segment_key(self.length - 1)

    @property
    def gain(self) -> int:
        """Segments of this run."""
        return self.length

    @property
    def num_pages(self) -> int:
        """Dense pages of this run."""
        return self.length * self.pages_per_segment

    @property
    def freed(self) -> int:
        """Dense pages of this run: only leaves are evicted."""
        return self.num_pages

    @property
    def shorter(self) -> None:
        """Chains that need no resume points are entries only at their end."""

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

    @property
    def pages_per_segment(self) -> int:
        """Dense pages of one segment."""
        return int(self._pages.shape[1])

    def segment_key(self, i: int) -> bytes:
        """Key of the i-th segment of this run."""
        return bytes(self.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])

    def common(self, keys: bytes, offset: int, limit: int) -> int:
        """How many segments of this run equal `keys` from segment `offset` on; the first one does."""
        low, high = 1, min(self.length, limit - offset)
        while low < high:
            mid = (low + high + 1) // 2
            a, b = (mid - 1) * KEY_BYTES, (offset + mid - 1) * KEY_BYTES
            if self.keys[a : a + KEY_BYTES] == keys[b : b + KEY_BYTES]:
                low = mid
            else:
                high = mid - 1
        return low

    def cut(self, length: int) -> None:
        """Forget the segments past the first `length`."""
        self._pages = self.pages[:length]
        del self.keys[length * KEY_BYTES :]
        self.length = length

    @property
    def useless(self) -> int:
        """Segments past the last resume point here: where hits need one, these serve none if this is a leaf."""
        return self.depth - max(self.start, self.depths[-1] if self.depths else 0)


class PrefixIndex:
    """Cached segments and resume points of one pool.

    Args:
        pool: where evicted pages go.
        pages_per_segment: dense pages of one segment, all groups.
        hybrid: there are window groups, so a hit needs a resume point.
        policy: chooses entries for eviction.
        span, tail_between: see `Layout.span`, `Layout.tail_between`.
    """

    def __init__(
        self, pool: PagePool, pages_per_segment: int, hybrid: bool, policy: EvictionPolicy, span: int,
        tail_between: Callable[[int, int, Int32 | None, int, Int32], Int32],
    ) -> None:  # fmt: skip
        self.pool = pool
        self.pages_per_segment = pages_per_segment
        self.hybrid = hybrid
        self.span = span
        self._tail_between = tail_between
        self.policy = policy
        self.tick = 0
        self.num_segments = 0
        self.num_locked_segments = 0
        self.num_points = 0
        self.num_evicted_points = 0
        self.num_evicted_segments = 0
        self.num_useless_evicted = 0  # of these segments, those that could serve no hit
        self.root = Run(None, 0, b"", np.empty((0, pages_per_segment), dtype=np.int32))
        self.root.locks = 1
        self.announcer: Announcer | None = None
        self._useless: dict[Run, None] = {}  # an ordered set: a run is listed once
        # What the policy failed to add (True) or to discard.
        self._owed: dict[Run | ResumePoint, bool] = {}
        self.pins: OrderedDict[Run | ResumePoint, float] = OrderedDict()  # -> expiry; oldest first
        self.num_pinned_segments = 0
        self.num_pinned_point_pages = 0
        self.num_demoted_pins = 0

    # Look-up: changes nothing.

    def find(self, keys: bytes, limit: int) -> tuple[Run, int]:
        """Longest cached prefix of the first `limit` keys: (run where it ends, segments)."""
        run, depth = self.root, 0
        while depth < limit:
            child = run.children.get(keys[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])
            if child is None:
                break
            run = child
            common = run.common(keys, depth, limit)
            depth += common
            if common < run.length:
                break
        return run, depth

    def resumable(self, run: Run, depth: int, limit: int) -> int:
        """Longest boundary <= min(depth, limit) on the path to `run` that a request can resume at."""
        limit = min(depth, limit)
        if not self.hybrid or not limit:
            return limit
        run = self._run_of(run, limit)
        point = self._point_before(run, limit + 1)
        last = 0 if point is None else point.depth
        most = last + self.span
        boundary, below = limit, None  # on another path than over the run `below`
        while boundary > last:
            if boundary < most and self._point_after(run, boundary, most, below) is not None:
                return boundary
            assert run.parent is not None
            boundary, below, run = run.start, run, run.parent
        return last

    def _run_of(self, run: Run, depth: int) -> Run:
        """The run of segment `depth - 1` on the path to `run`."""
        while run.start >= depth:
            assert run.parent is not None
            run = run.parent
        return run

    @staticmethod
    def _point_before(run: Run | None, depth: int) -> ResumePoint | None:
        """The last resume point before boundary `depth` on the path to `run`."""
        while run is not None:
            i = bisect_left(run.depths, depth)
            if i:
                return run.points[run.depths[i - 1]]
            run = run.parent
        return None

    @staticmethod
    def _point_after(run: Run, depth: int, most: int, but: Run | None = None) -> ResumePoint | None:
        """A resume point past boundary `depth` of `run`, at most at `most`, there or below, but not on the path over `but`."""
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

    def pages_between(self, run: Run, first: int, end: int) -> Int32:
        """Pages of segments [first, end) on the path to `run`: [end - first, pages_per_segment]."""
        parts = []
        node: Run | None = run
        while node is not None and node.depth > first:
            parts.append(node.pages[max(0, first - node.start) : end - node.start])
            node = node.parent
        if not parts:
            return np.empty((0, self.pages_per_segment), dtype=np.int32)
        return np.concatenate(parts[::-1])

    def path(self, run: Run) -> list[Run]:
        """Runs from the first to `run`, without the root."""
        runs = []
        while run is not self.root:
            runs.append(run)
            assert run.parent is not None
            run = run.parent
        return runs[::-1]

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        unlocked = self.num_segments - self.num_locked_segments
        return unlocked * self.pages_per_segment + self.pool.num_held_only

    # Locks: the path of a running request.

    def end_at(self, run: Run, depth: int) -> Run:
        """The run that ends exactly at `depth` on the path to `run`; splits one if needed."""
        while run.start >= depth and run is not self.root:
            assert run.parent is not None
            run = run.parent
        return run if run.depth == depth else self._split(run, depth)

    def lock(self, run: Run) -> None:
        """Protect the path to the end of `run`."""
        for node in self.path(run):
            self._lock_one(node)

    def _lock_one(self, run: Run) -> None:
        if run.locks == 0:
            self.num_locked_segments += run.length
            self._file(run, False)
        run.locks += 1

    def unlock(self, run: Run) -> Run:
        """Undo one `lock(run)`, while the request still has its tables; the path counts as used now.

        Returns:
            `run`, or the run below it if the two were merged.
        """
        path = self.path(run)
        for node in path:
            if node.source is not None:
                _, node.source = node.pages, None
            node.locks -= 1
            node.last_used = self.tick
            if node.locks == 0:
                self.num_locked_segments -= node.length
        self._became_leaf(run)
        for node in path:
            run = self._merge(node)
        return run

    # Growth.

    def insert(self, run: Run, keys: bytes, source: Source) -> tuple[Run, int]:
        """Cache segments after the end of `run`, which the caller has locked once.

        Where a segment is cached already, the cached pages stay and the caller's are not taken.

        Args:
            run: ends where the new segments start.
            keys: n * 32 bytes.
            source: of their pages, good until the caller's `unlock`.

        Returns:
            (run that ends at the last segment, locked instead of `run`; number of leading segments that
            were cached already).
        """
        n = len(keys) // KEY_BYTES
        known = 0
        while known < n:
            child = run.children.get(keys[known * KEY_BYTES : (known + 1) * KEY_BYTES])
            if child is None:
                break
            common = child.common(keys, known, n)
            if common < child.length:
                child = self._split(child, child.start + common)
            self._lock_one(child)
            known += common
            run = child
        if known == n:
            return run, known
        keys = keys[known * KEY_BYTES :]
        self.num_segments += n - known
        self.num_locked_segments += n - known
        if self._extensible(run):
            run.keys += keys
            run.length += n - known
        else:
            child = Run(run, run.depth, keys, np.empty((0, self.pages_per_segment), dtype=np.int32))
            child.locks = 1
            run.children[child.segment_key(0)] = child
            run = child
        run.source = source
        run.last_used = self.tick
        return run, known

    def _extensible(self, run: Run) -> bool:
        """Whether segments may be put at the end of `run`: it is a leaf that only one request, and no pin, ends in."""
        return run.locks == 1 and not run.children and not run.pins and run is not self.root

    def append(
        self, runs: list[Run], slots: list[int], keys: list[bytes], sources: list[Source]
    ) -> list[int]:
        """`insert` of one segment for each of several requests, quick where it prolongs a leaf of one request.

        Args:
            runs: by slot: where the request's segments end; set anew.
            keys: [n] of the new segments.
            sources: by slot.

        Returns:
            Indices of those that were cached already.
        """
        known, added = [], 0
        for i, slot in enumerate(slots):
            run = runs[slot]
            # Only the request that prolongs a run is its source; `unlock` sets when it was used.
            if run.locks == 1 and run.source is not None and not run.children and not run.pins:
                run.keys += keys[i]
                run.length += 1
                added += 1
            else:
                runs[slot], found = self.insert(run, keys[i], sources[slot])
                if found:
                    known.append(i)
        self.num_segments += added
        self.num_locked_segments += added
        return known

    def add_point(self, run: Run, depth: int, pages: Int32) -> bool:
        """Keep a resume point at boundary `depth` on the path to `run`; False if one is there.

        If True, the caller calls `pool.hold(pages)`, once for all points of a step.
        """
        run = self._run_of(run, depth)
        point = run.points.get(depth)
        if point is not None:
            self._used(point)
            return False
        point = run.points[depth] = ResumePoint(run, depth, pages, self.tick)
        if run.depths and depth < run.depths[-1]:
            insort(run.depths, depth)
        else:
            run.depths.append(depth)
        self.num_points += 1
        self._file(point)
        return True

    def use(self, run: Run) -> ResumePoint | None:
        """A hit ends at the end of `run`, which is locked: count the use; returns the resume point there, if any."""
        if not self.hybrid:
            run.num_uses += 1
            return None
        point = self.point_at(run)
        assert point is not None
        point.num_uses += 1
        self._used(point)
        return point

    def point_at(self, run: Run) -> ResumePoint | None:
        """The resume point at the end of `run`, made out of its neighbours where there is none yet; None where they are too far."""
        depth = run.depth
        if depth not in run.points:
            before = self._point_before(run, depth)
            last = 0 if before is None else before.depth
            after = self._point_after(run, depth, last + self.span)
            if after is None:
                return None
            tail = None if before is None else before.pages
            pages = self._tail_between(depth, last, tail, after.depth, after.pages)
            self.add_point(run, depth, pages)
            self.pool.hold(pages)
            if self.announcer is not None:
                self.announcer.point(run, depth)
        return run.points[depth]

    def _used(self, point: ResumePoint) -> None:
        point.last_used = self.tick
        if point not in self.pins:
            self._file(point)

    def _file(self, entry: Run | ResumePoint, add: bool = True) -> None:
        """Have the policy add or discard `entry`.

        Its code may be anybody's, and this is in the middle of a change, which must not stop half-way: what raises is done again by
        `evict`, which may raise.
        """
        try:
            (self.policy.add if add else self.policy.discard)(entry)
            self._owed.pop(entry, None)
        except Exception:
            self._owed[entry] = add

    def file_owed(self) -> None:
        """Have the policy do again what it failed to; raises what it does."""
        for owed, add in list(self._owed.items()):
            (self.policy.add if add else self.policy.discard)(owed)
            del self._owed[owed]

    # Pins: entries that are evicted after all others.

    @property
    def num_pinned_pages(self) -> int:
        """Pages of pinned entries, with the dense pages below them."""
        return self.num_pinned_segments * self.pages_per_segment + self.num_pinned_point_pages

    def pin(self, run: Run, expiry: float) -> None:
        """Pin the entry at the end of `run`, or renew its pin as the newest."""
        entry = run.points[run.depth] if self.hybrid else run
        if entry not in self.pins:
            for node in self.path(run):
                if node.pins == 0:
                    self.num_pinned_segments += node.length
                node.pins += 1
            if isinstance(entry, ResumePoint):
                self.num_pinned_point_pages += len(entry.pages)
            self._file(entry, False)
        self.pins[entry] = expiry
        self.pins.move_to_end(entry)

    def unpin(self, entry: Run | ResumePoint) -> None:
        """Make a pinned entry an ordinary one."""
        del self.pins[entry]
        run = entry.run if isinstance(entry, ResumePoint) else entry
        assert run is not None
        for node in self.path(run):
            node.pins -= 1
            if node.pins == 0:
                self.num_pinned_segments -= node.length
        if isinstance(entry, ResumePoint):
            self.num_pinned_point_pages -= len(entry.pages)
            self._file(entry)
        else:
            self._became_leaf(entry)
        self._merge(run)

    def demote_oldest(self) -> None:
        """Unpin the entry that was pinned first."""
        self.unpin(next(iter(self.pins)))
        self.num_demoted_pins += 1

    # Eviction.

    def evict(self, num_pages: int) -> None:
        """Free at least `num_pages` pages; the caller checked that `num_evictable` allows it.

        Raises:
            RuntimeError: the policy chose what it may not. What was evicted before stays so. Other errors: those of the policy.
        """
        target = self.pool.num_free + num_pages
        dropped: list[Int32] = []  # of points; the pool is told of many in one go
        try:
            while True:
                most = self.pool.num_free + len(dropped) * (len(dropped[0]) if dropped else 0)
                if dropped and (self._useless or most >= target):
                    self._unhold(dropped)
                if self.pool.num_free >= target:
                    return
                self._evict_one(target - self.pool.num_free, dropped)
        finally:
            self._unhold(dropped)

    def _unhold(self, dropped: list[Int32]) -> None:
        """Let go of the pages of points, which are none any more."""
        if dropped:
            self.pool.unhold(np.concatenate(dropped))
            dropped.clear()

    def _evict_one(self, num_pages: int, dropped: list[Int32]) -> None:
        """Evict an entry, or up to `num_pages` pages of segments; adds to `dropped` the pages of a point."""
        if self._owed:
            self.file_owed()
        if self._useless:
            return self._trim_useless(self._useless.popitem()[0], num_pages)
        entry = self.policy.pop()
        if entry is None and self.pins:
            self.demote_oldest()
        elif isinstance(entry, ResumePoint) and entry.run is not None and entry not in self.pins:
            dropped.append(self._forget(entry))
        elif isinstance(entry, Run) and self._is_entry(entry) and entry not in self.pins:
            self._trim(entry, min(entry.length, self._segments(num_pages)))
        else:
            raise RuntimeError(
                f"policy: expected pop to return an entry that was added and not discarded since, got {entry!r}"
            )

    def _segments(self, num_pages: int) -> int:
        return -(-num_pages // max(1, self.pages_per_segment))

    def clear(self) -> None:
        """Drop all resume points, and all segments but those on the path of a running request."""
        announcer, evicted = self.announcer, (self.num_evicted_points, self.num_evicted_segments)
        if self.num_locked_segments == 0:
            self.announcer = None  # one record for all of them, below
        runs = list(self.runs())
        points = [run.points[depth] for run in runs for depth in reversed(run.depths)]
        self._unhold([self._forget(point) for point in points])
        for run in reversed(runs):  # children first
            if not run.locks and run.parent is not None:  # not merged meanwhile
                if run in self.pins:
                    self.unpin(run)
                self._file(run, False)
                self._trim(run, run.length)
        self._useless.clear()
        self.announcer = announcer
        self.num_evicted_points, self.num_evicted_segments = evicted
        if announcer is not None and self.num_locked_segments == 0:
            announcer.cleared()

    def _drop_point(self, point: ResumePoint) -> None:
        self.pool.unhold(self._forget(point))

    def _forget(self, point: ResumePoint) -> Int32:
        """Take a point out; the caller calls `pool.unhold` of the pages, which this returns."""
        if point in self.pins:
            self.unpin(point)
        run = point.run
        assert run is not None
        self._file(point, False)
        if self.announcer is not None:
            self.announcer.point_removed(point.key, point.depth)
        del run.points[point.depth]
        del run.depths[bisect_left(run.depths, point.depth)]
        point.run = None
        self.num_points -= 1
        self.num_evicted_points += 1
        self._became_leaf(run)
        return point.pages

    def _trim_useless(self, run: Run, num_pages: int) -> None:
        if run.parent is None or run.locks or run.children:
            return  # used again, or gone, since it was listed
        n = run.useless
        if n:
            n = min(n, self._segments(num_pages)) if self.pages_per_segment else n
            self.num_useless_evicted += n
            self._trim(run, n)

    def _trim(self, run: Run, n: int) -> None:
        """Evict the last n segments of an unlocked leaf; no resume point is on them."""
        keep = run.length - n
        assert not run.depths or run.depths[-1] <= run.start + keep
        self.pool.put(run.pages[keep:].ravel())
        if self.announcer is not None:
            self.announcer.segments_removed(bytes(run.keys[keep * KEY_BYTES :]))
        self.num_segments -= n
        self.num_evicted_segments += n
        parent = run.parent
        assert parent is not None
        if keep == 0:
            del parent.children[run.segment_key(0)]
            run.parent, run.length = None, 0
            self._became_leaf(parent)
            self._merge(parent)
            return
        run.cut(keep)
        self._became_leaf(run)

    def _became_leaf(self, run: Run) -> None:
        """File `run` for eviction if it is an unlocked leaf now."""
        if self._is_entry(run):
            if run not in self.pins:
                self._file(run)
        elif self.hybrid and not (run.locks or run.children or run.parent is None) and run.useless:
            self._useless[run] = None

    def _is_entry(self, run: Run) -> bool:
        """Whether the end of `run` itself is what the policy ranks: an unlocked leaf, where hits need no resume point."""
        return not (self.hybrid or run.locks or run.children or run.parent is None)

    def _split(self, run: Run, depth: int) -> Run:
        """Cut `run` at boundary `depth`; returns the upper part. `run` itself stays the lower part."""
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

    def _merge(self, run: Run) -> Run:
        """Undo a split at the end of `run` that serves nobody any more: the run below, its only child, takes its segments.

        No request and no pin may end there, and where the ends of runs are entries, the lower part must have been used as lately.

        Returns:
            The child, or `run` if it stays.
        """
        if len(run.children) != 1 or run.parent is None:
            return run
        (child,) = run.children.values()
        if (run.locks, run.pins) != (child.locks, child.pins):
            return run
        if not self.hybrid and (run.last_used, run.num_uses) > (child.last_used, child.num_uses):
            return run
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
        return child

    # Inspection.

    def runs(self) -> Iterator[Run]:
        """Every run but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())
