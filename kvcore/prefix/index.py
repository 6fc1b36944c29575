"""The prefix index: cached segments and resume points, how prompts find them, and their eviction.

A hit needs every dense segment before it and, with window or state groups, a *resume point*:

    alignment 64, window 129 in blocks of 64      tokens 0    64   128  192  256  320
    dense segments 0..4 are cached                       | s0 | s1 | s2 | s3 | s4 |
    a resume point at 192 holds window blocks 1, 2            [ b1 | b2 ]192

A prompt that starts with these 320 tokens hits 192 of them. A second point at 320 holds blocks 3
and 4. The two are no further apart than a tail is long, so they also hold blocks 2 and 3 of the
boundary 256: a hit there makes its own point of these.

Eviction takes children before parents, in the order of docs/concepts.md. Running requests lock
their path.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Int32
from ..pages import PagePool
from ..policies.base import EvictionPolicy
from .keys import KEY_BYTES
from .pins import Pins
from .tree import ResumePoint, Run, Source, merge, path_to, point_after, point_before, run_of, split

if TYPE_CHECKING:
    from ..event_writer import EventWriter
    from ..tier.jobs import TransferEnd


class PrefixIndex:
    """Cached segments and resume points of one pool.

    Args:
        hybrid: there are window or state groups, so a hit needs a resume point.
        others: see `Layout` and `KVCache`.

    Attributes:
        root: empty run at the start of every chain.
        tick: time of uses, counted up by calls.
        changes: changes of the tree; the result of a look-up holds as long as this stays.
        num_useless_evicted: evicted segments that could serve no hit.
        pins, event_writer: entries that are evicted last; writer of events or None.
        transfers: ends of open copies from or to another index.
        passing: resume points that go when the next chunk of their request ends; until then any
            request may hit them.
    """

    def __init__(
        self,
        pool: PagePool,
        pages_per_segment: int,
        hybrid: bool,
        policy: EvictionPolicy,
        span: int,
        tail_between: Callable[[int, int, Int32 | None, int, Int32], Int32],
        max_pinned_pages: int = 0,
    ) -> None:
        self.pool, self.pages_per_segment, self.hybrid = pool, pages_per_segment, hybrid
        self.policy, self.span, self._tail_between = policy, span, tail_between
        self.root = Run(None, 0, b"", np.empty((0, pages_per_segment), dtype=np.int32))
        self.root.locks = 1
        self.tick = self.changes = 0
        self.num_segments = self.num_locked_segments = self.num_points = 0
        self.num_evicted_points = self.num_evicted_segments = self.num_useless_evicted = 0
        self.pins = Pins(self, max_pinned_pages)
        self.event_writer: EventWriter | None = None
        self.transfers: dict[TransferEnd, None] = {}
        self._useless: dict[Run, None] = {}  # an ordered set: a run is listed once
        # Calls of the policy that raised, to be repeated: `add` (True) or `discard`.
        self._failed: dict[Run | ResumePoint, bool] = {}
        self.passing: dict[Run | ResumePoint, None] = {}

    @property
    def num_evictable(self) -> int:
        unlocked = self.num_segments - self.num_locked_segments
        return unlocked * self.pages_per_segment + self.pool.num_held_only

    def runs(self) -> Iterator[Run]:
        """Every run but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

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
        """Largest depth <= min(depth, limit) on the path to `run` that a request can resume at."""
        limit = min(depth, limit)
        if not self.hybrid or not limit:
            return limit
        run = run_of(run, limit)
        point = point_before(run, limit + 1)
        last = 0 if point is None else point.depth
        most = last + self.span
        # No point lies between `last` and `limit`: all depths in a run have the same points after
        # them, so one test a run is enough. Up the path, runs beside `below` add points.
        depth, below = limit, None
        while depth > last:
            if depth < most and point_after(run, depth, most, below) is not None:
                return depth
            assert run.parent is not None
            depth, below, run = run.start, run, run.parent
        return last

    def pages_between(self, run: Run, first: int, end: int) -> Int32:
        """[end - first, pages_per_segment] pages on the path to `run`, not to be changed."""
        parts = []
        node: Run | None = run
        while node is not None and node.depth > first:
            parts.append(node.pages[max(0, first - node.start) : max(0, end - node.start)])
            node = node.parent
        if not parts:
            return np.empty((0, self.pages_per_segment), dtype=np.int32)
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])

    # Locks: the path of a running request.

    def end_at(self, run: Run, depth: int) -> Run:
        """The run that ends exactly at `depth` on the path to `run`; splits one if needed."""
        while run.start >= depth and run is not self.root:
            assert run.parent is not None
            run = run.parent
        return run if run.depth == depth else split(run, depth)

    def lock(self, run: Run) -> None:
        for node in path_to(run):
            self._lock_one(node)

    def _lock_one(self, run: Run) -> None:
        if run.locks == 0:
            self.num_locked_segments += run.length
            if not self.hybrid:  # else its points alone are what the policy ranks
                self.withdraw(run)
        run.locks += 1

    def unlock(self, run: Run, *, used: bool = True) -> None:
        """Undo one `lock(run)`, before the request's tables are emptied."""
        path = path_to(run)
        for node in path:
            node.drop_source()
            node.locks -= 1
            if used:
                node.last_used = self.tick
            if node.locks == 0:
                self.num_locked_segments -= node.length
        self.became_leaf(run)
        for node in path:
            self.merge(node)

    def merge(self, run: Run) -> None:
        self.changes += 1
        merge(run, self.hybrid)

    # Growth.

    def insert(self, run: Run, keys: bytes, source: Source) -> tuple[Run, int]:
        """Cache segments with `keys` after the end of `run`, which the caller has locked once;
        `source` has their pages until its `unlock`. Returns (run that ends at the last segment,
        locked instead of `run`; number of leading segments that were cached already)."""
        n = len(keys) // KEY_BYTES
        known = 0
        while known < n and run.children:
            child = run.children.get(keys[known * KEY_BYTES : (known + 1) * KEY_BYTES])
            if child is None:
                break
            common = child.common(keys, known, n)
            if common < child.length:
                child = split(child, child.start + common)
            self._lock_one(child)
            known += common
            run = child
        if known == n:
            return run, known
        self.changes += 1
        keys = keys[known * KEY_BYTES :]
        self.num_segments += n - known
        self.num_locked_segments += n - known
        # A leaf in which one request and no pin ends may grow.
        if run.locks == 1 and not run.children and not run.pins and run is not self.root:
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

    # Resume points.

    def add_point(
        self, run: Run, depth: int, pages: Int32, *, passing: bool = False
    ) -> ResumePoint | None:
        """Keep a resume point whose `pages` the caller holds; None if one is there. `passing`: the
        policy knows nothing of it until it is used."""
        run = run_of(run, depth)
        point = run.points.get(depth)
        if point is not None:
            self._used(point)
            return None
        point = run.points[depth] = ResumePoint(run, depth, pages, self.tick)
        if run.depths and depth < run.depths[-1]:
            insort(run.depths, depth)
        else:
            run.depths.append(depth)
        self.num_points += 1
        self.changes += 1
        if passing:
            self.passing[point] = None
        else:
            self.offer(point)
        return point

    def renew(self, run: Run) -> bool:
        """Count the resume point at the end of `run` as used now; False if there is none."""
        point = run.points.get(run.depth)
        if point is not None:
            self._used(point)
        return point is not None

    def use(self, run: Run) -> ResumePoint | None:
        """Count a hit at the end of the locked `run`; return the resume point there, if any."""
        if not self.hybrid:
            run.num_uses += 1
            return None
        point = self.point_at(run)
        assert point is not None
        point.num_uses += 1
        self._used(point)
        return point

    def point_at(self, run: Run) -> ResumePoint | None:
        """Resume point at the end of `run`, or one made of neighbours; None if too far apart."""
        depth = run.depth
        if depth not in run.points:
            pages = self._pages_at(run, depth)
            if pages is None:
                return None
            self.add_point(run, depth, pages)
            self.pool.hold(pages)
            if self.event_writer is not None:
                self.event_writer.point(run, depth)
        return run.points[depth]

    def _pages_at(self, run: Run, depth: int) -> Int32 | None:
        point = run.points.get(depth)
        if point is not None:
            return point.pages
        before = point_before(run, depth)
        last = 0 if before is None else before.depth
        after = point_after(run, depth, last + self.span)
        if after is None:
            return None
        tail = None if before is None else before.pages
        return self._tail_between(depth, last, tail, after.depth, after.pages)

    def taken_by_hit(self, run: Run, depth: int, *, uses_point: bool) -> int:
        """Evictable pages that an admission at `depth` on the path to `run` would take."""
        path = path_to(run)
        segments = sum(max(0, min(r.depth, depth) - r.start) for r in path if not r.locks)
        taken = segments * self.pages_per_segment
        pages = self._pages_at(run_of(run, depth), depth) if self.hybrid and uses_point else None
        return taken if pages is None else taken + self.pool.num_unused(pages)

    def _used(self, point: ResumePoint) -> None:
        point.last_used = self.tick
        if point not in self.pins:
            self.offer(point)

    # Entries that the policy ranks.

    def offer(self, entry: Run | ResumePoint) -> None:
        self._tell_policy(entry, True)

    def withdraw(self, entry: Run | ResumePoint) -> None:
        self._tell_policy(entry, False)

    def _tell_policy(self, entry: Run | ResumePoint, add: bool) -> None:
        """Call the policy. The index is half changed here: `evict` repeats a call that raised."""
        self.passing.pop(entry, None)
        try:
            (self.policy.add if add else self.policy.discard)(entry)
            self._failed.pop(entry, None)
        except Exception:
            self._failed[entry] = add

    def repeat_failed(self) -> None:
        for entry, add in list(self._failed.items()):
            (self.policy.add if add else self.policy.discard)(entry)
            del self._failed[entry]

    def became_leaf(self, run: Run) -> None:
        """File `run` for eviction if it is an unlocked leaf."""
        if self._is_entry(run):
            if run not in self.pins:
                self.offer(run)
        elif self.hybrid and not (run.locks or run.children or run.parent is None) and run.useless:
            self._useless[run] = None

    def _is_entry(self, run: Run) -> bool:
        return not (self.hybrid or run.locks or run.children or run.parent is None)

    # Eviction.

    def evict(self, num_pages: int) -> None:
        """Free at least `num_pages` of `num_evictable` pages. RuntimeError: a wrong policy."""
        target = self.pool.num_free + num_pages
        dropped: list[Int32] = []  # pages of points, returned to the pool together
        try:
            while True:
                # If points share no page. Points have equally many pages.
                might_free = len(dropped) * len(dropped[0]) if dropped else 0
                if dropped and (self._useless or self.pool.num_free + might_free >= target):
                    self._unhold(dropped)
                if self.pool.num_free >= target:
                    return
                self._evict_one(target - self.pool.num_free, dropped)
        finally:
            self._unhold(dropped)

    def _unhold(self, dropped: list[Int32]) -> None:
        if dropped:
            self.pool.unhold(np.concatenate(dropped))
            dropped.clear()

    def _evict_one(self, num_pages: int, dropped: list[Int32]) -> None:
        """Evict an entry, or up to `num_pages` dense pages; those of a point go to `dropped`."""
        if self._failed:
            self.repeat_failed()
        if self._useless:
            return self._trim_useless(self._useless.popitem()[0], num_pages)  # listed last
        entry = self.policy.pop()
        if entry is None:
            entry = next(iter(self.passing), None)
        if entry is None and self.pins:
            self.pins.demote_oldest()
        elif isinstance(entry, ResumePoint) and entry.run is not None and entry not in self.pins:
            dropped.append(self._forget(entry))
        elif isinstance(entry, Run) and self._is_entry(entry) and entry not in self.pins:
            self._trim(entry, min(entry.length, self._segments(num_pages)))
        else:
            raise RuntimeError(
                f"policy: expected pop to return an entry that was added and not discarded since, "
                f"got {entry!r}"
            )

    def _segments(self, num_pages: int) -> int:
        return -(-num_pages // max(1, self.pages_per_segment))

    def clear(self, *, tell_each: bool = False) -> None:
        """Drop all that no running request needs. `tell_each`: events name each entry."""
        event_writer = self.event_writer
        evicted = self.num_evicted_points, self.num_evicted_segments
        if self.num_locked_segments == 0 and not tell_each:
            self.event_writer = None  # one record for all of them, below
        runs = list(self.runs())
        points = [run.points[depth] for run in runs for depth in reversed(run.depths)]
        self._unhold([self._forget(point) for point in points])
        for run in reversed(runs):  # children first
            if not run.locks and run.parent is not None:  # not merged meanwhile
                if run in self.pins:
                    self.pins.remove(run)
                self.withdraw(run)
                self._trim(run, run.length)
        self._useless.clear()
        self.event_writer = event_writer
        self.num_evicted_points, self.num_evicted_segments = evicted
        if event_writer is not None and self.num_locked_segments == 0 and not tell_each:
            event_writer.cleared()

    def remove(self, run: Run) -> None:
        """Evict `run` and all below it: no locks, pins or points. The caller treats the parent."""
        assert run.parent is not None
        self.changes += 1
        del run.parent.children[run.segment_key(0)]
        runs = [run]
        for node in runs:  # which grows
            runs.extend(node.children.values())
        for node in reversed(runs):
            self.withdraw(node)
            self.pool.put(node.pages.ravel())
            if self.event_writer is not None:
                self.event_writer.segments_removed(bytes(node.keys))
            self.num_segments -= node.length
            self.num_evicted_segments += node.length
            node.parent, node.length, node.children = None, 0, {}

    def drop_point(self, point: ResumePoint) -> None:
        self.pool.unhold(self._forget(point))

    def _forget(self, point: ResumePoint) -> Int32:
        """Take a point out; the caller unholds its pages, which this returns."""
        if point in self.pins:
            self.pins.remove(point)
        run = point.run
        assert run is not None
        self.withdraw(point)
        if self.event_writer is not None:
            self.event_writer.point_removed(point.key, point.depth)
        del run.points[point.depth]
        del run.depths[bisect_left(run.depths, point.depth)]
        point.run = None
        self.changes += 1
        self.num_points -= 1
        self.num_evicted_points += 1
        self.became_leaf(run)
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
        self.changes += 1
        keep = run.length - n
        assert not run.depths or run.depths[-1] <= run.start + keep
        self.pool.put(run.pages[keep:].ravel())
        if self.event_writer is not None:
            self.event_writer.segments_removed(bytes(run.keys[keep * KEY_BYTES :]))
        self.num_segments -= n
        self.num_evicted_segments += n
        parent = run.parent
        assert parent is not None
        if keep == 0:
            del parent.children[run.segment_key(0)]
            run.parent, run.length = None, 0
            self.became_leaf(parent)
            self.merge(parent)
            return
        run.cut(keep)
        self.became_leaf(run)
