"""The link between the device and the host, and what goes over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


class Link:
    """One direction of a link: transfers go over it one after another, in the order of their
    start.

    Args:
        bytes_per_second: how fast.

    Attributes:
        free_at: when the last transfer so far ends, in seconds.
        num_bytes: of all transfers so far.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.free_at = 0.0
        self.num_bytes = 0

    def send(self, now: float, num_bytes: int) -> float:
        """Queue `num_bytes` at time `now`; returns when they are there."""
        self.free_at = max(now, self.free_at) + num_bytes / self.bytes_per_second
        self.num_bytes += num_bytes
        return self.free_at

    def room(self, now: float, seconds: float) -> int:
        """Bytes that, queued at time `now`, are there `seconds` later."""
        return max(0, int((now + seconds - max(now, self.free_at)) * self.bytes_per_second))


@dataclass(eq=False)
class Transfer:
    """Bytes that go over a link at once.

    Attributes:
        link: in their direction.
        num_bytes: how many.
        done: called when all are there.
        waiting: numbers of the requests that wait for it.
        is_started: it is queued.
    """

    link: Link
    num_bytes: int
    done: Callable[[], object]
    waiting: list[int] = field(default_factory=list)
    is_started: bool = False
