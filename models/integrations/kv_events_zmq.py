"""KV-cache events on a ZMQ socket, as vLLM sends them; extra `events`.

A PUB socket sends ``[topic, number, batch]``, the number in 8 bytes, big-endian; `kv_events` makes
the batch. A DEALER asks the ROUTER socket with ``[empty, first number]`` and gets ``[empty, topic,
number, batch]`` for each batch still kept, then ``[empty, empty, -1, empty]``.
Source: vLLM `distributed/kv_events.py`, PR 45177 (topic in replies).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from threading import Lock, Thread
from time import sleep
from typing import Any

from quire.kvcore import EventLog

from .kv_events import encode_batch, encoded_text

try:
    import zmq
except ImportError as error:
    raise ImportError(
        "kv_events_zmq needs the package pyzmq: pip install 'quire-attention[events]'"
    ) from error

MOST_EVENTS = 4096  # in a batch
END = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 1024
PAUSE, MOST_SENT = 1e-3, 64  # seconds of the replay thread, and messages between them
PATIENCE_MS, MOST_STALLED = 500, 1024  # with a reader that takes nothing; such readers


class Publisher:
    """Publishes an `EventLog`; a thread of its own answers replay requests.

    `publish` and `close` are for one thread. Sends never wait: a reader that is too slow misses
    batches, sees a gap in their numbers, and asks for a replay. Events that the log itself dropped
    leave a gap that no replay fills: the reader must start over.

    Args:
        endpoint: where to bind the PUB socket, e.g. ``"tcp://127.0.0.1:5557"``; port 0 or ``*``
            picks a free one.
        replay_endpoint: where to bind the ROUTER socket; None offers no replay.
        topic: first frame of each message.
        num_kept: batches kept for replay.
        queue_size: messages that the PUB socket holds for each slow reader.
        encoding: options of `encode_batch`: data_parallel_rank, int_hashes, session_of.

    Attributes:
        endpoint, replay_endpoint: where the sockets are bound, ports filled in.
        next_number: number of the next batch.

    Raises:
        ValueError: an endpoint that cannot be bound, such as a port in use; a topic that is no
            text; a num_kept or queue_size that is not an int in 0 .. 2**31 - 1.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "",
        num_kept: int = 10_000, queue_size: int = 100_000, **encoding: Any,
    ) -> None:  # fmt: skip
        for name, number in (("num_kept", num_kept), ("queue_size", queue_size)):
            if type(number) is not int or not 0 <= number < 2**31:
                raise ValueError(f"{name}: expected an int in 0..{2**31 - 1}, got {number!r}")
        self.next_number, self._next_event = 0, 0
        self.replay_endpoint: str | None = None
        self._topic, self._encode = encoded_text("topic", topic), partial(encode_batch, **encoding)
        self._encode((), ts=0.0)  # names an option that does not exist
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replays: ReplayServer | None = None
        try:
            self.endpoint = _bind(self._live, endpoint, queue_size)
            if replay_endpoint is not None:
                socket = self._context.socket(zmq.ROUTER)
                self._replays = ReplayServer(socket, self._topic, num_kept)
                socket.router_mandatory = True  # an error where a reader does not read, not a loss
                socket.maxmsgsize = MAX_REQUEST_BYTES
                self.replay_endpoint = _bind(socket, replay_endpoint, queue_size=64)
        except BaseException:
            self._context.destroy(0)
            raise
        if self._replays is not None:
            self._replays.start()

    def publish(self, log: EventLog, *, ts: float) -> int:
        """Send what `log` has, in batches of at most MOST_EVENTS; returns the number of events."""
        sent = 0
        while True:
            first, events = log.take(MOST_EVENTS)
            if not events:
                return sent
            sent += len(events)
            self.next_number += first != self._next_event  # lost events: a batch nobody can replay
            self._next_event = first + len(events)
            payload = self._encode(events, ts=ts)
            self._live.send_multipart((self._topic, self.next_number.to_bytes(8, "big"), payload))
            if self._replays is not None:
                self._replays.keep(self.next_number, payload)
            self.next_number += 1

    def close(self) -> None:
        """Close the sockets and end the thread."""
        self._live.close()
        self._context.term()  # waits for the thread to close its socket
        if self._replays is not None:
            self._replays.join()


def _bind(socket: Any, endpoint: str, queue_size: int) -> str:
    socket.linger, socket.sndhwm = 0, queue_size
    try:
        socket.bind(endpoint)
    except (zmq.ZMQError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(
            f"endpoint: expected one that can be bound, got {endpoint!r}: {error}"
        ) from error
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound


class ReplayServer(Thread):
    """Answers replay requests one by one until its context ends; the thread owns the socket.

    A reader that takes nothing for PATIENCE_MS is left, and has to ask again; until it reads, its
    requests get what there is room for. After each request and each MOST_SENT messages the thread
    rests, so that it leaves the interpreter to the engine.
    """

    def __init__(self, socket: Any, topic: bytes, num_kept: int) -> None:
        super().__init__(name="kv-events-replay", daemon=True)
        self._socket, self._topic, self._lock = socket, topic, Lock()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._stalled: set[bytes] = set()  # readers

    def keep(self, number: int, payload: bytes) -> None:
        """Keep a batch, at the cost of the oldest where there is no room; for any thread."""
        with self._lock:
            self._kept.append((number, payload))

    def run(self) -> None:
        try:
            while True:
                reader, *request = self._socket.recv_multipart()
                sleep(PAUSE)
                if len(request) == 2 and not request[0] and len(request[1]) == 8:
                    self._answer(reader, int.from_bytes(request[1], "big"))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)

    def _answer(self, reader: bytes, first: int) -> None:
        """Send the batches that are kept now, from number ``first`` on."""
        with self._lock:
            kept = list(self._kept)
        messages = [(self._topic, n.to_bytes(8, "big"), batch) for n, batch in kept if n >= first]
        self._socket.sndtimeo = 0 if reader in self._stalled else PATIENCE_MS
        try:
            for num_sent, message in enumerate([*messages, (b"", END, b"")], 1):
                self._socket.send_multipart([reader, b"", *message])
                if num_sent % MOST_SENT == 0:
                    sleep(PAUSE)
                if reader in self._stalled:  # it reads again
                    self._stalled.remove(reader)
                    self._socket.sndtimeo = PATIENCE_MS
        except zmq.Again:
            if len(self._stalled) == MOST_STALLED:
                self._stalled.clear()
            self._stalled.add(reader)
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:  # it left
            self._stalled.discard(reader)
