"""What a tier keeps: dense segments and resume points, each whole, found by its key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a tier.

    Attributes:
        kind: a dense segment, or the resume point at a boundary.
        key: 32 bytes: of the segment, or of the segment that ends at the boundary.
        parent: key of the segment before that segment; b"" where it is the first of its chain.
        depth: segments from the start of the sequence to the end of this one.
        pages: page ids of the tier: of a segment, as `Run.pages` has them; of a resume point, as
            `ResumePoint.pages` (0: the null page).
    """

    kind: Literal["segment", "point"]
    key: bytes
    parent: bytes
    depth: int
    pages: tuple[int, ...]


class Journal(Protocol):
    """Keeps the records of a tier past the end of the process.

    The order of calls is the order in which they must become durable. Pages of a removed record are
    written anew only after `removed` has returned.
    """

    def records(self) -> Iterable[Record]:
        """What was kept: each segment after its parent, each resume point after its segment."""

    def added(self, records: Iterable[Record]) -> None:
        """The pages of `records` are written: keep these, all or none, parents first."""

    def removed(self, records: Iterable[Record]) -> None:
        """`records` are gone: children first."""
