"""Messages between the hosts: rank 0 has a connection to each other rank."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

POLL = 0.1  # seconds


class Channel:
    """Connections between rank 0 and the others. A call fails once a connection breaks.

    address: host and port: rank 0 listens there (port 0: any, then see `port`), the others connect.
    """

    def __init__(self, rank: int, size: int, address: tuple[str, int]) -> None:
        self.rank, self.size, self.port = rank, size, address[1]
        self._links: dict[int, socket.socket] = {}
        self._server: socket.socket | None = None
        if rank == 0:
            self._server = socket.create_server(address)
            self._server.settimeout(POLL)
            self.port = self._server.getsockname()[1]
        else:
            self._links[0] = _without_delay(socket.create_connection(address))
            self.send(rank.to_bytes(8, "little"))

    def accept(self, check: Callable[[], None]) -> None:
        """Wait in rank 0 for the connections of all others; ``check`` raises to end the waiting."""
        assert self._server is not None
        while len(self._links) < self.size - 1:
            check()
            with suppress(TimeoutError):
                link = self._server.accept()[0]
                link.settimeout(1.0)  # for its first message
                self._links[int.from_bytes(_receive(link), "little")] = _without_delay(link)
        self._server.close()

    def send(self, data: bytes | bytearray) -> None:
        """Send to all others from rank 0; from the others to rank 0."""
        for link in self._links.values():
            link.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self) -> bytearray:
        """Wait for the next message of rank 0."""
        return _receive(self._links[0])

    def all_gather(self, message: Any) -> list[Any]:
        """Exchange JSON values: return those of all ranks, by rank. All wait for all."""
        data = json.dumps(message).encode()
        if self.rank != 0:
            self.send(data)
            return json.loads(self.receive())
        others = [_receive(self._links[rank]) for rank in sorted(self._links)]
        said = [json.loads(one) for one in (data, *others)]
        self.send(json.dumps(said).encode())
        return said

    def close(self) -> None:
        """End all connections, and calls that wait for them; any thread may call it."""
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


def _without_delay(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _receive(link: socket.socket) -> bytearray:
    return _exactly(link, int.from_bytes(_exactly(link, 8), "little"))


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = link.recv_into(left)
        if not count:
            raise ConnectionError("the connection to another rank has ended")
        left = left[count:]
    return data
