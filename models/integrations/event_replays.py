"""Answers to replay requests of `kv_events_zmq`, in a thread of its own."""

from __future__ import annotations

from collections import OrderedDict, deque
from threading import Lock
from time import sleep
from typing import Any

import zmq

END = (-1).to_bytes(8, "big", signed=True)
MAX_READERS = 64  # that are answered at once
MAX_WAITING = 8  # requests of one reader
MAX_REQUESTS, MAX_BATCHES = 32, 64  # received and sent between two pauses
PAUSE, STALLED_PAUSE = 1e-3, 2e-2  # seconds


class Kept:
    """The newest batches by number; for several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._lock = capacity, Lock()
        self._batches: OrderedDict[int, bytes] = OrderedDict()
        self.end = 0  # number after the newest

    def add(self, number: int, payload: bytes) -> None:
        """Keep a batch, at the cost of the oldest where there is no room."""
        with self._lock:
            self._batches[number] = payload
            self.end = number + 1
            if len(self._batches) > self._capacity:
                self._batches.popitem(last=False)

    def first(self, number: int, end: int) -> tuple[int, bytes] | None:
        """The first batch with a number in [number, end), None if there is none."""
        with self._lock:
            if self._batches:
                number = max(number, next(iter(self._batches)))
            while number < end:  # at most one number is missing between two batches
                if number in self._batches:
                    return number, self._batches[number]
                number += 1
        return None


class Replies:
    """Answers replay requests; `run` is the thread, which owns the socket.

    Attributes:
        readers: of each reader its requests [next number, end], of which the first is in progress;
            the reader that has taken nothing for longest comes first.
    """

    def __init__(self, socket: Any, topic: bytes, kept: Kept) -> None:
        self._socket, self._topic, self._kept = socket, topic, kept
        self.readers: OrderedDict[bytes, deque[list[int]]] = OrderedDict()

    def run(self) -> None:
        """Serve until the context ends."""
        moved = True
        try:
            while True:
                if not self.readers:
                    self._socket.poll()
                # Those who ask without end may not keep the interpreter from the engine.
                sleep(PAUSE if moved or not self.readers else STALLED_PAUSE)
                self.receive()
                moved = self.answer()
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)

    def receive(self) -> None:
        """Take requests, at most `MAX_REQUESTS`."""
        for _ in range(MAX_REQUESTS):
            if not self._socket.poll(0):
                return
            reader, *request = self._socket.recv_multipart()
            if len(request) != 2 or request[0] or len(request[1]) != 8:
                continue  # not a request
            if reader not in self.readers and len(self.readers) >= MAX_READERS:
                self.readers.popitem(last=False)
            waiting = self.readers.setdefault(reader, deque())
            if len(waiting) < MAX_WAITING:
                waiting.append([int.from_bytes(request[1], "big"), self._kept.end])

    def answer(self) -> bool:
        """Send at most `MAX_BATCHES` messages, one to each reader in turn; True if any was sent."""
        any_sent = False
        for _ in range(MAX_BATCHES // max(1, len(self.readers))):
            sent = [self._send_one(reader) for reader in list(self.readers)]
            if not any(sent):
                break
            any_sent = True
        return any_sent

    def _send_one(self, reader: bytes) -> bool:
        requests = self.readers[reader]
        found = self._kept.first(*requests[0])
        message = [b"", END, b""]
        if found is not None:
            message = [self._topic, found[0].to_bytes(8, "big"), found[1]]
        try:
            self._socket.send_multipart([reader, b"", *message], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:  # it left
            del self.readers[reader]
            return False
        self.readers.move_to_end(reader)
        if found is not None:
            requests[0][0] = found[0] + 1
        else:
            requests.popleft()
            if not requests:
                del self.readers[reader]
        return True
