"""Heartbeat: notice that a rank died, is stuck or failed, and end the others with its name.

Every `BEAT` each rank sends its state to rank 0, and rank 0 to each rank. A rank is dead when its
connection breaks, or when it was silent for `timeout` seconds. Rank 0 sends its verdict to the
others, which print it and exit; in rank 0 the call fails that waits for them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from select import select
from typing import Any

BEAT = 0.5  # seconds
MESSAGE, LONGEST_VERDICT = 1024, 150  # bytes; characters, at most 6 bytes each
EXIT_STATUS = 1


class RankError(RuntimeError):
    """Another rank died, failed or is stuck; the message names it."""


class Heartbeat(threading.Thread):
    """The heartbeat thread of one rank. Creating it starts it.

    Args:
        rank, size: this rank, and the number of ranks.
        timeout: seconds of silence, or of a step without progress, after which a rank is dead.
        address: host and port. Rank 0 listens there (port 0: any), the others connect to it.

    Attributes:
        port: where rank 0 listens.
        verdict: what happened to which rank; "" = all are well.
        calls: returns the number of calls that this rank has made together with the others.
        give_up: called in rank 0 with a verdict, to make a call fail that waits for other ranks.
        is_stepping: True in rank 0 during a step, in which all ranks make progress.
    """

    def __init__(self, rank: int, size: int, timeout: float, address: tuple[str, int]) -> None:
        super().__init__(name="quire-heartbeat", daemon=True)
        self.rank, self.timeout, self.port = rank, timeout, address[1]
        self.verdict, self.is_stepping = "", False
        self.calls: Callable[[], int] = lambda: 0
        self.give_up: Callable[[], None] = lambda: None
        others = range(1, size) if rank == 0 else [0]
        self._connections: dict[int, socket.socket] = {}
        self._states: dict[int, dict[str, Any]] = {other: {} for other in others}
        self._missed = dict.fromkeys(others, 0)  # beats in a row in which nothing came
        self._sum, self._stalled = 0, 0  # of all calls, and beats in a row without one
        self._has_left = threading.Event()
        self._server = socket.create_server(address) if rank == 0 else None
        if self._server is None:
            self._connections[0] = socket.create_connection(address, timeout)
        else:
            self.port = self._server.getsockname()[1]
        self.start()

    def leave(self, failed: str = "") -> None:
        """End this heartbeat; the other ranks end too if this one failed."""
        self._has_left.set()
        self._send(left=not failed, verdict=failed and f"rank {self.rank} failed: {failed}")

    def run(self) -> None:
        """Send and receive until this rank leaves, or another one is dead."""
        while not self._has_left.is_set() and not self.verdict:
            self._send()
            self._missed = {rank: count + 1 for rank, count in self._missed.items()}
            self._stalled += 1
            until = time.monotonic() + BEAT
            while not self.verdict and (left := until - time.monotonic()) > 0:
                self._receive(min(left, 0.1))
                self.verdict = self._judge()
        if self.verdict and not self._has_left.is_set():
            self._send(verdict=self.verdict)
            if self.rank != 0:
                print(f"quire: rank {self.rank} ends: {self.verdict}", file=sys.stderr, flush=True)
                os._exit(EXIT_STATUS)
            self.give_up()

    def _send(self, **more: Any) -> None:
        state = {"rank": self.rank, "calls": self.calls(), **more}
        state["verdict"] = state.get("verdict", "")[:LONGEST_VERDICT]
        for connection in list(self._connections.values()):
            with suppress(OSError):  # the next receive tells
                connection.sendall(json.dumps(state).encode().ljust(MESSAGE))

    def _receive(self, seconds: float) -> None:
        by_socket = {connection: rank for rank, connection in self._connections.items()}
        for ready in select([*by_socket, *filter(None, [self._server])], [], [], seconds)[0]:
            connection, data = ready.accept()[0] if ready is self._server else ready, b""
            connection.settimeout(1.0)
            with suppress(OSError):
                data = connection.recv(MESSAGE, socket.MSG_WAITALL)
            if len(data) == MESSAGE:
                state = json.loads(data)
                self._connections[state["rank"]] = connection
                self._states[state["rank"]], self._missed[state["rank"]] = state, 0
            elif ready in by_socket:
                self._states[by_socket[ready]]["is_closed"] = True
                del self._connections[by_socket[ready]]

    def _judge(self) -> str:
        for rank, state in self._states.items():
            if state.get("verdict") or state.get("left"):
                return str(state["verdict"])
            if state.get("is_closed"):
                return f"rank {rank} died: its process has ended"
            if self._missed[rank] * BEAT > self.timeout:
                return f"rank {rank} died: nothing was heard of it for {self.timeout:g} s"
        calls = {self.rank: self.calls()} | {r: s.get("calls", 0) for r, s in self._states.items()}
        if not self.is_stepping or sum(calls.values()) != self._sum:
            self._sum, self._stalled = sum(calls.values()), 0
        elif (self._stalled - 2) * BEAT > self.timeout:
            least = [str(rank) for rank, count in calls.items() if count == min(calls.values())]
            return f"rank {', '.join(least)} is stuck: no progress for {self.timeout:g} s"
        return ""
