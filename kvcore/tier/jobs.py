"""Jobs: pages that the engine is to copy between places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..announcer import Noted
from ..arrays import NO_ROWS, Flags, Int32, Int64, as_ints, count_true
from ..prefix.holdings import Holding
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run
from .places import Columns, Place

if TYPE_CHECKING:
    from .match import Way


@dataclass(eq=False, slots=True)
class Copies:
    """Pages of one group that go from one place to another.

    Attributes:
        group: index of the cache group.
        source, target: names of the places.
        sources, targets: [n] int32 page ids there; page ``sources[i]`` goes to ``targets[i]``.
        parts: [n] int32 which part of a page of the device it is, that the tier's page has: 0
            wherever they are equally large.
    """

    group: int
    source: str
    target: str
    sources: Int32
    targets: Int32
    parts: Int32

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, some: slice) -> Copies:
        """Some of them."""
        return Copies(
            self.group, self.source, self.target,
            self.sources[some], self.targets[some], self.parts[some],
        )  # fmt: skip


@dataclass(eq=False, slots=True)
class Job:
    """Pages to copy. Tell `Tiers.done` when all of them are, or which of them could not be.

    Attributes:
        kind: ``"store"`` or ``"load"``.
        copies: what to copy, group after group in the order of the groups: an engine that copies
            the pages of a group tensor by tensor may run layer 0 when its tensor's are there.
        num_pages, num_bytes: of all copies, in pages of a tier.
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

    def failed_pages(self, failed: Any, name: str = "failed") -> Int64:
        """`failed` as target pages.

        Args:
            name: of it, in errors.

        Raises:
            ValueError: some are no targets of the job.
        """
        pages = as_ints(name, failed)
        if not pages.size:
            return NO_ROWS
        others = np.setdiff1d(pages, self.parts.holding.taken)
        if len(others):
            raise ValueError(
                f"{name}: expected pages that are targets of the job, got {others.tolist()}"
            )
        return pages

    def sources_of(self, targets: Int64) -> dict[str, Int32]:
        """Source pages of the copies to `targets`, by the name of their place."""
        found: dict[str, Int32] = {}
        for c in self.copies if len(targets) else ():
            mine = c.sources[np.isin(c.targets, targets)]
            found[c.source] = np.concatenate([found.get(c.source, mine[:0]), mine])
        return found

    def cut(self, max_pages: int) -> Iterator[tuple[Copies, ...]]:
        """The copies in portions of at most `max_pages` pages of a tier, in their order.

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
        sources: places that it reads. target: where it goes.
        keys: of the chain up to its last segment.
        locked_keys: of a store, of the chain in the source up to the end of its last entry, which
            may be longer.
        first: number of its first segment.
        segments: [n, its pages_per_segment] pages of the target.
        depths: boundaries of the resume points that it brings, ascending.
        points: [m, its pages_per_point] pages of the target of each of them.
        holding: of the target. holdings: of the sources.
        entries: of the device or a tier, that are stored; of the last one perhaps only segments.
        way: of a load.
        noted: of its segments, for events.
        is_void: what was cached before it was forgotten meanwhile: it brings nothing.
    """

    sources: list[Place]
    target: Place
    keys: bytes
    first: int
    segments: Int32
    depths: list[int]
    points: Int32
    holding: Holding
    holdings: list[Holding]
    locked_keys: bytes = b""
    entries: Sequence[Run | ResumePoint] = ()
    way: Way | None = None
    noted: list[Noted] | None = None
    is_void: bool = False

    @property
    def first_key(self) -> tuple[str, bytes]:
        """The target and the key of the first segment; that is empty where there is none."""
        start = self.first * KEY_BYTES
        return self.target.name, self.keys[start : start + KEY_BYTES]


def copies_of(
    columns: Columns,
    source: Place,
    target: Place,
    sources: Int32,
    targets: Int32,
    wanted: Flags | None = None,
) -> list[Copies]:
    """Copies between two places, by group.

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
            copies.append(Copies(group, source.name, target.name, read, written, parts))
    return copies
