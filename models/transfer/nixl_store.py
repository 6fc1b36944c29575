"""A store in the memory of a `NixlServer`, which this process reads and writes by NIXL.

    pip install 'quire[nixl]'       (nixl-cu12; CUDA is not needed)

What moves are the bytes of objects, one-sided, by whatever UCX finds between the two: RDMA, shared
memory or TCP. Where they are is asked over a connection of its own.

Source: nixl 1.5, `nixl._api.nixl_agent` (register_memory, add_remote_agent, initialize_xfer,
transfer, check_xfer_state).
"""

from __future__ import annotations

import base64
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from .nixl_wire import nixl_api, receive, send
from .store import (
    TIMEOUT,
    Buffers,
    DamagedObject,
    MissingObject,
    StoreFailed,
    StoreKey,
    StoreTimeout,
    ThreadedStore,
    num_bytes,
)

MIB = 2**20
PAUSE = 20e-6  # seconds between two looks at a transfer


class NixlStore(ThreadedStore):
    """A client of a `NixlServer`. After a failure it connects anew.

    Args:
        host, port: of the server.
        buffer_bytes: of registered memory that objects go over here, in parts where they are
            larger.
        backend: of NIXL.
        timeout: see `ThreadedStore`.

    Raises:
        ImportError: NIXL is not installed.
        StoreFailed: the server does not answer.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        buffer_bytes: int = 64 * MIB,
        backend: str = "UCX",
        timeout: float = TIMEOUT,
    ) -> None:
        nixl_api()  # says at once what is missing

        super().__init__(timeout=timeout)
        self._address, self._backend = (host, port), backend
        self._buffer_bytes = buffer_bytes
        self._peer: _Peer | None = None
        try:
            self.exists([])
        except BaseException:
            self.close()
            raise

    def _exists(self, keys: Sequence[StoreKey]) -> list[int | None]:
        return self._ask("exists", names=[key.text for key in keys])["sizes"]

    def _put(self, key: StoreKey, buffers: Buffers) -> None:
        size = num_bytes(buffers)
        place = self._ask("reserve", names=[key.text], size=size)
        if place.get("is_there"):
            return
        if "offset" not in place:
            raise StoreFailed(
                f"put {key.text}: expected room for {size} bytes, got a server of "
                f"{place['num_bytes']} whose objects are all in use, or too small"
            )
        self._move("WRITE", place["offset"], buffers)
        self._ask("commit", names=[key.text])

    def _get(self, key: StoreKey, buffers: Buffers) -> None:
        place = self._ask("find", names=[key.text])
        if "offset" not in place:
            raise MissingObject(key)
        if place["size"] == num_bytes(buffers):
            self._move("READ", place["offset"], buffers)
        self._ask("release", names=[key.text])
        if place["size"] != num_bytes(buffers):
            raise DamagedObject(key, f"expected {num_bytes(buffers)} bytes, got {place['size']}")

    def _remove(self, keys: Sequence[StoreKey]) -> None:
        self._ask("remove", names=[key.text for key in keys])

    def _ask(self, verb: str, **more: Any) -> dict[str, Any]:
        try:
            if self._peer is None:
                self._peer = _Peer(self._address, self._backend, self._buffer_bytes, self.timeout)
            return self._peer.ask(verb, **more)
        except OSError as error:
            self._lose()
            raise StoreFailed(f"NIXL server at {self._address}: {error}") from error

    def _move(self, verb: str, offset: int, buffers: Buffers) -> None:
        """Writes ``buffers`` to the server's memory, or reads them from there."""
        peer = self._peer
        assert peer is not None
        try:
            for parts in _cut(buffers, len(peer.memory)):
                size = sum(part.nbytes for part in parts)
                local, at = peer.memory[:size], 0
                if verb == "WRITE":
                    np.concatenate(parts, out=local)
                peer.transfer(verb, offset, size)
                if verb == "READ":
                    for part in parts:
                        part[:] = local[at : at + part.nbytes]
                        at += part.nbytes
                offset += size
        except StoreFailed:
            self._lose()  # and its memory, which may still be written
            raise

    def _lose(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """Ends its threads and its connection."""
        if self._is_open:
            super().close()
            self._lose()


class _Peer:
    """A connection to a server, and an agent that knows its memory.

    Attributes:
        memory: [buffer_bytes] uint8, registered.
    """

    def __init__(
        self, address: tuple[str, int], backend: str, buffer_bytes: int, timeout: float
    ) -> None:
        nixl = nixl_api()
        self._timeout = timeout
        self._socket = socket.create_connection(address, timeout)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = self.ask("hello")
            config = nixl.nixl_agent_config(backends=[backend])
            self._agent = nixl.nixl_agent(f"quire-{uuid.uuid4()}", config)
            self.memory = np.zeros(buffer_bytes, np.uint8)
            self._start, self._remote = self.memory.ctypes.data, int(hello["address"])
            self._agent.register_memory([(self._start, buffer_bytes, 0, "")], "DRAM")
            name = self._agent.add_remote_agent(base64.b64decode(hello["metadata"]))
            self._name = name.decode() if isinstance(name, bytes) else name
        except BaseException:
            self._socket.close()
            raise

    def ask(self, verb: str, **more: Any) -> dict[str, Any]:
        """The server's answer."""
        send(self._socket, {"verb": verb, **more})
        return receive(self._socket)

    def transfer(self, verb: str, offset: int, size: int) -> None:
        """Moves the first ``size`` bytes of `memory` to or from the server's memory."""
        agent, end = self._agent, time.monotonic() + self._timeout
        try:
            local = agent.get_xfer_descs([(self._start, size, 0)], "DRAM")
            there = agent.get_xfer_descs([(self._remote + offset, size, 0)], "DRAM")
            handle = agent.initialize_xfer(verb, local, there, self._name)
            state = agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > end:
                    raise StoreTimeout(
                        f"{verb}: expected {size} bytes by NIXL in {self._timeout:g} s"
                    )
                time.sleep(PAUSE)
                state = agent.check_xfer_state(handle)
            handle.release()
        except StoreFailed:
            raise
        except Exception as error:
            raise StoreFailed(f"{verb} by NIXL: {type(error).__name__}: {error}") from error
        if state != "DONE":
            raise StoreFailed(f"{verb} by NIXL: expected state DONE, got {state}")

    def close(self) -> None:
        """Closes the connection; the server forgets what was begun."""
        self._socket.close()
        with suppress(Exception):
            self._agent.remove_remote_agent(self._name)


def _cut(buffers: Buffers, most: int) -> Iterator[list[np.ndarray]]:
    """The bytes of ``buffers`` in portions of at most ``most``."""
    portion, room = [], most
    for buffer in buffers:
        for start in range(0, buffer.nbytes, most):
            part = buffer[start : start + most]
            while part.nbytes:
                portion.append(part[:room])
                part = part[len(portion[-1]) :]
                room -= portion[-1].nbytes
                if not room:
                    yield portion
                    portion, room = [], most
    if portion:
        yield portion
