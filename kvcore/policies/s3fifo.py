"""S3-FIFO: three queues in order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .base import Entry, Ghosts


class S3FIFO:
    """Three queues: what is used once leaves quickly, so that a scan does not flush what is used
    again.

    New entries enter a small queue and move to the main one if they were used by the time they
    reach its head; in the main queue a used entry goes round again. An entry that comes back soon
    after its eviction enters the main queue at once.

    Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).

    Args:
        small: share of the pages that the small queue may hold before it is the first to give.
        num_ghosts: evictions remembered.
    """

    def __init__(self, small: float = 0.1, num_ghosts: int = 4096) -> None:
        if not 0 < small < 1:
            raise ValueError(f"small: expected a share in (0, 1), got {small}")
        self._share = small
        # Queues in order of arrival; of each entry how often it was used lately.
        self._small: OrderedDict[Entry, int] = OrderedDict()
        self._main: OrderedDict[Entry, int] = OrderedDict()
        self._ghosts = Ghosts(num_ghosts)

    def add(self, entry: Entry) -> None:
        """A new entry enters a queue; a used one is only marked."""
        for queue in (self._small, self._main):
            if entry in queue:
                queue[entry] = min(3, queue[entry] + 1)
                return
        queue = self._main if self._ghosts.pop(entry.key) is not None else self._small
        queue[entry] = 0

    def discard(self, entry: Entry) -> None:
        """Forget `entry`."""
        self._small.pop(entry, None)
        self._main.pop(entry, None)

    def pop(self) -> Entry | None:
        """The first unused entry, of the small queue while that is over its share."""
        while self._small or self._main:
            over = len(self._small) > self._share * (len(self._small) + len(self._main))
            queue = self._small if self._small and (over or not self._main) else self._main
            entry, uses = queue.popitem(last=False)
            if uses:
                self._main[entry] = 0 if queue is self._small else uses - 1
                continue
            if queue is self._small:
                self._ghosts.add(entry.key, 0.0)
            return entry
        return None

    def coming(self, n: int) -> list[Entry]:
        """The entries that `pop` would take out next while no queue is over its share, about: at
        most `n`; they stay."""
        queues = (self._small, self._main)
        waiting = [(uses, entry) for queue in queues for entry, uses in queue.items()]
        waiting.sort(key=lambda pair: pair[0])
        return [entry for _, entry in waiting[:n]]

    def asked(self, keys: bytes, hit: int, kept: Sequence[int] = ()) -> None:
        """Nothing is learned from prompts."""
