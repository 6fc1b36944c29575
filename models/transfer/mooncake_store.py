"""Mooncake Store: objects in the memory of several machines, found through a master process.

    pip install 'quire[mooncake]'       needs libibverbs1 of the system, also without RDMA
    mooncake_master --rpc_port=50051    once; then a `MooncakeStore` in each engine

Every client may give memory to the store (``segment_bytes``), and its objects leave with it: where
senders come and go, give none there, and run a client of its own that does (``mooncake_client``).

Source: mooncake-transfer-engine-non-cuda 0.3.13, `mooncake.store.MooncakeDistributedStore` and the
error codes of mooncake-store/include/types.h.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence

from .memory import scatter
from .store import (
    TIMEOUT,
    Buffers,
    MissingObject,
    StoreFailed,
    StoreKey,
    ThreadedStore,
    parse_address,
)

OBJECT_NOT_FOUND = -704
MIB = 2**20


class MooncakeStore(ThreadedStore):
    """A client of Mooncake Store. It makes metadata of a peer at hand-shake, without a server.

    Args:
        master: "host:port" of ``mooncake_master``.
        host: of this process, as others reach it.
        segment_bytes: of memory that this client gives to the store; 0 = none.
        buffer_bytes: that objects go over here: more than the largest of them.
        protocol: "tcp" or "rdma".
        devices: of RDMA, by name and with commas between them.
        timeout: see `ThreadedStore`.

    Raises:
        ImportError: it is not installed, or a library of the system is missing.
        ValueError: `master` is none.
        StoreFailed: the master does not answer.
    """

    def __init__(
        self,
        master: str,
        *,
        host: str = "127.0.0.1",
        segment_bytes: int = 0,
        buffer_bytes: int = 256 * MIB,
        protocol: str = "tcp",
        devices: str = "",
        timeout: float = TIMEOUT,
    ) -> None:
        from mooncake.store import MooncakeDistributedStore

        parse_address("master", master)
        super().__init__(timeout=timeout)
        self._client, self._master = MooncakeDistributedStore(), master

        def set_up() -> None:
            self._expect_master()
            code = self._client.setup(
                host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, protocol, devices, master
            )
            self._expect(code, "setup")

        try:
            self._wait("setup", set_up)
        except BaseException:
            self.close()
            raise

    def _expect_master(self) -> None:
        """That the master takes connections. Where it does not, set-up and close of a client wait
        for minutes, and let no other thread of the process run meanwhile."""
        try:
            socket.create_connection(parse_address("master", self._master), self.timeout).close()
        except OSError as error:
            raise StoreFailed(f"Mooncake Store at {self._master}: {error}") from error

    def _expect(self, code: int, what: str) -> None:
        if code < 0:
            raise StoreFailed(f"{what}: Mooncake Store at {self._master}: error {code}")

    def _exists(self, keys: Sequence[StoreKey]) -> list[int | None]:
        names = [key.text for key in keys]
        found = self._client.batch_is_exist(names)
        if len(found) != len(names) or any(code < 0 for code in found):
            raise StoreFailed(f"exists: Mooncake Store at {self._master}: {found[:9]}")
        sizes = [
            self._client.get_size(n) if there else -1 for n, there in zip(names, found, strict=True)
        ]
        return [None if size < 0 else size for size in sizes]

    def _put(self, key: StoreKey, buffers: Buffers) -> None:
        self._expect(self._client.put_parts(key.text, *buffers), f"put {key.text}")
        # A put of somebody who was killed meanwhile counts as there for a while.
        if self._client.is_exist(key.text) != 1:
            raise StoreFailed(f"put {key.text}: another put of it has not ended")

    def _get(self, key: StoreKey, buffers: Buffers) -> None:
        held = self._client.get_buffer(key.text)
        if held is None:
            if self._client.is_exist(key.text) == 0:
                raise MissingObject(key)
            raise StoreFailed(f"get {key.text}: Mooncake Store at {self._master} gave nothing")
        scatter(key, memoryview(held).cast("B"), buffers)

    def _remove(self, keys: Sequence[StoreKey]) -> None:
        for key in keys:
            # Others may read it: then it is gone when they have.
            code = self._client.remove(key.text, True)
            if code != OBJECT_NOT_FOUND:
                self._expect(code, f"remove {key.text}")

    def close(self) -> None:
        """Ends its threads, and takes the memory of this client out of the store."""
        if self._is_open:
            super().close()
            try:
                self._expect_master()
            except StoreFailed:
                # Nor may it be destroyed: that closes it.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._client))
            else:
                self._client.close()
