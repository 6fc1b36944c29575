"""Heartbeat: notice that a rank died, is stuck or failed, and end the others with its name.

Each rank sends its state to rank 0, and rank 0 to each rank. A rank is dead when its connection
breaks, or when it was silent too long. The other ranks print that and exit; rank 0's call fails.
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

LOCAL = "127.0.0.1"
BEAT, MESSAGE, LONGEST_VERDICT = 0.5, 1024, 150  # seconds; bytes; characters of 6 bytes at most
EXIT_STATUS = 1


class RankError(RuntimeError):
    """Another rank died, failed or is stuck; the message names it."""


class Heartbeat(threading.Thread):
    """The heartbeat thread of one rank. Creating it starts it.

    Args:
        rank, size: this rank, and the number of ranks.
        timeout: seconds of silence, or of a step without progress, after which a rank is dead.
        address: host and port where rank 0 listens (0: any, see `port`) and the others connect.

    Attributes:
        verdict: the rank that died, and the reason; "" = none did.
        calls: returns the number of calls that this rank has made together with the others.
        give_up: called in rank 0 after a verdict, to make a call fail that waits for other ranks.
        is_stepping: True in rank 0 during a step, in which all ranks make progress.
    """

    def __init__(self, rank: int, size: int, timeout: float, address: tuple[str, int]) -> None:
        super().__init__(name="quire-heartbeat", daemon=True)
        self.rank, self.timeout = rank, timeout
        self.verdict, self.is_stepping, self._has_left = "", False, False
        self.calls: Callable[[], int] = lambda: 0
        self.give_up: Callable[[], None] = lambda: None
        self._connections: dict[int, socket.socket] = {}
        self._said: dict[str, object] = {"rank": rank, "silent": 0.0, "verdict": "", "left": False}
        self._states = {other: {"silent": 0.0} for other in ([0] if rank else range(1, size))}
        self._sum, self._stalled = 0, 0.0  # calls of all, and seconds since the last one
        self._sending = threading.Lock()  # a beat must not follow the last word with older news
        self._servers = [socket.create_server(address)] if rank == 0 else []
        self.port = self._servers[0].getsockname()[1] if rank == 0 else address[1]
        if rank != 0:
            self._connections[0] = socket.create_connection(address, timeout)
        self.start()

    def leave(self, failed: str = "") -> None:
        """End this heartbeat; if this rank failed, the others end too."""
        self._has_left = True
        failed = failed and f"rank {self.rank} failed: {failed}"[:LONGEST_VERDICT]
        self._send(left=not failed, verdict=failed)

    def run(self) -> None:
        """Send and receive until this rank leaves or another one is dead."""
        now = time.monotonic()
        while not self._has_left and not self.verdict:
            last, now = now, time.monotonic()
            passed = min(now - last, self.timeout / 2)  # more: this process was stopped itself
            self._stalled += passed
            for state in self._states.values():
                state["silent"] += passed
            self._send()
            while not self.verdict and (left := now + BEAT - time.monotonic()) > 0:
                self._receive(min(left, 0.1))
                self.verdict = self._judge()
        if self.verdict and not self._has_left:
            self._send(verdict=self.verdict)
            if self.rank != 0:
                print(f"quire: rank {self.rank} ends: {self.verdict}", file=sys.stderr, flush=True)
                os._exit(EXIT_STATUS)
            self.give_up()

    def _send(self, **more: object) -> None:
        with self._sending:
            self._said |= {"calls": self.calls(), **more}  # what was said once is said again
            for connection in list(self._connections.values()):
                with suppress(OSError):  # the next receive tells
                    connection.sendall(json.dumps(self._said).encode().ljust(MESSAGE))

    def _receive(self, seconds: float) -> None:
        by_socket = {connection: rank for rank, connection in self._connections.items()}
        for ready in select([*by_socket, *self._servers], [], [], seconds)[0]:
            connection, data = ready.accept()[0] if ready in self._servers else ready, b""
            connection.settimeout(1.0)
            with suppress(OSError):
                data = connection.recv(MESSAGE, socket.MSG_WAITALL)
            if len(data) == MESSAGE:
                state = json.loads(data)
                self._connections[state["rank"]], self._states[state["rank"]] = connection, state
            elif ready in by_socket:
                self._states[by_socket[ready]]["is_closed"] = True
                del self._connections[by_socket[ready]]

    def _judge(self) -> str:
        for rank, state in self._states.items():
            if state.get("verdict") or state.get("left"):
                return str(state["verdict"])
            if state.get("is_closed"):
                return f"rank {rank} died: its process has ended"
            if state["silent"] > self.timeout:
                return f"rank {rank} died: nothing was heard of it for {self.timeout:g} s"
        calls = {self.rank: self.calls()} | {r: s.get("calls", 0) for r, s in self._states.items()}
        if not self.is_stepping or sum(calls.values()) != self._sum:
            self._sum, self._stalled = sum(calls.values()), 0.0
        elif self._stalled > self.timeout + 2 * BEAT:
            least = [str(rank) for rank, count in calls.items() if count == min(calls.values())]
            return f"rank {', '.join(least)} is stuck: no progress for {self.timeout:g} s"
        return ""
