"""One hand-off under way: what it waits for, how long, and what it moved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.kvcore import OutOfPages

from .store import (
    DamagedObject,
    Store,
    StoreKey,
    StoreTimeout,
    Ticket,
    TransferError,
)


class NoRoom(TransferError):
    """The receiver's pool has not so many pages.

    Attributes:
        out_of_pages: what is needed, and what there is.
    """

    def __init__(self, out_of_pages: OutOfPages) -> None:
        self.out_of_pages = out_of_pages
        super().__init__(f"receive: {out_of_pages}")


class Forgotten(TransferError):
    """The cache was cleared, or its pages turned out wrong, while they were handed off."""

    def __init__(self, verb: str) -> None:
        super().__init__(f"{verb}: expected a cache that stays, got one that was cleared meanwhile")


@dataclass
class HandedOff:
    """What a hand-off moved.

    Attributes:
        num_tokens: of the prefix that the other end can have now (sender), or that is a hit here
            now (receiver); 0 = none.
        num_segments, num_points: that went through the store.
        num_known: objects that the store had already (sender).
        num_bytes: through the store, by kind of object.
        seconds: of the parts, which overlap in part: ``"cache"``, ``"wait"`` (for a manifest),
            ``"copy"``, ``"checksum"``, ``"store"`` (waits for it) and ``"total"``.
    """

    num_tokens: int = 0
    num_segments: int = 0
    num_points: int = 0
    num_known: int = 0
    num_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, kind: str, size: int) -> None:
        """An object went through the store."""
        self.num_segments += kind == "segment"
        self.num_points += kind == "point"
        self.num_bytes[kind] = self.num_bytes.get(kind, 0) + size


class TransferRun:
    """One hand-off under way: its deadline, its times, and what it waits for.

    Attributes:
        at_end: what is to be done when a ticket has ended well.
        begun: tickets of all objects so far.
    """

    def __init__(self, verb: str, store: Store, timeout: float) -> None:
        self.verb, self.store, self.timeout = verb, store, timeout
        self.report, self.at_end = HandedOff(), dict[Ticket, Callable[[], None]]()
        self.begun: list[Ticket] = []
        self._start = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """The time-out counts from now on."""
        self._deadline = time.monotonic() + self.timeout

    def timed(self, part: str) -> _Timed:
        """Adds the time of a block to a part."""
        return _Timed(self.report.seconds, part)

    def exists(self, keys: list[StoreKey]) -> list[int | None]:
        """As of the store."""
        with self.timed("store"):
            return self.store.exists(keys)

    def some(self, tickets: list[Ticket]) -> list[Ticket]:
        """Those of ``tickets`` that have ended, at least one, and well."""
        with self.timed("store"):
            ended = self.store.poll(tickets, max(0.0, self._deadline - time.monotonic()))
        if not ended:
            raise StoreTimeout(f"{self.verb}: expected to end in {self.timeout:g} s, it did not")
        for ticket in ended:
            if isinstance(ticket.error, DamagedObject):
                raise self.dropped(ticket.key, ticket.error)
            if ticket.error is not None:
                raise ticket.error
            self.at_end.pop(ticket, lambda: None)()
        return ended

    def finish(self, tickets: list[Ticket]) -> None:
        """Waits for all of ``tickets``."""
        while tickets:
            ended = self.some(tickets)
            tickets = [ticket for ticket in tickets if ticket not in ended]

    def dropped(self, key: StoreKey, error: TransferError) -> TransferError:
        """An object is of no use: it leaves the store, so that the next sender puts it again.
        Returns the error."""
        try:
            self.store.remove([key])
        except TransferError as failed:
            error.__cause__ = failed
        return error

    def take_back(self, keys: list[StoreKey]) -> None:
        """What was put is not to be found: its rows may be wrong, or others'.

        Raises:
            StoreFailed: it may be there still.
        """
        left = self.begun
        while left and time.monotonic() < self._deadline:  # or they would come after that
            ended = self.store.poll(left, self._deadline - time.monotonic())
            left = [ticket for ticket in left if ticket not in ended]
        self.store.remove(keys)

    def ended(self) -> HandedOff:
        """The report."""
        self.report.seconds["total"] = time.monotonic() - self._start
        return self.report


class _Timed:
    def __init__(self, seconds: dict[str, float], part: str) -> None:
        self._seconds, self._part = seconds, part

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        spent = time.monotonic() - self._start
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + spent
