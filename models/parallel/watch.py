"""Notices that a rank has died, failed or is stuck, and ends the others with a message that names it.

Every other rank has a connection to rank 0, and both ends say each second how far they are::

    the connection breaks       that process is dead: at once
    nothing is heard            it does not run: after ``timeout`` seconds
    nobody gets any further     those that have sent the fewest messages are stuck: after ``timeout``

Rank 0 tells the others what it found. They print it and end; rank 0 is somebody's program, so that
there the call that waits fails, with `RankError`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

BEAT = 1.0  # seconds between two signs of life
GRACE = 10.0  # seconds for rank 0 to notice that its call fails, before its process ends
FAILED = 1  # exit status


class RankError(RuntimeError):
    """Another rank died, failed or is stuck; the message says which one, and how."""


class Peer:
    """One end of a connection: lines of JSON both ways."""

    def __init__(self, connection: socket.socket, rank: int = -1) -> None:
        self.connection, self.rank = connection, rank
        self.heard, self.progress, self.error = time.monotonic(), 0, ""
        self.is_closed, self.is_leaving = False, False
        self._unread = b""

    def say(self, **message: Any) -> None:
        """Sends a message; to a peer that is gone, nothing."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_closed = True

    def read(self) -> list[dict[str, Any]]:
        """What came since the last call, which something did."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            data = b""
        self.is_closed = self.is_closed or not data
        self.heard = time.monotonic()
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            self.progress = message.get("progress", self.progress)
            self.error = message.get("error", self.error)
            self.is_leaving = self.is_leaving or "leaving" in message
        return messages


class Watch:
    """Of one rank; a thread of its own.

    Args:
        rank: this one.
        peers: rank 0's are all others; another rank's is rank 0.
        progress: messages sent so far, of which all ranks send the same.
        timeout: seconds.
        give_up: ends what waits for other ranks, so that it fails.

    Attributes:
        is_busy: whether the ranks are at work together; while they are not, nobody gets further.
    """

    def __init__(
        self,
        rank: int,
        peers: list[Peer],
        *,
        progress: Callable[[], int],
        timeout: float,
        give_up: Callable[[], None],
    ) -> None:
        self.is_busy = False
        self._rank, self._peers, self._timeout = rank, peers, timeout
        self._progress, self._give_up = progress, give_up
        self._verdict = ""
        self._found, self._ended, self._noticed = (threading.Event() for _ in range(3))
        self._further = (time.monotonic(), -1)  # when somebody got further, and the sum of all
        self._thread = threading.Thread(target=self._run, name="quire-watch", daemon=True)
        self._thread.start()

    def verdict(self, wait: float = 0.0) -> str:
        """What happened to a rank, waiting a while for it to be known; "" = nothing known.

        Rank 0's process is then not ended: the caller is about to fail.
        """
        found = self._verdict if self._found.wait(wait) else ""
        if found:
            self._noticed.set()
        return found

    def fail(self, error: str) -> None:
        """Says that this rank cannot go on; the others end."""
        self._ended.set()
        self._noticed.set()
        for peer in self._peers:
            kind = "verdict" if self._rank == 0 else "error"
            peer.say(**{kind: f"rank {self._rank} failed: {error}"})
        self._close()

    def close(self) -> None:
        """Says that this rank is done; nobody is watched any more."""
        self._ended.set()
        self._noticed.set()
        for peer in self._peers:
            peer.say(leaving=True)
        self._close()

    def _close(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT)
        for peer in self._peers:
            peer.connection.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            for peer in self._peers:
                peer.say(progress=self._progress())
            until = time.monotonic() + BEAT
            while not self._ended.is_set() and (left := until - time.monotonic()) > 0:
                by_socket = {p.connection: p for p in self._peers if not p.is_closed}
                if not by_socket:
                    break
                # Short, as `close` waits for this thread.
                for ready in select.select(list(by_socket), [], [], min(left, 0.1))[0]:
                    for message in by_socket[ready].read():
                        if "verdict" in message:
                            self._end(message["verdict"])
                            return
                if any(p.is_closed for p in self._peers):
                    break
            if self._ended.is_set():
                return
            if all(peer.is_leaving for peer in self._peers):
                return
            if trouble := self._trouble():
                self._end(trouble)
                return

    def _trouble(self) -> str:
        now = time.monotonic()
        for peer in self._peers:
            if peer.error:
                return peer.error
        for peer in self._peers:
            if peer.is_closed and not peer.is_leaving:
                return f"rank {peer.rank} died: its process has ended"
        for peer in self._peers:
            if not peer.is_leaving and now - peer.heard > self._timeout:
                return f"rank {peer.rank} is stuck: nothing was heard of it for {self._timeout:g} s"
        if self._rank != 0:
            return ""
        progress = {0: self._progress()} | {peer.rank: peer.progress for peer in self._peers}
        if sum(progress.values()) != self._further[1] or not self.is_busy:
            self._further = now, sum(progress.values())
        elif now - self._further[0] > self._timeout:
            least = min(progress.values())
            behind = [rank for rank, count in sorted(progress.items()) if count == least]
            if len(behind) == len(progress):
                return f"all ranks are stuck: none has got any further for {self._timeout:g} s"
            names = "rank " + ", ".join(map(str, behind))
            return f"{names} is stuck: the other ranks have waited for {self._timeout:g} s"
        return ""

    def _end(self, verdict: str) -> None:
        """Tells all others; ends this process, unless somebody sees to that."""
        if self._rank != 0:
            print(f"quire: rank {self._rank} ends: {verdict}", file=sys.stderr, flush=True)
            os._exit(FAILED)
        self._verdict = verdict
        for peer in self._peers:
            peer.say(verdict=verdict)
        self._found.set()
        self._give_up()
        if not self._noticed.wait(GRACE) and self.is_busy:
            print(f"quire: {verdict}", file=sys.stderr, flush=True)
            os._exit(FAILED)


def connect(
    rank: int, size: int, exchange: Callable[[Any], Any], host: str, seconds: float
) -> list[Peer]:
    """Connections of rank 0 with all others.

    Args:
        exchange: gives every rank what rank 0 has.
        host: address of rank 0's machine.
        seconds: that it may take.

    Raises:
        RankError: naming the ranks that did not come.
    """
    if rank != 0:
        peer = Peer(socket.create_connection((host, exchange(None)), timeout=seconds), rank=0)
        peer.say(rank=rank)
        peer.connection.settimeout(seconds)
        return [peer]
    peers: dict[int, Peer] = {}
    with socket.create_server(("" if host != "127.0.0.1" else host, 0)) as server:
        server.settimeout(seconds)
        exchange(server.getsockname()[1])
        while len(peers) < size - 1:
            try:
                connection, _ = server.accept()
            except OSError:
                missing = sorted(set(range(1, size)) - set(peers))
                raise RankError(f"ranks {missing} did not come within {seconds:g} s") from None
            connection.settimeout(seconds)
            peer = Peer(connection)
            said: list[dict[str, Any]] = []
            while not said and not peer.is_closed:
                said = peer.read()
            if said:
                peer.rank = said[0]["rank"]
                peers[peer.rank] = peer
    return [peers[rank] for rank in sorted(peers)]
