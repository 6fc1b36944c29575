"""Places where pages are: the device's pool and the host behind it, each with an index."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..announcer import Announcer
from ..arrays import Flags, Int32, Int64, count_true
from ..attachments import check_policy
from ..pages import PagePool
from ..policies.base import EvictionPolicy
from ..prefix.holdings import Holding
from ..prefix.index import PrefixIndex
from ..prefix.tree import ResumePoint, Run, point_before, run_of
from ..spec import Layout, as_int
from .rates import Rate

DEVICE, HOST = 0, 1  # places, where a number names them
MOST_PAGES = 2**31 - 1  # of the host: ids are int32


@dataclass(frozen=True)
class TierSpec:
    """The host memory behind the pool.

    Args:
        num_pages: pages of its own (see `Tiers`) that it has room for, page 0 (never used)
            included.
        bytes_per_second: of its link: how quickly pages come from it. `Tiers.done` measures it.
        policy: eviction policy, of this tier alone; nothing calls its `asked`. None: where the
            cache has `Adaptive`, one that learns with it and ranks entries by the seconds saved for
            each byte; else `LRU`.
        lossy: whether the engine keeps pages in a form that does not come back bit for bit, such as
            e4m3. Hits on what came from here say so (`Match.lossy_tokens`).

    Raises:
        ValueError: a field is out of range.
    """

    num_pages: int
    bytes_per_second: float
    policy: EvictionPolicy | None = None
    lossy: bool = False

    def __post_init__(self) -> None:
        as_int("num_pages", self.num_pages, 2, MOST_PAGES)
        as_rate("bytes_per_second", self.bytes_per_second)
        if not isinstance(self.lossy, bool):
            raise ValueError(f"lossy: expected True or False, got {self.lossy!r}")
        if self.policy is not None:
            check_policy(self.policy)


def as_rate(name: str, value: float) -> float:
    """`value` as a rate, in something a second.

    Raises:
        ValueError: it is no number above 0.
    """
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    )
    if not number or not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
    return float(value)


class Place:
    """A pool of pages and what is cached in it.

    Args:
        index: of its pages.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index

    @property
    def num_free(self) -> int:
        """Pages that nobody has and no step has reserved."""
        return self.index.pool.num_free

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free; False, and nothing changed, where that is not
        enough."""
        lacks = num_pages - self.num_free
        if lacks <= 0:
            return True
        if lacks > self.index.num_evictable:
            return False
        self.index.evict(lacks)
        return True

    def drop(self, pages: Int32) -> None:
        """Evict what holds `pages`, and what is found only through it; what is locked stays."""
        is_wanted = np.zeros(self.index.pool.num_pages, dtype=np.bool_)
        is_wanted[pages] = True
        is_wanted[0] = False
        if is_wanted.any():
            self.index.drop_pages(is_wanted)


class Tier(Place):
    """The host, its link and its counters.

    Args:
        spec: as it was asked for.
        policy: of its index.
        layout: of its pages. span: of the device's index.
        announcer: writes events; None if nobody listens.

    Attributes:
        rate: bytes a second of its link, as measured.
        lossy: as of `TierSpec`.
        queued_bytes: of loads that are not done.
        counters: since the start; see `Tiers.stats`.
    """

    def __init__(
        self,
        spec: TierSpec,
        policy: EvictionPolicy,
        layout: Layout,
        span: int,
        announcer: Announcer | None,
    ) -> None:
        pool = PagePool(spec.num_pages)
        index = PrefixIndex(
            pool, layout.pages_per_segment, layout.hybrid, policy, span, layout.tail_between
        )
        super().__init__(index)
        if spec.lossy and not layout.pages_per_segment:
            raise ValueError("lossy: expected a cache with a dense group, whose segments say so")
        self.rate, self.lossy = Rate(float(spec.bytes_per_second), memory=0.9), spec.lossy
        self.queued_bytes = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        index.announcer = announcer

    @property
    def bytes_per_second(self) -> float:
        """Of its link, as measured."""
        return self.rate.value

    def load_seconds(self, num_bytes: int) -> float:
        """Seconds until so many bytes have come, after all that is queued."""
        return (self.queued_bytes + num_bytes) / self.bytes_per_second if num_bytes else 0.0


COUNTERS = (
    "stored_pages", "stored_points", "stored_segments", "store_failures", "loaded_pages",
    "loaded_points", "loaded_segments", "load_failures", "refused_stores",
)  # fmt: skip


@dataclass(slots=True)
class Found:
    """Where the chain of a prompt ends in a place.

    Attributes:
        run: in which it ends, after `depth` segments.
    """

    place: Place
    run: Run
    depth: int

    def point(self, depth: int) -> ResumePoint | None:
        """The resume point at boundary `depth` here."""
        return run_of(self.run, depth).points.get(depth) if 0 < depth <= self.depth else None

    def before(self, depth: int) -> ResumePoint | None:
        """The last resume point before boundary `depth` of the chain here."""
        depth = min(depth, self.depth + 1)
        return point_before(run_of(self.run, depth - 1), depth) if depth > 1 else None

    def hold(self, depth: int, used: Int32) -> Holding:
        """Keep the chain up to boundary `depth`, and the pages `used`."""
        index = self.place.index
        run = index.end_at(self.run, depth) if depth else index.root
        return Holding(index, run, used)


class Columns:
    """Where the columns of an entry's pages come from.

    Attributes:
        groups, parts: [n] group of each column of the host, and which part of a page of the pool it
            is.
        pages: [n] column of that page in the pool.
        num_pages: columns there.
        is_whole: whether a page of the pool is one page of the host.
        slices: the columns of each group.
    """

    def __init__(self, n: int, num_pages: int) -> None:
        self.num_pages, self.is_whole = num_pages, n == num_pages
        self.groups: Int64 = np.zeros(n, dtype=np.int64)
        self.pages: Int64 = np.zeros(n, dtype=np.int64)
        self.parts: Int32 = np.zeros(n, dtype=np.int32)
        self.slices: list[tuple[int, slice]] = []
        self._repeated: Int32 = np.empty((0, n), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.pages)

    def fill(self, first: int, rows: Int64, first_page: int, width: int) -> None:
        """Set those of a class.

        Args:
            first, first_page: where its columns begin, here and in the pool.
            rows: [3, num_tables] group and part of each table, and number of that of the pool.
            width: columns of each table.
        """
        groups, parts, tables = rows.repeat(width, axis=1)
        mine = slice(first, first + len(groups))
        self.groups[mine], self.parts[mine] = groups, parts
        cuts = np.flatnonzero(np.diff(groups, prepend=-1, append=-1)).tolist()
        for i, end in pairwise(cuts):
            self.slices.append((int(groups[i]), slice(first + i, first + end)))
        within = np.tile(np.arange(width), rows.shape[1])
        self.pages[mine] = first_page + tables * width + within

    def of(self, place: Place, pages: Int32) -> Int32:
        """Pages [..., columns there] of an entry of a place as those of the host: a page of the pool
        is repeated for each of its parts."""
        if self.is_whole or isinstance(place, Tier):
            return pages
        return pages.take(self.pages, axis=-1)

    def parts_of(self, mine: slice, n: int, some: Flags | None) -> Int32:
        """`parts` of columns `mine` of n entries, row after row, or those of `some` [n, columns]
        alone."""
        if n > len(self._repeated):
            self._repeated = self.parts[None].repeat(2 * n, axis=0)
        if self.is_whole:  # all of them are 0
            size = n * (mine.stop - mine.start) if some is None else count_true(some)
            return self._repeated.ravel()[:size]
        rows = self._repeated[:n, mine]
        return rows.ravel() if some is None else rows[some]


class Tails:
    """Columns of resume points and segments: whose they are, and which of them points share.

    Args:
        pool: layout of the device's pool.
        layout: of the host, where a page of the pool is one page or several.

    Attributes:
        segments, points: columns of a segment's pages, and of a resume point's.
        back: [columns of a point] segments between the block's own and the boundary.
        longest: segments that the blocks of a point may be in.
    """

    def __init__(self, pool: Layout, layout: Layout) -> None:
        self.layout = layout
        self.segments = Columns(layout.pages_per_segment, pool.pages_per_segment)
        self.points = Columns(layout.pages_per_point, pool.pages_per_point)
        for c, there in zip(layout.classes, pool.classes, strict=True):
            tables = there.tables.tolist()
            rows = []
            for t in c.tables.tolist():
                group, page = layout.tables[t]
                parts = layout.groups[group].pages_per_block // pool.groups[group].pages_per_block
                rows.append((group, page % parts, tables.index(pool.table(group, page // parts))))
            of_tables = np.array(rows, dtype=np.int64).T
            if c.spec.kind == "dense":
                self.segments.fill(c.segment_offset, of_tables, there.segment_offset, c.per_segment)
            self.points.fill(c.tail_offset, of_tables, there.tail_offset, c.tail)
        self._shared: dict[int, tuple[Int64, Int64]] = {}
        self.longest = max([-(-c.tail // c.per_segment) for c in layout.classes], default=0)
        self.back: Int64 = np.zeros(layout.pages_per_point, dtype=np.int64)
        for c in layout.classes:
            mine = slice(c.tail_offset, c.tail_offset + c.num_tables * c.tail)
            blocks = np.tile(np.arange(c.tail)[::-1], c.num_tables)  # after each
            self.back[mine] = blocks // c.per_segment

    def count(self, index: PrefixIndex) -> list[int]:
        """Pages of each group that the entries in the `index` of the host have, each once."""
        num_groups = len(self.layout.groups)
        counts = np.bincount(self.segments.groups, minlength=num_groups) * index.num_segments
        group_of = np.full(index.pool.num_pages, num_groups, dtype=np.int64)
        for run in index.runs():
            for point in run.points.values():
                group_of[point.pages] = self.points.groups
        group_of[0] = num_groups
        counts += np.bincount(group_of, minlength=num_groups + 1)[:num_groups]
        return [int(n) for n in counts]

    def shared(self, gap: int) -> tuple[Int64, Int64]:
        """Columns of a point whose blocks a point `gap` segments before it holds too, and the
        columns that these have there."""
        found = self._shared.get(gap)
        if found is None:
            later, earlier = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            for c in self.layout.classes:
                n = max(0, c.tail - gap * c.per_segment)
                first = c.tail_offset + c.tail * np.arange(c.num_tables)[:, None]
                later.append((first + np.arange(n)).ravel())
                earlier.append((first + np.arange(c.tail - n, c.tail)).ravel())
            found = np.concatenate(later), np.concatenate(earlier)
            if len(self._shared) < 4096:
                self._shared[gap] = found
        return found
