"""Hand a computed prefix from one cache to another, in two processes perhaps.

The pages go through whatever the two engines have between them; here is what each cache keeps
meanwhile, and how it becomes a hit:

    sender      outgoing(kv, match)     keys and pages of dense segments and of one resume point,
                                        which stay as they are until `Outgoing.end`
    receiver    incoming(kv, match, n)  free pages for what it lacks of the first n tokens
                Incoming.adopt          they are cached now, all of them; before that, nothing is

Both ends make keys of the prompt's tokens (`prefix.keys`), so keys agree where hash seeds, salts
and groups do, and a receiver looks for the keys of its own prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .arrays import NO_VALUES, Int32
from .plan import OutOfPages
from .prefix.holdings import Holding
from .prefix.keys import KEY_BYTES, Prompt
from .prefix.lookup import Match
from .spec import Layout, as_int

if TYPE_CHECKING:
    from .cache import KVCache


class HandOff:
    """What a cache keeps of a prefix that is handed off.

    Attributes:
        num_tokens: of the prefix, a multiple of the alignment.
        keys: of its segments, 32 bytes each.
        first: number of the first segment that is handed off.
        segments: [n, pages_per_segment] int32 pages of segments [first, first + n).
        point: [pages_per_point] int32 pages of the resume point at the end (0: none in that
            column); None where the groups need none, or the receiver has one.
        is_open: `end` has not been called.
        is_void: the cache was cleared meanwhile, or these pages turned out wrong: a sender is not
            to use what it read of them, and a receiver adopts nothing.
    """

    num_tokens: int
    keys: bytes
    first: int
    segments: Int32
    point: Int32 | None

    def __init__(self, kv: KVCache, holding: Holding) -> None:
        self._kv, self._holding = kv, holding
        self.is_open, self.is_void = True, False
        kv.handoffs[self] = None

    @property
    def pages(self) -> Int32:
        """[m] int32 of all segments, and then of the resume point."""
        point = NO_VALUES if self.point is None else self.point[self.point != 0]
        return np.concatenate([self.segments.ravel(), point])

    def end(self) -> None:
        """Let go of the pages; those of a receiver that were not adopted are free again. A second
        call does nothing."""
        if self.is_open:
            self._kv._steps.planned = None  # the stack of free pages may change
            self.is_open = False
            del self._kv.handoffs[self]
            self._holding.end()

    def void(self, is_wanted: npt.NDArray[np.bool_] | None = None) -> None:
        """What was cached is forgotten. (`KVCache.clear` and `evict_pages` call this.)

        Args:
            is_wanted: [num_pages]: of these pages only; None: of all.
        """
        raise NotImplementedError


class Outgoing(HandOff):
    """A prefix that leaves, from `outgoing`: its pages are not evicted, nor written, until `end`."""

    def void(self, is_wanted: npt.NDArray[np.bool_] | None = None) -> None:
        """As of `HandOff`."""
        if is_wanted is None or is_wanted[self.pages].any():
            self.is_void = True
            self._holding.detach()


class Incoming(HandOff):
    """A prefix that comes, from `incoming`: `segments` and `point` are pages to fill, which nobody
    else has, and the chain before them stays."""

    def __init__(self, kv: KVCache, holding: Holding, prompt: Prompt) -> None:
        super().__init__(kv, holding)
        self._prompt = prompt

    def adopt(self) -> bool:
        """All pages are filled: the prefix is cached now, and the next `KVCache.match` finds it.

        Returns:
            False, and nothing changed but that it ended, where it `is_void`.

        Raises:
            ValueError: it has ended.
        """
        if not self.is_open:
            raise ValueError("adopt: expected one that is open, got one that has ended")
        kv = self._kv
        if not self.is_void:
            kv._steps.changed()
            self._holding.taken = NO_VALUES
            noted = None
            if kv._announcer is not None:
                last = self.first + len(self.segments)
                noted = kv._announcer.of_prompt(self._prompt, self.first, last)
            points = [] if self.point is None else [self.point]
            depths = [self.first + len(self.segments)] * len(points)
            pages = np.array(points, dtype=np.int32)
            self._holding.adopt(self.keys, self.first, self.segments, depths, pages, noted)
        self.end()
        return not self.is_void

    def void(self, is_wanted: npt.NDArray[np.bool_] | None = None) -> None:
        """As of `HandOff`. Its own pages hold nothing of this cache's."""
        if is_wanted is None:
            self.is_void = True
            self._holding.detach()


