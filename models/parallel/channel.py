"""Messages between the hosts, through the store of torch.distributed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

POLL = 0.01  # seconds


class Channel:
    """Messages of rank 0 to the others, and values that all exchange.

    Args:
        store: the same one in all ranks. A wait for a message holds up other uses of the object.
        check: called while this rank waits for others; raises to end the waiting.
    """

    def __init__(
        self, rank: int, size: int, store: dist.Store, check: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._check, self._num_gathered = store, check, 0

    def send(self, data: bytes) -> None:
        for rank in range(1, self.size):
            self._store.queue_push(f"quire/messages/{rank}", data)

    def receive(self) -> bytes:
        while True:
            with suppress(dist.DistStoreError):  # the time of the store's waits is over
                return self._store.queue_pop(f"quire/messages/{self.rank}")

    def all_gather(self, message: Any) -> list[Any]:
        """Exchange JSON values: return those of all ranks, by rank. All wait for all."""
        self._num_gathered += 1
        keys = [f"quire/gathered/{self._num_gathered}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(message))
        while not self._store.check(keys):
            self._check()
            time.sleep(POLL)
        return [json.loads(value) for value in self._store.multi_get(keys)]
