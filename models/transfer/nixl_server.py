"""Holds the objects of a NIXL store in the memory of this process.

    python -m models.transfer.nixl_server --listen 127.0.0.1:18515 --gib 1

Clients (`quire.models.transfer.nixl_store`) read and write that memory themselves, by NIXL; what
they ask is only where. A prefill engine may run the server in its own process (`NixlServer`).
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..command import run

    run("quire.models.transfer.nixl_server")

import base64
import socketserver
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..command import Parser, number, program
from .arena import Arena, Span
from .nixl_wire import nixl_api, receive, send
from .store import parse_address

GIB = 2**30


class NixlServer:
    """Memory that clients put objects into, and get them from.

    When it is full, objects that nobody reads make room, the one that was not used for longest
    first. Clients are trusted, as NIXL lets them write all of this memory.

    Args:
        host, port: where it listens; port 0 = any that is free.
        num_bytes: of memory.
        backend: of NIXL.

    Attributes:
        address: (host, port) that it listens at.

    Raises:
        ImportError: NIXL is not installed.
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        num_bytes: int = GIB,
        backend: str = "UCX",
    ) -> None:
        nixl = nixl_api()
        self._agent = nixl.nixl_agent(
            f"quire-{uuid.uuid4()}", nixl.nixl_agent_config(backends=[backend])
        )
        self._memory = np.zeros(num_bytes, np.uint8)
        address = self._memory.ctypes.data
        self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        self._hello = {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": address,
            "num_bytes": num_bytes,
        }
        self._arena, self._lock = Arena(num_bytes), threading.Lock()
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                _Client(server, self.request).serve()

        self._server = socketserver.ThreadingTCPServer((host, port), Handler, False)
        self._server.daemon_threads = self._server.allow_reuse_address = True
        try:
            self._server.server_bind()
            self._server.server_activate()
        except BaseException:
            self._server.server_close()
            raise
        self.address: tuple[str, int] = self._server.server_address[:2]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listens no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Client:
    """One connection: what it has reserved, and what it reads."""

    def __init__(self, server: NixlServer, socket: Any) -> None:
        self._server, self._arena, self._socket = server, server._arena, socket
        self._reserved: dict[str, Span] = {}
        self._reads: list[Span] = []

    def serve(self) -> None:
        """Answers until the client is gone."""
        try:
            while True:
                message = receive(self._socket)
                with self._server._lock:
                    answer = self._answer(**message)
                send(self._socket, answer)
        except (OSError, TypeError, ValueError, KeyError):  # gone, or no client of ours
            pass
        finally:
            with self._server._lock:
                for span in self._reserved.values():
                    self._arena.give_up(span)
                for span in self._reads:
                    self._arena.release(span)

    def _answer(self, verb: str, names: Sequence[str] = (), size: int = 0) -> dict[str, Any]:
        arena = self._arena
        if verb == "hello":
            return self._server._hello
        if verb == "exists":
            found = [arena.objects.get(name) for name in names]
            return {"sizes": [None if span is None else span.size for span in found]}
        if verb == "remove":
            for name in names:
                arena.remove(name)
            return {}
        [name] = names
        if verb == "reserve":
            if name in arena.objects:
                return {"is_there": True}
            span = arena.reserve(int(size))
            if span is None:
                return {"num_bytes": arena.num_bytes}
            self._reserved[name] = span
            return {"offset": span.offset}
        if verb == "commit":
            arena.commit(name, self._reserved.pop(name))
            return {}
        if verb == "find":
            span = arena.find(name)
            if span is None:
                return {}
            self._reads.append(span)
            return {"offset": span.offset, "size": span.size}
        if verb == "release":
            arena.release(self._reads.pop())
            return {}
        raise ValueError(f"verb: expected one of the protocol's, got {verb!r}")


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted; returns the exit status."""
    args = _parser().parse_args(argv)
    server = NixlServer(*parse_address("listen", args.listen), num_bytes=int(args.gib * GIB))
    print(f"listening at {server.address[0]}:{server.address[1]}", flush=True)
    threading.Event().wait()
    return 0


def _parser() -> Parser:
    parser = Parser("models.transfer.nixl_server", __doc__)
    parser.add_argument(
        "--listen",
        default="127.0.0.1:18515",
        metavar="HOST:PORT",
        help="default: 127.0.0.1:18515; port 0 = one that is free",
    )
    parser.add_argument(
        "--gib", type=number(above=True), default=1.0, metavar="N", help="of memory; default: 1"
    )
    return parser
