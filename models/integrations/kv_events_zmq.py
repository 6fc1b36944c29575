"""KV-cache events on the wire, in the schema that vLLM publishes.

So existing routers can read them.

A batch is ``[ts, [event, ...], data_parallel_rank]`` in MessagePack; an event is a map with its name
under ``"type"``. Readers must skip fields they do not know. Live
batches are sent by a PUB socket as ``[topic, number, batch]``, number 8 bytes big-endian. A replay
request to the ROUTER socket is ``[empty, first number]`` from a DEALER (which must read all
answers), answered by ``[empty, topic, number, batch]`` for each batch still kept, then ``[empty,
empty, -1, empty]``.

Source: vLLM `distributed/kv_events.py`, with map-encoded events (vLLM PR 42892) and the topic in
    replies (PR 45177).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from threading import Lock, Thread
from time import sleep
from typing import Any

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored, EventLog

from .event_fields import by_lora, images_of, mm_infos, short_hash, text_of

try:
    import msgspec
    import zmq
except ImportError as error:
    raise ImportError(
        "kv_events_zmq needs the packages msgspec and pyzmq: pip install 'quire[events]'"
    ) from error

END = (-1).to_bytes(8, "big", signed=True)
MOST_EVENTS = 4096  # of a batch; an announcement of a large cache is many
MAX_READERS = 64  # that are answered at once
MAX_WAITING = 8  # requests of one reader
MAX_REQUEST_BYTES = 1024
MAX_REQUESTS, MAX_BATCHES = 32, 64  # received and sent in a turn of the replay thread
REPLAY_QUEUE = 64  # batches that the socket holds for a reader
TURN_PAUSE, STALLED_PAUSE = 1e-3, 2e-2  # seconds
_KINDS = {"dense": "full_attention", "window": "sliding_window", "state": "mamba"}


def encode_batch(
    events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared],
    *,
    ts: float,
    data_parallel_rank: int | None = None,
    int_hashes: bool = False,
    lora_ids: Mapping[str, int] | None = None,
    session_of: Callable[[Hashable], str | None] | None = None,
) -> bytes:
    """One batch as MessagePack. An event of several groups becomes one for each, and one of several
    adapters too.

    Args:
        events: from `EventLog.take`.
        ts: seconds since 1970.
        data_parallel_rank: of the engine, if it has several.
        int_hashes: send the last 8 bytes of each hash as an unsigned integer, which vLLM does by
            default and Dynamo expects, instead of all 32 bytes.
        lora_ids: number of each adapter, if readers want one beside its name.
        session_of: session of a request id, or None.

    Returns:
        The payload of a message.
    """
    ids, sessions = lora_ids or {}, session_of or (lambda request_id: None)
    maps: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, BlockStored):
            for name, part in by_lora(event):
                of_part = {"lora_id": ids.get(name or ""), "lora_name": name}
                if (session := sessions(part.request_id)) is not None:
                    of_part["session_id"] = session
                maps += _stored(part, of_part, int_hashes)
        else:
            maps += _gone(event, int_hashes)
    # Of three, whatever the rank: Dynamo reads no batch of two.
    return msgspec.msgpack.encode([ts, maps, data_parallel_rank])


def _gone(event: BlockRemoved | AllBlocksCleared, int_hashes: bool) -> list[dict[str, Any]]:
    if isinstance(event, AllBlocksCleared):
        return [{"type": "AllBlocksCleared"}]
    hashes = [_hash(h, int_hashes) for h in event.block_hashes]
    common = {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium}
    return [{**common, "group_idx": g} for g in event.groups]


def _stored(event: BlockStored, of_part: dict[str, Any], int_hashes: bool) -> list[dict[str, Any]]:
    """An event of one adapter, with what is known of it and of the request."""
    parent = None if event.parent is None else _hash(event.parent, int_hashes)
    common = {
        "type": "BlockStored",
        "block_hashes": [_hash(h, int_hashes) for h in event.block_hashes],
        "parent_block_hash": parent,
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "medium": event.medium,
        **of_part,
        "kv_cache_spec_kind": _KINDS[event.kind],
        "token_start": event.start,  # of this project: position of the first token
    }
    salt, name = text_of(event.salt), of_part["lora_name"]
    keys = [[*([name] if name else []), *images] for images in images_of(event)]
    if salt:
        common["cache_salt"] = salt  # of SGLang and Dynamo; vLLM names it of the first block
        if event.start == 0 and keys:
            keys[0].append(salt)
    if any(keys):
        common["extra_keys"] = [of_block or None for of_block in keys]
    if any(infos := mm_infos(event)):
        common["block_mm_infos"] = infos  # Dynamo takes images from here only
    if event.sliding_window is not None:
        common["kv_cache_spec_sliding_window"] = event.sliding_window
    return [
        {**common, "group_idx": g, "group_name": name}
        for g, name in zip(event.groups, event.names, strict=True)
    ]


def _hash(value: bytes, as_int: bool) -> bytes | int:
    return short_hash(value) if as_int else value


class Publisher:
    """Publishes an `EventLog`; a thread of its own answers replay requests.

    `publish` and `close` are for one thread.

    Sends never wait: a reader that is too slow misses batches, sees a gap in their numbers, and
    asks for a replay. Events that the log itself dropped leave a gap too, which no replay can fill:
    the reader must start over.

    A replay comes as fast as its reader reads; a batch that is dropped before its turn leaves a gap
    in the numbers. `MAX_READERS` are answered in turns, each its
    requests in order; of one reader's requests that wait, all past `MAX_WAITING` are ignored, and a
    new reader takes the place of the one that has not read for longest. So no reader costs
    `publish` anything, nor much memory, whatever it asks for.

    Args:
        endpoint: where to bind the PUB socket, e.g. ``"tcp://127.0.0.1:5557"``; port 0 or ``*``
            picks a free one.
        replay_endpoint: where to bind the ROUTER socket; None offers no replay.
        topic: first frame of each message.
        num_kept: batches kept for replay.
        queue_size: messages that the PUB socket holds for each slow reader.
        data_parallel_rank, int_hashes, lora_ids, session_of: as for `encode_batch`.

    Attributes:
        endpoint, replay_endpoint: where the sockets are bound, ports filled in.
        next_number: number of the next batch.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        num_kept: int = 10_000,
        queue_size: int = 100_000,
        data_parallel_rank: int | None = None,
        int_hashes: bool = False,
        lora_ids: Mapping[str, int] | None = None,
        session_of: Callable[[Hashable], str | None] | None = None,
    ) -> None:
        self.next_number = 0
        self.replay_endpoint: str | None = None
        self._topic = topic.encode()
        self._options: dict[str, Any] = {
            "data_parallel_rank": data_parallel_rank,
            "int_hashes": int_hashes,
            "lora_ids": lora_ids,
            "session_of": session_of,
        }
        self._kept = _Kept(num_kept)
        self._next_event = 0
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        self._thread: Thread | None = None
        try:
            self._live, self.endpoint = self._bind(zmq.PUB, endpoint, queue_size)
            if replay_endpoint is not None:
                replay, self.replay_endpoint = self._bind(zmq.ROUTER, replay_endpoint, REPLAY_QUEUE)
                self._sockets.remove(replay)  # the thread's from here on
                replies = _Replies(replay, self._topic, self._kept)
                self._thread = Thread(target=replies.run, name="kv-events-replay", daemon=True)
                self._thread.start()
        except BaseException:
            self.close()
            raise

    def _bind(self, kind: int, endpoint: str, queue_size: int) -> tuple[Any, str]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.linger = 0
        socket.sndhwm = queue_size
        if kind == zmq.ROUTER:
            socket.router_mandatory = (
                True  # says so when a reader does not read, instead of dropping
            )
            socket.maxmsgsize = MAX_REQUEST_BYTES
        socket.bind(endpoint)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, log: EventLog, *, ts: float) -> int:
        """Send what `log` has, in batches of at most MOST_EVENTS (none if it is empty).

        Returns:
            Events sent.
        """
        sent = 0
        while True:
            first, events = log.take(MOST_EVENTS)
            if not events:
                return sent
            sent += len(events)
            self.next_number += first != self._next_event  # lost events: a batch nobody can replay
            self._next_event = first + len(events)
            payload = encode_batch(events, ts=ts, **self._options)
            self._live.send_multipart((self._topic, _wire(self.next_number), payload))
            self._kept.add(self.next_number, payload)
            self.next_number += 1

    def close(self) -> None:
        """Close the sockets and end the thread."""
        for socket in self._sockets:
            socket.close()
        self._context.term()  # waits for the thread to close its socket
        if self._thread is not None:
            self._thread.join()