def outgoing(kv: KVCache, match: Match, *, skip_tokens: int = 0) -> Outgoing | None:
    """What is cached of a prompt, to be handed off: dense segments and one resume point.

    Args:
        kv: the sender's cache, between steps.
        match: from `KVCache.match`; looked up again.
        skip_tokens: whose dense segments the receiver has, a multiple of the alignment.

    Returns:
        None where nothing is cached.

    Raises:
        ValueError: `match` is none of this cache's, or skip_tokens is out of range.
    """
    match, run = kv._lookup.again(match)
    skip = _segments(kv, "skip_tokens", skip_tokens)
    depth = match.num_tokens // kv.alignment
    if not depth:
        return None
    index, point = kv.index, None
    kv._steps.changed()
    run = index.end_at(run, depth)
    if index.hybrid:
        there = index.point_at(run)
        assert there is not None
        point = there.pages.copy()
    made = Outgoing(kv, Holding(index, run, NO_VALUES if point is None else point))
    made.num_tokens, made.first = match.num_tokens, min(skip, depth)
    made.keys = match.prompt.keys[: depth * KEY_BYTES]
    made.segments, made.point = index.pages_between(run, made.first, depth), point
    return made


def incoming(kv: KVCache, match: Match, num_tokens: int) -> Incoming | OutOfPages | None:
    """Pages for what is to come of a prompt, reserved as a step's are: cached entries are evicted
    for them where no others are free.

    Args:
        kv: the receiver's cache, between steps.
        match: from `KVCache.match`; looked up again.
        num_tokens: of the prefix that comes, a multiple of the alignment.

    Returns:
        OutOfPages, and nothing changed; None where all of it is there.

    Raises:
        ValueError: `match` is none of this cache's, num_tokens is out of range, or the cache keeps
            nothing. Other errors: those of the eviction policy.
    """
    match, run = kv._lookup.again(match)
    depth, prompt, index = _segments(kv, "num_tokens", num_tokens), match.prompt, kv.index
    if not 0 < depth <= prompt.num_segments:
        most = prompt.num_segments * kv.alignment
        raise ValueError(f"num_tokens: expected 1..{most} of this prompt, got {num_tokens}")
    if not kv.enable_caching:
        raise ValueError("kv: expected a cache with enable_caching, got one without")
    run, first = index.find(prompt.keys, depth)
    has_point = not index.hybrid or (first == depth and index.resumable(run, depth, depth) == depth)
    if first == depth and has_point:
        return None
    kv._steps.changed()
    columns = np.zeros(kv.layout.pages_per_point, np.bool_)
    if not has_point:
        columns = columns_of_point(kv.layout, num_tokens)
    width, n = kv.layout.pages_per_segment, depth - first
    holding = Holding(index, index.end_at(run, first) if first else index.root)
    taken = _take(kv, holding, n * width, columns)
    if isinstance(taken, OutOfPages):
        return taken
    made = Incoming(kv, holding, prompt)
    made.num_tokens, made.first, made.keys = num_tokens, first, prompt.keys[: depth * KEY_BYTES]
    made.segments, made.point = taken[: n * width].reshape(n, width), None
    if not has_point:
        made.point = np.zeros(len(columns), dtype=np.int32)
        made.point[columns] = taken[n * width :]
    return made


def columns_of_point(layout: Layout, num_tokens: int) -> npt.NDArray[np.bool_]:
    """[pages_per_point] in which columns a resume point at boundary `num_tokens` has a page: blocks
    before the start of the sequence have none."""
    parts = [
        np.tile(num_tokens // c.block_size - np.arange(c.tail, 0, -1) >= 0, c.num_tables)
        for c in layout.classes
    ]
    return np.concatenate(parts)


def _segments(kv: KVCache, name: str, num_tokens: int) -> int:
    tokens = as_int(name, num_tokens, 0)
    if tokens % kv.alignment:
        raise ValueError(f"{name}: expected a multiple of {kv.alignment}, got {tokens}")
    return tokens // kv.alignment


def _take(
    kv: KVCache, holding: Holding, dense: int, columns: npt.NDArray[np.bool_]
) -> Int32 | OutOfPages:
    """Take `dense` pages and one for each of `columns`; where there is no room, and where the
    policy raises, the holding ends."""
    needed = dense + int(columns.sum())
    lacks = needed - kv.pool.num_available
    try:
        if lacks <= kv.index.num_evictable:
            if lacks > 0:
                kv.index.evict(lacks)
            return holding.take(needed)
        found = OutOfPages(
            needed, kv.pool.num_available, kv.index.num_evictable, *_per_group(kv, dense, columns)
        )
    except BaseException:
        holding.end()
        raise
    holding.end()
    return found


def _per_group(
    kv: KVCache, dense: int, columns: npt.NDArray[np.bool_]
) -> tuple[str, dict[str, int]]:
    """The group that needs most pages, and the pages of each."""
    layout = kv.layout
    counts = {g.name: 0 for g in layout.groups}
    for c in layout.classes:
        tail = columns[c.tail_offset :][: c.num_tables * c.tail].reshape(c.num_tables, c.tail)
        for table, held in zip(c.tables.tolist(), tail.sum(axis=1).tolist(), strict=True):
            per_segment = c.per_segment if c.spec.kind == "dense" else 0
            n = dense // max(1, layout.pages_per_segment) * per_segment
            counts[layout.groups[layout.tables[table][0]].name] += n + held
    return max(counts, key=lambda name: counts[name]), counts
