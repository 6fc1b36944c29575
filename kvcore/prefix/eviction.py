"""Eviction and pins: in which order cached entries go, and what goes with them.

Order of eviction: first dense segments past the last resume point of their chain, which can serve
no hit; then entries as the policy ranks them; then pinned ones, the oldest pin first. An entry is a resume point or, in models without window and state groups, the end
of a chain. A parent is never evicted before its children, and segments on the path of a running
request are locked:

    segments        0   1   2   3   4   5   6        goes first: segments 5 and 6 (after the last
    resume points           2           5            point, no request there); then the point at 5
                    +---+---+---+---+---+---+---     or at 2, as the policy says; without the point
                    locked by a  |  in no request    at 5 segments 2, 3 and 4 can serve no hit
                    request                          either; 0 and 1 stay while the request runs
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..announcer import Announcer
from ..arrays import Int32
from ..pages import PagePool
from ..policies.base import EvictionPolicy
from .keys import KEY_BYTES
from .tree import ResumePoint, Run, merge, path_to, split

if TYPE_CHECKING:
    from .holdings import Holding


class EvictableTree:
    """The cached segments and resume points of one pool, as eviction sees them.

    Args:
        pool: where evicted pages go.
        pages_per_segment: dense pages of one segment, all groups.
        hybrid: there are window or state groups, so a hit needs a resume point.
        policy: chooses entries for eviction.

    Attributes:
        root: the run without segments at the start of every chain.
        tick: uses are counted in ticks: admissions, commits and releases.
        num_segments, num_locked_segments, num_points: what is cached, and what running requests
            need.
        pins: expiry of each pinned entry, the oldest pin first.
        announcer: told of what goes; None if nobody listens.
        holdings: what jobs keep here.
    """

    def __init__(
        self, pool: PagePool, pages_per_segment: int, hybrid: bool, policy: EvictionPolicy
    ) -> None:
        self.pool = pool
        self.pages_per_segment = pages_per_segment
        self.hybrid = hybrid
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
        # Calls of the policy that raised, to be repeated: `add` (True) or `discard`.
        self._failed: dict[Run | ResumePoint, bool] = {}
        self.pins: OrderedDict[Run | ResumePoint, float] = OrderedDict()
        self.num_pinned_segments = 0
        self.num_pinned_point_pages = 0
        self.num_demoted_pins = 0
        self.holdings: dict[Holding, None] = {}

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        unlocked = self.num_segments - self.num_locked_segments
        return unlocked * self.pages_per_segment + self.pool.num_held_only

    def runs(self) -> Iterator[Run]:
        """Every run but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    # What the policy ranks.

    def offer(self, entry: Run | ResumePoint) -> None:
        """`entry` may be evicted, or was used again: have the policy add it."""
        self._tell_policy(entry, True)

    def withdraw(self, entry: Run | ResumePoint) -> None:
        """`entry` may not be evicted any more: have the policy discard it."""
        self._tell_policy(entry, False)

    def _tell_policy(self, entry: Run | ResumePoint, add: bool) -> None:
        """Call the policy's `add` or `discard`.

        Its code may be anybody's, and this is in the middle of a change, which must not stop
        half-way: a call that raises is repeated by `evict`, which may raise.
        """
        try:
            (self.policy.add if add else self.policy.discard)(entry)
            self._failed.pop(entry, None)
        except Exception:
            self._failed[entry] = add

    def repeat_failed(self) -> None:
        """Repeat the calls of the policy that raised; raises what they do."""
        for entry, add in list(self._failed.items()):
            (self.policy.add if add else self.policy.discard)(entry)
            del self._failed[entry]

    def became_leaf(self, run: Run) -> None:
        """File `run` for eviction if it is an unlocked leaf now."""
        if self._is_entry(run):
            if run not in self.pins:
                self.offer(run)
        elif self.hybrid and not (run.locks or run.children or run.parent is None) and run.useless:
            self._useless[run] = None

    def _is_entry(self, run: Run) -> bool:
        """Whether the end of `run` itself is what the policy ranks: an unlocked leaf, where hits
        need no resume point."""
        return not (self.hybrid or run.locks or run.children or run.parent is None)

    # Pins: entries that are evicted after all others.

    @property
    def num_pinned_pages(self) -> int:
        """Pages of pinned entries, with the dense pages below them."""
        return self.num_pinned_segments * self.pages_per_segment + self.num_pinned_point_pages

    def pin(self, run: Run, expiry: float) -> None:
        """Pin the entry at the end of `run`, or renew its pin as the newest."""
        entry = run.points[run.depth] if self.hybrid else run
        if entry not in self.pins:
            for node in path_to(run):
                if node.pins == 0:
                    self.num_pinned_segments += node.length
                node.pins += 1
            if isinstance(entry, ResumePoint):
                self.num_pinned_point_pages += len(entry.pages)
            self.withdraw(entry)
        self.pins[entry] = expiry
        self.pins.move_to_end(entry)

    def unpin(self, entry: Run | ResumePoint) -> None:
        """Make a pinned entry an ordinary one."""
        del self.pins[entry]
        run = entry.run if isinstance(entry, ResumePoint) else entry
        assert run is not None
        for node in path_to(run):
            node.pins -= 1
            if node.pins == 0:
                self.num_pinned_segments -= node.length
        if isinstance(entry, ResumePoint):
            self.num_pinned_point_pages -= len(entry.pages)
            self.offer(entry)
        else:
            self.became_leaf(entry)
        merge(run, self.hybrid)

    def demote_oldest(self) -> None:
        """Unpin the entry that was pinned first."""
        self.unpin(next(iter(self.pins)))
        self.num_demoted_pins += 1

    # Eviction.

    def evict(self, num_pages: int) -> None:
        """Free at least `num_pages` pages; the caller checked that `num_evictable` allows it.

        Raises:
            RuntimeError: the policy chose what it may not. What was evicted before stays so. Other
                errors: those of the policy.
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
        """Evict an entry, or up to `num_pages` pages of segments; adds to `dropped` the pages of a
        point."""
        if self._failed:
            self.repeat_failed()
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
                f"policy: expected pop to return an entry that was added and not discarded since, "
                f"got {entry!r}"
            )

    def _segments(self, num_pages: int) -> int:
        return -(-num_pages // max(1, self.pages_per_segment))

    def clear(self, *, tell_each: bool = False) -> None:
        """Drop all resume points, and all segments but those on the path of a running request.

        Args:
            tell_each: the announcer hears of each, and not that nothing is cached any more.
        """
        announcer, evicted = self.announcer, (self.num_evicted_points, self.num_evicted_segments)
        if self.num_locked_segments == 0 and not tell_each:
            self.announcer = None  # one record for all of them, below
        runs = list(self.runs())
        points = [run.points[depth] for run in runs for depth in reversed(run.depths)]
        self._unhold([self._forget(point) for point in points])
        for run in reversed(runs):  # children first
            if not run.locks and run.parent is not None:  # not merged meanwhile
                if run in self.pins:
                    self.unpin(run)
                self.withdraw(run)
                self._trim(run, run.length)
        self._useless.clear()
        self.announcer = announcer
        self.num_evicted_points, self.num_evicted_segments = evicted
        if announcer is not None and self.num_locked_segments == 0 and not tell_each:
            announcer.cleared()

    def drop_pages(self, is_wanted: npt.NDArray[np.bool_]) -> None:
        """Evict what holds pages that `is_wanted` [num_pages], and what is found only through it.
        Segments on the path of a running request stay."""
        ends = self._ends_before(is_wanted)
        for entry in [e for e in self.pins if self._goes(e, ends, is_wanted)]:
            self.unpin(entry)
            ends = {}  # runs may have been merged
        ends = ends or self._ends_before(is_wanted)
        for run in self.runs():
            for depth in run.depths[::-1]:
                if self._goes(run.points[depth], ends, is_wanted):
                    self.drop_point(run.points[depth])
        parents = []
        highest = {run: end for run, end in ends.items() if run.parent not in ends}
        for run, end in highest.items():
            if end > run.start:
                split(run, end)
            assert run.parent is not None
            parents.append(run.parent)
            self._remove(run)
        for parent in parents:  # a merge before would have joined what stays to what goes
            self.became_leaf(parent)
            merge(parent, self.hybrid)

    def _ends_before(self, is_wanted: npt.NDArray[np.bool_]) -> dict[Run, int]:
        """Runs that cannot stay whole without the pages that are wanted, parents first, and the
        boundary up to which they can."""
        ends: dict[Run, int] = {}
        for run in self.runs():
            if run.parent in ends:
                ends[run] = run.start
            elif not run.locks:
                wanted = np.flatnonzero(is_wanted[run.pages].any(axis=1))
                if wanted.size:
                    ends[run] = run.start + int(wanted[0])
        return ends

    @staticmethod
    def _goes(
        entry: Run | ResumePoint, ends: dict[Run, int], is_wanted: npt.NDArray[np.bool_]
    ) -> bool:
        """Whether `entry` goes with the pages that are wanted; `ends` from `_ends_before`."""
        run = entry
        if isinstance(entry, ResumePoint):
            if is_wanted[entry.pages].any():
                return True
            assert entry.run is not None
            run = entry.run
        assert isinstance(run, Run)
        return entry.depth > ends.get(run, entry.depth)

    def _remove(self, run: Run) -> None:
        """Evict `run` and all runs below it, none of which has a lock, a pin or a resume point.
        The caller treats the parent."""
        assert run.parent is not None
        del run.parent.children[run.segment_key(0)]
        runs = [run]
        for node in runs:  # which grows
            runs.extend(node.children.values())
        for node in reversed(runs):
            self.withdraw(node)
            self.pool.put(node.pages.ravel())
            if self.announcer is not None:
                self.announcer.segments_removed(bytes(node.keys))
            self.num_segments -= node.length
            self.num_evicted_segments += node.length
            node.parent, node.length, node.children = None, 0, {}

    def drop_point(self, point: ResumePoint) -> None:
        """Evict one resume point."""
        self.pool.unhold(self._forget(point))

    def _forget(self, point: ResumePoint) -> Int32:
        """Take a point out; the caller calls `pool.unhold` of the pages, which this returns."""
        if point in self.pins:
            self.unpin(point)
        run = point.run
        assert run is not None
        self.withdraw(point)
        if self.announcer is not None:
            self.announcer.point_removed(point.key, point.depth)
        del run.points[point.depth]
        del run.depths[bisect_left(run.depths, point.depth)]
        point.run = None
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
            self.became_leaf(parent)
            merge(parent, self.hybrid)
            return
        run.cut(keep)
        self.became_leaf(run)