class _Kept:
    """The newest batches by number; for several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._batches: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()
        self.end = 0  # number after the newest

    def add(self, number: int, payload: bytes) -> None:
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


class _Replies:
    """Answers replay requests in turns of bounded work; `run` is the thread, which owns the socket.

    Attributes:
        readers: of each reader its requests that wait, [next number, end], the first is in
            progress.
        stalled: turns since a reader last took a batch.
    """

    def __init__(self, socket: Any, topic: bytes, kept: _Kept) -> None:
        self._socket, self._topic, self._kept = socket, topic, kept
        self.readers: OrderedDict[bytes, deque[list[int]]] = OrderedDict()
        self.stalled: dict[bytes, int] = {}

    def run(self) -> None:
        """Until the context ends."""
        try:
            moved = False
            while True:
                if not self.readers:
                    self._socket.poll()
                # A pause after each turn: those who ask without end may not keep the interpreter
                # from the engine.
                sleep(TURN_PAUSE if moved or not self.readers else STALLED_PAUSE)
                self.receive()
                moved = self.turn()
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)

    def receive(self) -> None:
        """Take requests, at most `MAX_REQUESTS`."""
        for _ in range(MAX_REQUESTS):
            if not self._socket.poll(0):
                return
            frames = self._socket.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue  # not a request
            reader = frames[0]
            if reader not in self.readers and len(self.readers) >= MAX_READERS:
                self._forget(max(self.stalled, key=self.stalled.__getitem__))
            waiting = self.readers.setdefault(reader, deque())
            self.stalled.setdefault(reader, 0)
            if len(waiting) < MAX_WAITING:
                waiting.append([int.from_bytes(frames[2], "big"), self._kept.end])

    def turn(self) -> bool:
        """Send at most `MAX_BATCHES` messages, one to each reader in turn.

        Returns whether any was sent.
        """
        sent = False
        for _ in range(MAX_BATCHES // max(1, len(self.readers))):
            going = False
            for reader in list(self.readers):
                going |= self._send_one(reader)
            sent |= going
            if not going:
                break
        return sent

    def _send_one(self, reader: bytes) -> bool:
        request = self.readers[reader][0]
        found = self._kept.first(*request)
        number, payload = found or (None, b"")
        last = (reader, b"", b"", END, b"")
        message = last if number is None else (reader, b"", self._topic, _wire(number), payload)
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            self.stalled[reader] += 1
            return False
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:  # it left
            self._forget(reader)
            return False
        self.stalled[reader] = 0
        if number is not None:
            request[0] = number + 1
            return True
        self.readers[reader].popleft()
        if not self.readers[reader]:
            self._forget(reader)
        return True

    def _forget(self, reader: bytes) -> None:
        del self.readers[reader], self.stalled[reader]


def _wire(number: int) -> bytes:
    return number.to_bytes(8, "big")
