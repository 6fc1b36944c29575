"""The prefix index: a radix tree of dense segments, and resume points at boundaries.

A `Run` is a stretch of segments that were cached one after another, with their keys and pages in
arrays. Keys are chained, so a prompt that matches segment i matches all before it: a look-up is a
binary search per run. A resume point belongs to the segment that ends at its boundary and holds the
window pages needed to resume there; it is looked up, used and evicted whole.

Order of eviction: dense segments past the last resume point of their chain (they can serve no hit),
then resume points by the policy's rank. In models without window groups each chain's end is itself
the entry that the policy ranks. A parent is never evicted before its children, and segments
on the path of a running request are locked.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterator

import numpy as np

from .eviction import EvictionPolicy
from .hashing import KEY_BYTES
from .pages import PagePool
from .spec import Int32


class ResumePoint:
    """Window pages that make one boundary resumable."""

    __slots__ = ("depth", "last_used", "num_uses", "pages", "run", "ticket")

    def __init__(self, run: Run, depth: int, pages: Int32, tick: int) -> None:
        self.run: Run | None = run  # None once evicted
        self.depth = depth
        self.pages = pages
        self.last_used = tick
        self.num_uses = 0
        self.ticket = -1


class Run:
    """Segments [start, start + length) of one chain.

    Attributes:
        keys: length * 32 bytes.
        locks: running requests whose prefix ends in this run or below it.
        depths: sorted boundaries (in segments, absolute) that have a resume point here.
    """

    __slots__ = (
        "_pages", "children", "depths", "keys", "last_used", "length", "locks", "num_uses", "parent",
        "points", "start", "ticket",
    )  # fmt: skip

    def __init__(self, parent: Run | None, start: int, keys: bytes, pages: Int32) -> None:
        self.parent = parent  # None for the root, and once evicted
        self.start = start
        self.keys = bytearray(keys)
        self.length = len(keys) // KEY_BYTES
        self._pages = pages  # capacity grows by doubling; rows past `length` are spare
        self.children: dict[bytes, Run] = {}
        self.points: dict[int, ResumePoint] = {}
        self.depths: list[int] = []
        self.locks = 0
        self.last_used = 0
        self.num_uses = 0
        self.ticket = -1

    @property
    def depth(self) -> int:
        """Boundary at the end of this run, in segments."""
        return self.start + self.length

    @property
    def pages(self) -> Int32:
        """[length, pages_per_segment] int32."""
        return self._pages[: self.length]

    def key(self, i: int) -> bytes:
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

    def extend(self, keys: bytes, pages: Int32) -> None:
        """Append segments."""
        n = self.length + len(keys) // KEY_BYTES
        if n > len(self._pages):
            grown = np.empty((max(n, 2 * len(self._pages)), pages.shape[1]), dtype=np.int32)
            grown[: self.length] = self.pages
            self._pages = grown
        self._pages[self.length : n] = pages
        self.keys += keys
        self.length = n

    def useless(self, hybrid: bool) -> int:
        """Segments at the end of this leaf past its last resume point."""
        if not hybrid:
            return 0
        return self.depth - max(self.start, self.depths[-1] if self.depths else 0)


class PrefixIndex:
    """Cached segments and resume points of one pool.

    Args:
        pool: where evicted pages go.
        pages_per_segment: dense pages of one segment, all groups.
        hybrid: there are window groups, so a hit needs a resume point.
        policy: ranks entries for eviction.
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
        self.root = Run(None, 0, b"", np.empty((0, pages_per_segment), dtype=np.int32))
        self.root.locks = 1
        self._useless: list[Run] = []
        self._heap: list[tuple[float, int, int, Run | ResumePoint]] = []
        self._ticket = 0

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
        if not self.hybrid:
            return limit
        node: Run | None = run
        while node is not None:
            i = bisect_right(node.depths, limit)
            if i:
                return node.depths[i - 1]
            node = node.parent
        return 0

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
            if node.locks == 0:
                self.num_locked_segments += node.length
            node.locks += 1

    def unlock(self, run: Run) -> None:
        """Undo one `lock(run)`; the path counts as used now."""
        for node in self.path(run):
            node.locks -= 1
            node.last_used = self.tick
            if node.locks == 0:
                self.num_locked_segments -= node.length
        self._became_leaf(run)

    # Growth.

    def insert(self, run: Run, keys: bytes, pages: Int32) -> tuple[Run, int]:
        """Cache segments after the end of `run`, which the caller has locked once.

        Where a segment is cached already, the cached pages stay and the caller's are not taken.

        Args:
            run: ends where the new segments start.
            keys: n * 32 bytes.
            pages: [n, pages_per_segment] int32.

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
            if child.locks == 0:
                self.num_locked_segments += child.length
            child.locks += 1
            known += common
            run = child
        if known == n:
            return run, known
        keys, pages = keys[known * KEY_BYTES :], pages[known:]
        self.num_segments += n - known
        self.num_locked_segments += n - known
        if run.locks == 1 and not run.children and run is not self.root:
            run.extend(keys, pages)
        else:
            child = Run(run, run.depth, keys, pages.copy())
            child.locks = 1
            run.children[child.key(0)] = child
            run = child
        run.last_used = self.tick
        return run, known

    def append(self, run: Run, key: bytes, pages: Int32) -> tuple[Run, int]:
        """`insert` of one segment, quick where `run` is a leaf of one request."""
        if run.locks != 1 or run.children or run is self.root or run.length == len(run._pages):
            return self.insert(run, key, pages[None])
        run._pages[run.length] = pages
        run.keys += key
        run.length += 1
        run.last_used = self.tick
        self.num_segments += 1
        self.num_locked_segments += 1
        return run, 0

    def add_point(self, run: Run, depth: int, pages: Int32) -> bool:
        """Keep a resume point at boundary `depth` on the path to `run`; False if one is there."""
        while run.start >= depth:
            assert run.parent is not None
            run = run.parent
        point = run.points.get(depth)
        if point is not None:
            self._rank(point)
            return False
        point = run.points[depth] = ResumePoint(run, depth, pages, self.tick)
        insort(run.depths, depth)
        self.pool.hold(pages)
        self.num_points += 1
        self._rank(point)
        return True

    def use(self, run: Run) -> ResumePoint | None:
        """A hit ends at the end of `run`: count the use; returns the resume point there, if any."""
        entry: Run | ResumePoint | None = run.points.get(run.depth) if self.hybrid else run
        if entry is None:
            return None
        entry.num_uses += 1
        self._rank(entry)
        return entry if isinstance(entry, ResumePoint) else None

    # Eviction.

    def evict(self, num_pages: int) -> None:
        """Free at least `num_pages` pages; the caller checked that `num_evictable` allows it."""
        target = self.pool.num_free + num_pages
        while self.pool.num_free < target:
            if self._useless:
                self._trim_useless(self._useless.pop(), target - self.pool.num_free)
                continue
            entry = self._pop()
            if isinstance(entry, ResumePoint):
                self._drop_point(entry)
            else:
                self._trim(entry, min(entry.length, self._segments(target - self.pool.num_free)))

    def _segments(self, num_pages: int) -> int:
        return -(-num_pages // max(1, self.pages_per_segment))

    def _pop(self) -> Run | ResumePoint:
        while True:
            _, _, ticket, entry = heapq.heappop(self._heap)
            if entry.ticket != ticket:
                continue  # a newer record of this entry is in the heap, or it is gone
            entry.ticket = -1
            if isinstance(entry, ResumePoint) or (not entry.locks and not entry.children):
                return entry

    def _rank(self, entry: Run | ResumePoint) -> None:
        """(Re)file `entry` in the heap with a fresh rank."""
        entry.last_used = self.tick
        self._file(entry)

    def _file(self, entry: Run | ResumePoint) -> None:
        self._ticket += 1
        entry.ticket = self._ticket
        record = (self.policy.rank(entry), -entry.depth, entry.ticket, entry)
        heapq.heappush(self._heap, record)
        live = self.num_points if self.hybrid else self.num_segments
        if len(self._heap) > 4 * live + 1024:
            self._heap = [r for r in self._heap if r[3].ticket == r[2]]
            heapq.heapify(self._heap)

    def _drop_point(self, point: ResumePoint) -> None:
        run = point.run
        assert run is not None
        del run.points[point.depth]
        run.depths.remove(point.depth)
        point.run, point.ticket = None, -1
        self.pool.unhold(point.pages)
        self.num_points -= 1
        self.num_evicted_points += 1
        self._became_leaf(run)

    def _trim_useless(self, run: Run, num_pages: int) -> None:
        if run.parent is None or run.locks or run.children:
            return  # used again, or gone, since it was listed
        n = run.useless(self.hybrid)
        if n:
            self._trim(run, min(n, self._segments(num_pages)) if self.pages_per_segment else n)

    def _trim(self, run: Run, n: int) -> None:
        """Evict the last n segments of an unlocked leaf; no resume point is on them."""
        keep = run.length - n
        assert not run.depths or run.depths[-1] <= run.start + keep
        self.pool.put(run.pages[keep:].ravel())
        self.num_segments -= n
        self.num_evicted_segments += n
        parent = run.parent
        assert parent is not None
        if keep == 0:
            del parent.children[run.key(0)]
            run.parent, run.ticket, run.length = None, -1, 0
            self._became_leaf(parent)
            return
        del run.keys[keep * KEY_BYTES :]
        run.length = keep
        self._became_leaf(run)

    def _became_leaf(self, run: Run) -> None:
        """File `run` for eviction if it is an unlocked leaf now."""
        if run.locks or run.children or run.parent is None:
            return
        if not self.hybrid:
            self._file(run)
        elif run.useless(True):
            self._useless.append(run)

    def _split(self, run: Run, depth: int) -> Run:
        """Cut `run` at boundary `depth`; returns the upper part. `run` itself stays the lower part."""
        k = depth - run.start
        assert 0 < k < run.length and run.parent is not None
        upper = Run(run.parent, run.start, bytes(run.keys[: k * KEY_BYTES]), run.pages[:k].copy())
        upper.locks, upper.last_used, upper.num_uses = run.locks, run.last_used, run.num_uses
        run.parent.children[upper.key(0)] = upper
        run.parent, run.start = upper, depth
        del run.keys[: k * KEY_BYTES]
        run._pages = run.pages[k:].copy()
        run.length -= k
        upper.children[run.key(0)] = run
        cut = bisect_right(run.depths, depth)
        upper.depths, run.depths = run.depths[:cut], run.depths[cut:]
        for d in upper.depths:
            point = upper.points[d] = run.points.pop(d)
            point.run = upper
        return upper

    # Inspection.

    def runs(self) -> Iterator[Run]:
        """Every run but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())
