"""`AppendOnlyCache`: pages for engines that schedule request by request and keep their own tables.

Such an engine (vLLM is one) asks for pages before it knows what a step computes, takes back how far
a request is while its pages stay where they are, writes rows to pages before attention reads them,
and appends pages to tables that workers keep. So the three things that a step of `KVCache` does at
once are three calls on one request here, in any order and number:

    reserve    pages for the blocks up to a token; they stay with the request until it ends
    let_go     blocks that no query from a token on sees leave the tables of windows
    publish    segments whose tokens are known become findable, and boundaries that are kept
               resumable; others of the same step may hit them, as rows are written first

Keys of segments are the engine's. What is cached, how it is found and what is evicted is as in
`KVCache` (see `prefix.index`, `policies`). A request that computes what somebody else has cached
meanwhile keeps its own pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from .arrays import Int32
from .attachments import attach, check_policy
from .pages import PagePool
from .plan import OutOfPages
from .policies.adaptive import Adaptive
from .policies.base import EvictionPolicy
from .policies.retention import Retention, kept_of_one, parse_retention, replay_boundaries
from .prefix.index import PrefixIndex
from .prefix.keys import KEY_BYTES
from .prefix.tree import Run, path_to
from .spec import GroupSpec, Layout, as_int


class RequestTables:
    """The tables of one request.

    Attributes:
        tables: of each group, the pages of its blocks in their order; 0 where they have left the
            window.
        num_gone: of each group, the leading blocks without a page.
        cached: tokens whose segments are findable, its own pages or others'.
        room: tokens that have pages in all groups.
    """

    __slots__ = ("cached", "keep", "num_gone", "room", "run", "tables", "twins")

    def __init__(self, num_groups: int, run: Run) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_gone = [0] * num_groups
        self.cached = self.room = 0
        self.run = run
        self.keep: tuple[int, ...] = ()
        self.twins: list[Int32] = []


class AppendOnlyCache:
    """Allocator of one page pool for dense and window groups, whose tables only grow.

    Args:
        groups: dense and window groups, one page a block.
        num_pages: pages of the pool, page 0 (never handed out) included.
        max_model_len: longest sequence, tokens.
        retention, policy, enable_caching: as of `KVCache`.

    Attributes:
        layout, alignment: the groups; tokens of a segment: hits are multiples of it.
        pool, index: the pages, and what is cached.
        requests: that run.

    One call at a time: it has no lock.

    Raises:
        ValueError: an argument is out of range, or a group is of another kind.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        num_pages: int,
        max_model_len: int,
        retention: Retention = "auto",
        policy: EvictionPolicy | None = None,
        enable_caching: bool = True,
    ) -> None:
        num_pages = as_int("num_pages", num_pages, 2, 2**31 - 1)
        self.max_model_len = as_int("max_model_len", max_model_len, 1)
        self.layout = layout = Layout(groups, self.max_model_len, 0, True)
        for g in layout.groups:
            if g.kind == "state" or g.pages_per_block > 1 or g.lookahead:
                raise ValueError(
                    "groups: expected dense and window groups with a page a block and no "
                    f"lookahead, got {g}"
                )
        policy = Adaptive() if policy is None else policy
        check_policy(policy)
        self.alignment, self.enable_caching = layout.alignment, enable_caching
        span = layout.span(exact=False)
        self.interval = parse_retention(retention, layout, span)
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(
            self.pool, layout.pages_per_segment, layout.hybrid, policy, span, layout.tail_between
        )
        attach(policy)
        self.requests: dict[RequestTables, None] = {}
        self._sizes = [g.block_size for g in layout.groups]
        self._each = list(enumerate(self._sizes))
        self._dense = [
            (t, c.per_segment, c.segment_offset + i * c.per_segment)
            for c in layout.classes
            for i, t in enumerate(c.tables.tolist())
            if c.spec.kind == "dense"
        ]
        # (group, block size, tokens before a query that it sees, blocks of a tail and their column)
        self._windows = [
            (t, c.block_size, c.reach, c.tail, c.tail_offset + i * c.tail)
            for c in layout.classes
            for i, t in enumerate(c.tables.tolist())
            if c.spec.kind == "window"
        ]

    # What can be read.

    @property
    def num_available(self) -> int:
        """Pages that are free, or that eviction could free."""
        return self.pool.num_free + self.index.num_evictable

    def find(self, keys: bytes, max_tokens: int) -> tuple[int, int]:
        """Longest cached prefix; changes nothing.

        Args:
            keys: 32 bytes for each whole segment of the prompt.
            max_tokens: no longer hit.

        Returns:
            (tokens that a request resumes after, tokens whose dense blocks are cached).
        """
        run, dense = self.index.find(keys, len(keys) // KEY_BYTES if self.enable_caching else 0)
        hit = self.index.resumable(run, dense, max_tokens // self.alignment)
        return hit * self.alignment, dense * self.alignment

    # A request.

    def admit(
        self, keys: bytes, num_tokens: int, max_tokens: int, end: int, least: int = 0
    ) -> RequestTables | OutOfPages:
        """Start a request: it gets the pages of the longest cached prefix, and those that `reserve`
        gives it.

        Args:
            keys, max_tokens: as of `find`.
            num_tokens: of its prompt.
            end, least: as of `reserve`.

        Returns:
            Its tables; ``cached`` tokens are valid. Or OutOfPages, and it has not started.
        """
        index, a = self.index, self.alignment
        index.tick += 1
        run, dense = index.find(keys, len(keys) // KEY_BYTES if self.enable_caching else 0)
        hit = index.resumable(run, dense, max_tokens // a)
        request = RequestTables(len(self._sizes), index.root)
        if self.layout.hybrid:
            request.keep = (*replay_boundaries(num_tokens, a), dense * a)
        self.requests[request] = None
        if hit:
            request.run = run = index.end_at(run, hit)
            request.cached = request.room = hit * a
            index.lock(run)
            self._load(request, run)
        lacks = self._lacks(self._counts(request, end), least)
        try:
            if lacks is None:
                index.policy.asked(keys, hit, [k // a for k in request.keep])
                if hit:
                    index.use(request.run)
                self.reserve(request, end)
        except BaseException:
            self.release(request, False)
            raise
        if lacks is not None:
            self.release(request, False)
            return lacks
        return request

    def _load(self, request: RequestTables, run: Run) -> None:
        """Give a request that starts the pages of the prefix that ends with `run`."""
        pages = self.index.pages_between(run, 0, run.depth)
        for group, per_segment, column in self._dense:
            of_group = pages[:, column : column + per_segment]
            request.tables[group] = of_group.ravel().tolist()
        if not self.layout.hybrid:
            return
        point = self.index.point_at(run)
        assert point is not None
        self.pool.use_held(point.pages)
        tail = point.pages.tolist()
        for group, size, _, blocks, column in self._windows:
            stop = run.depth * self.alignment // size
            gone = request.num_gone[group] = max(0, stop - blocks)
            live = tail[column + max(0, blocks - stop) : column + blocks]
            request.tables[group] = [0] * gone + live

    def reserve(
        self, request: RequestTables, end: int, least: int = 0
    ) -> list[list[int]] | OutOfPages:
        """Give a request pages for its blocks up to token `end`.

        When free pages run short, cached entries are evicted, and only if that is enough.

        Args:
            least: pages that must be free or evictable before, whatever this takes.

        Returns:
            The new pages of each group, to be appended to its table; or OutOfPages, and nothing has
            changed.
        """
        counts = self._counts(request, end)
        lacks = self._lacks(counts, least)
        if lacks is not None:
            return lacks
        needed, pool = sum(counts), self.pool
        if needed > pool.num_free:
            self.index.tick += 1
            self.index.evict(needed - pool.num_free)
        taken = pool.peek(needed)
        pool.take(needed)
        given, at, pages = [], 0, taken.tolist()
        for group, n in enumerate(counts):
            new = pages[at : at + n]
            request.tables[group] += new
            given.append(new)
            at += n
        if self._windows:
            windows = [page for group, *_ in self._windows for page in given[group]]
            pool.use_new(np.array(windows, dtype=np.int32))
        request.room = min(len(request.tables[group]) * size for group, size in self._each)
        return given

    def _counts(self, request: RequestTables, end: int) -> list[int]:
        """Blocks up to token `end` that each group lacks."""
        tables = request.tables
        return [max(0, -(-end // size) - len(tables[group])) for group, size in self._each]

    def _lacks(self, counts: list[int], least: int) -> OutOfPages | None:
        """What is missing for `counts` new blocks of each group, and `least` available pages."""
        least = max(least, sum(counts))
        if least <= self.pool.num_free or least <= self.num_available:
            return None
        names = [g.name for g in self.layout.groups]
        worst = names[counts.index(max(counts))]
        per_group = dict(zip(names, counts, strict=True))
        return OutOfPages(least, self.pool.num_free, self.index.num_evictable, worst, per_group)

    def let_go(self, request: RequestTables, start: int, keep_tail: bool = True) -> None:
        """Blocks of windows that no query at token `start` or later sees leave the tables.

        Args:
            keep_tail: but for those that a resume point at the last boundary needs, which the end
                of the request makes.
        """
        gone: list[int] = []
        for group, size, reach, tail, _ in self._windows:
            first, table = (start - reach) // size, request.tables[group]
            if keep_tail and self.enable_caching:
                first = min(first, request.cached // size - tail)
            old = request.num_gone[group]
            if first > old:
                first = min(first, len(table))
                gone += table[old:first]
                table[old:first] = [0] * (first - old)
                request.num_gone[group] = first
        if gone:
            self.pool.unuse(np.array(gone, dtype=np.int64))

    def publish(self, request: RequestTables, keys: bytes, first: int) -> None:
        """Segments of a request whose tokens are known become findable.

        Their rows are written by the time that anybody reads them.

        Args:
            keys: of its segments from segment `first` on.
            first: no later than the first that is not findable.
        """
        a, index = self.alignment, self.index
        begin = request.cached // a
        keys = keys[(begin - first) * KEY_BYTES :]
        end = begin + len(keys) // KEY_BYTES
        if end <= begin or not self.enable_caching:
            return
        source = partial(self._segment_pages, request)
        request.run, known = index.insert(request.run, keys, source)
        if known:
            request.twins.append(source(begin, begin + known).ravel())
        start, request.cached = request.cached, end * a
        if not self.layout.hybrid:
            return
        _, kept = kept_of_one(start, end * a, list(request.keep), self.interval)
        for boundary in kept.tolist():
            self._keep(request, boundary)

    def release(self, request: RequestTables, keep: bool = True) -> None:
        """End a request; what is cached of it stays findable.

        Args:
            keep: its last boundary becomes a resume point, if its pages are still there.
        """
        index, pool = self.index, self.pool
        index.tick += 1
        if keep and self.layout.hybrid and request.cached and not index.renew(request.run):
            self._keep(request, request.cached)
        index.unlock(request.run)
        for group, per_segment, _ in self._dense:
            own = request.tables[group][request.cached // self.alignment * per_segment :]
            pool.put(np.array(own, dtype=np.int64))
        for twins in request.twins:
            pool.put(twins)
        live = [p for group, *_ in self._windows for p in request.tables[group] if p]
        pool.unuse(np.array(live, dtype=np.int64))
        del self.requests[request]

    def clear(self) -> None:
        """Forget everything cached that no running request needs."""
        self.index.tick += 1
        self.index.clear()

    # What the index asks.

    def _segment_pages(self, request: RequestTables, first: int, end: int) -> Int32:
        pages = np.empty((end - first, self.layout.pages_per_segment), dtype=np.int32)
        for group, per_segment, column in self._dense:
            blocks = request.tables[group][first * per_segment : end * per_segment]
            pages[:, column : column + per_segment] = np.array(blocks).reshape(-1, per_segment)
        return pages

    def _keep(self, request: RequestTables, boundary: int) -> None:
        """Keep a resume point, if the pages before it are still there and nobody has kept one."""
        pages = np.zeros(self.layout.pages_per_point, dtype=np.int32)
        for group, size, _, tail, column in self._windows:
            stop = boundary // size
            low = max(0, stop - tail)
            if low < request.num_gone[group]:
                return
            pages[column + tail - (stop - low) : column + tail] = request.tables[group][low:stop]
        if self.index.add_point(request.run, boundary // self.alignment, pages):
            self.pool.hold(pages)

    # For tests.

    def check_invariants(self) -> None:
        """Recount pages, holders and locks from scratch.

        Raises:
            AssertionError: any count or owner is wrong.
        """
        pool, index = self.pool, self.index
        owned = np.bincount(pool.free_pages(), minlength=pool.num_pages)
        users = np.zeros(pool.num_pages, dtype=np.int64)
        holds = users.copy()
        locks: dict[int, int] = {}

        def count(where: np.ndarray, pages: Iterable[int]) -> None:
            np.add.at(where, np.fromiter(pages, np.int64), 1)

        for request in self.requests:
            assert request.run.depth * self.alignment == request.cached
            for node in path_to(request.run):
                locks[id(node)] = locks.get(id(node), 0) + 1
            for group, per_segment, _ in self._dense:
                count(
                    owned, request.tables[group][request.cached // self.alignment * per_segment :]
                )
            for twins in request.twins:
                count(owned, twins.tolist())
            for group, *_ in self._windows:
                count(users, [p for p in request.tables[group] if p])
                assert all(request.tables[group][request.num_gone[group] :])
        for run in index.runs():
            assert run.locks == locks.get(id(run), 0), "locks count the running requests below"
            count(owned, run.look().ravel().tolist())
            for point in run.points.values():
                count(holds, [p for p in point.pages.tolist() if p])
        owned += (users > 0) | (holds > 0)
        assert (owned[1:] == 1).all(), "a page is leaked, or has two owners"
        assert (users[1:] == pool.users[1:]).all() and (holds[1:] == pool.holds[1:]).all()
        assert np.count_nonzero((holds > 0) & (users == 0)) == pool.num_held_only
