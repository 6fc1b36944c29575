"""What a tier tells of its entries: to a journal, which keeps them, and in events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..announcer import Announcer, Noted
from ..events import Event, split_keys
from .records import Journal, Record

if TYPE_CHECKING:
    from ..prefix.tree import Run
    from .jobs import JobParts


class TierAnnouncer(Announcer):
    """Writes the events of a tier. Of what was there before the process nothing is told: events
    name tokens, and a journal keeps none."""

    def adopted(
        self, keys: bytes, noted: Sequence[Noted] | None, parent: bytes | None, first: int
    ) -> None:
        """As of `Announcer`, of those whose tokens are known."""
        if noted is not None:
            super().adopted(keys, noted, parent, first)

    def point(self, run: Run, depth: int, slot: int | None = None) -> None:
        """As of `Announcer`, where the tokens are known."""
        if all(key in self.tokens for key in split_keys(self._before(run, depth))):
            super().point(run, depth, slot)

    def segments_removed(self, keys: bytes) -> None:
        """As of `Announcer`, of those that were told."""
        known = b"".join(key for key in split_keys(keys) if key in self.tokens)
        if known:
            super().segments_removed(known)

    def point_removed(self, key: bytes, depth: int) -> None:
        """As of `Announcer`, where the segment before it was told."""
        if key in self.tokens:
            super().point_removed(key, depth)

    def noted(self, runs: Iterable[Run]) -> tuple[Iterator[Event], int]:
        """As of `Announcer`, of the runs whose tokens are known."""

        def is_known(run: Run | None) -> bool:
            while run is not None:
                if any(key not in self.tokens for key in split_keys(bytes(run.keys))):
                    return False
                run = run.parent
            return True

        return super().noted([run for run in runs if is_known(run)])


class Ledger:
    """Hears of what comes to a tier and goes from it.

    Args:
        journal: keeps the entries past the end of the process; None keeps nothing.
        announcer: writes events; None if nobody listens.

    Attributes:
        is_broken: the journal raised: nothing may be stored any more, as what it still has must
            not be written over.
        num_errors: how often it raised.
    """

    def __init__(self, journal: Journal | None, announcer: TierAnnouncer | None) -> None:
        self._journal, self.announcer = journal, announcer
        self.records: dict[tuple[str, bytes], Record] = {}
        self._removed: list[Record] = []
        self.is_broken = False
        self.num_errors = 0

    # As an announcer.

    def adopted(
        self, keys: bytes, noted: Sequence[Noted] | None, parent: bytes | None, first: int
    ) -> None:
        """Segments came."""
        if self.announcer is not None:
            self.announcer.adopted(keys, noted, parent, first)

    def point(self, run: Run, depth: int) -> None:
        """A resume point came."""
        if self.announcer is not None:
            self.announcer.point(run, depth)

    def segments_removed(self, keys: bytes) -> None:
        """Segments went, parents first."""
        if self.announcer is not None:
            self.announcer.segments_removed(keys)
        if self._journal is not None:
            self._forget(("segment", key) for key in reversed(split_keys(keys)))

    def point_removed(self, key: bytes, depth: int) -> None:
        """A resume point went."""
        if self.announcer is not None:
            self.announcer.point_removed(key, depth)
        if self._journal is not None:
            self._forget([("point", key)])

    def cleared(self) -> None:
        """Never called: a tier tells of each entry that goes."""
        raise AssertionError("a tier that is cleared tells of each entry")

    def _forget(self, which: Iterable[tuple[str, bytes]]) -> None:
        for kind_and_key in which:
            record = self.records.pop(kind_and_key, None)
            if record is not None:
                self._removed.append(record)

    # The journal.

    def flush(self) -> None:
        """What went is gone from the journal too, before its pages are used again."""
        if not self._removed:
            return
        removed, self._removed = self._removed, []
        if self._journal is not None and not self.is_broken:
            try:
                self._journal.removed(removed)
            except Exception:
                self._broke()

    def added(self, parts: JobParts, came: int, new: int, points: Sequence[int]) -> None:
        """Of a job whose first `came` segments came, the last `new` are new, and the resume
        `points` at these boundaries."""
        self.flush()
        if self._journal is None or self.is_broken:
            return
        keys = split_keys(parts.keys)
        records = []
        for depth in range(parts.first + came - new, parts.first + came):
            pages = tuple(parts.segments[depth - parts.first].tolist())
            parent = keys[depth - 1] if depth else b""
            records.append(Record("segment", keys[depth], parent, depth + 1, pages))
        for depth, row in zip(parts.depths, parts.points, strict=True):
            if depth in points:
                parent = keys[depth - 2] if depth > 1 else b""
                pages = tuple(row.tolist())
                records.append(Record("point", keys[depth - 1], parent, depth, pages))
        if not records:
            return
        self.records.update({(r.kind, r.key): r for r in records})
        try:
            self._journal.added(records)
        except Exception:
            self._broke()

    def _broke(self) -> None:
        self.is_broken = True
        self.num_errors += 1


def noted_of(listener: object, keys: bytes) -> list[Noted] | None:
    """What events name of segments with these keys, if what listens to their index has it."""
    announcer = listener.announcer if isinstance(listener, Ledger) else listener
    hashes = split_keys(keys)
    if not isinstance(announcer, Announcer) or not announcer.tokens.keys() >= {*hashes}:
        return None
    return announcer.of_segments(hashes)
