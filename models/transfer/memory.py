"""A store in the memory of a process: for two engines in one, and for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .store import (
    TIMEOUT,
    Buffers,
    DamagedObject,
    MissingObject,
    StoreKey,
    ThreadedStore,
    num_bytes,
)


class DictStore(ThreadedStore):
    """Objects in a dictionary.

    Args:
        objects: bytes by key, for those that share them; None = new ones.
        timeout: see `ThreadedStore`.

    Attributes:
        objects: bytes by key.
    """

    def __init__(
        self, objects: dict[StoreKey, bytes] | None = None, *, timeout: float = TIMEOUT
    ) -> None:
        self.objects = {} if objects is None else objects
        super().__init__(timeout=timeout)

    def _exists(self, keys: Sequence[StoreKey]) -> list[int | None]:
        found = [self.objects.get(key) for key in keys]
        return [None if data is None else len(data) for data in found]

    def _put(self, key: StoreKey, buffers: Buffers) -> None:
        self.objects[key] = b"".join(buffer.data for buffer in buffers)

    def _get(self, key: StoreKey, buffers: Buffers) -> None:
        data = self.objects.get(key)
        if data is None:
            raise MissingObject(key)
        scatter(key, data, buffers)

    def _remove(self, keys: Sequence[StoreKey]) -> None:
        for key in keys:
            self.objects.pop(key, None)


def scatter(key: StoreKey, data: bytes | memoryview, buffers: Buffers) -> None:
    """Fill ``buffers`` with the bytes of an object.

    Raises:
        DamagedObject: it has another size than they.
    """
    if len(data) != num_bytes(buffers):
        raise DamagedObject(key, f"expected {num_bytes(buffers)} bytes, got {len(data)}")
    values, at = np.frombuffer(data, np.uint8), 0
    for buffer in buffers:
        buffer[:] = values[at : at + buffer.nbytes]
        at += buffer.nbytes
