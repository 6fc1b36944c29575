"""Jobs: pages that the engine is to copy between the device and the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..announcer import Noted
from ..arrays import NO_ROWS, NO_VALUES, Flags, Int32, Int64, as_ints, count_true
from ..prefix.holdings import Holding
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run
from .places import Columns

if TYPE_CHECKING:
    from .match import Way


@dataclass(eq=False, slots=True)
class Copies:
    """Pages of one group that a job copies.

    Attributes:
        group: index of the cache group.
        sources, targets: [n] int32 page ids; page ``sources[i]`` goes to ``targets[i]``.
        parts: [n] int32 part of the device's page that the host's page holds; 0 where both are
            equally large.
    """

    group: int
    sources: Int32
    targets: Int32
    parts: Int32

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, some: slice) -> Copies:
        """Some of them."""
        return Copies(self.group, self.sources[some], self.targets[some], self.parts[some])


@dataclass(eq=False, slots=True)
class Job:
    """Pages to copy. Tell `Tiers.done` when all of them are, or which of them could not be.

    Attributes:
        kind: ``"store"`` to the host, or ``"load"`` from it.
        copies: what to copy, group after group in the order of the groups: an engine that copies
            the pages of a group tensor by tensor may run layer 0 when its tensor's are there.
        num_pages, num_bytes: of all copies, in pages of the host.
        num_tokens: what a load will make a hit on the device, if nothing fails; of a store, tokens
            of the prefix that it makes findable there.
        is_open: neither done nor cancelled yet.
    """

    kind: Literal["store", "load"]
    copies: tuple[Copies, ...]
    num_pages: int
    num_bytes: int
    num_tokens: int
    is_open: bool = True
    parts: JobParts = field(repr=False, kw_only=True)

    def failed_pages(self, failed: Any) -> Int64:
        """`failed` as target pages.

        Raises:
            ValueError: some are no targets of the job.
        """
        pages = as_ints("failed", failed)
        if not pages.size:
            return NO_ROWS
        others = np.setdiff1d(pages, self.parts.holding.taken)
        if len(others):
            raise ValueError(
                f"failed: expected pages that are targets of the job, got {others.tolist()}"
            )
        return pages

    def sources_of(self, targets: Int64) -> Int32:
        """Source pages of the copies to `targets`."""
        found = [c.sources[np.isin(c.targets, targets)] for c in self.copies]
        return np.concatenate([NO_VALUES, *found])

    def cut(self, max_pages: int) -> Iterator[tuple[Copies, ...]]:
        """Cut the copies into portions of at most `max_pages` pages of the host, in their order.

        Raises:
            ValueError: `max_pages` is below 1.
        """
        if max_pages < 1:
            raise ValueError(f"max_pages: expected at least 1, got {max_pages}")
        portion: list[Copies] = []
        room = max_pages
        for c in self.copies:
            start = 0
            while start < len(c):
                end = min(len(c), start + room)
                portion.append(c[start:end])
                room -= end - start
                start = end
                if not room:
                    yield tuple(portion)
                    portion, room = [], max_pages
        if portion:
            yield tuple(portion)


@dataclass(eq=False, slots=True)
class JobParts:
    """What a job brings, and what it keeps meanwhile.

    Attributes:
        keys: of the chain up to its last segment.
        locked_keys: of a store, of the chain in the source up to the end of its last entry, which
            may be longer.
        first: number of its first segment.
        segments: [n, its pages_per_segment] pages of the target.
        depths: boundaries of the resume points that it brings, ascending.
        points: [m, its pages_per_point] pages of the target of each of them.
        holding: of the target. reading: of the source, while the job is not void.
        entries: of the device, that are stored; of the last one perhaps only segments.
        way: of a load.
        noted: of its segments, for events.
        is_void: what was cached before it was forgotten meanwhile: it brings nothing.
    """

    keys: bytes
    first: int
    segments: Int32
    depths: list[int]
    points: Int32
    holding: Holding
    reading: Holding | None
    locked_keys: bytes = b""
    entries: Sequence[Run | ResumePoint] = ()
    way: Way | None = None
    noted: list[Noted] | None = None
    is_void: bool = False

    @property
    def first_key(self) -> bytes:
        """Key of the first segment; empty where there is none."""
        start = self.first * KEY_BYTES
        return self.keys[start : start + KEY_BYTES]


def copies_of(
    columns: Columns,
    sources: Int32,
    targets: Int32,
    wanted: Flags | None = None,
) -> list[Copies]:
    """Copies by group.

    Args:
        columns: whose `sources` and `targets` [n, columns] are.
        wanted: [n, columns] which of them to copy; None: all.
    """
    if wanted is not None and count_true(wanted) == wanted.size:
        wanted = None  # views are quicker
    copies = []
    for group, mine in columns.slices if len(sources) else ():
        some = None if wanted is None else wanted[:, mine]
        read, written = sources[:, mine], targets[:, mine]
        read, written = (
            (read.ravel(), written.ravel()) if some is None else (read[some], written[some])
        )
        if len(read):
            parts = columns.parts_of(mine, len(sources), some)
            copies.append(Copies(group, read, written, parts))
    return copies
