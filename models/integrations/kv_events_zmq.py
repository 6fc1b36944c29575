"""KV-cache events on a ZMQ socket, in vLLM's schema, which SGLang and Dynamo read; extra `events`.

A batch is ``[ts, [event, ...], data_parallel_rank]`` in MessagePack; an event is a map with its
name under ``"type"``. A PUB socket sends ``[topic, number, batch]``, the number in 8 bytes,
big-endian. A DEALER asks the ROUTER socket with ``[empty, first number]`` and gets ``[empty, topic,
number, batch]`` for each batch still kept, then ``[empty, empty, -1, empty]``.
Source: vLLM `distributed/kv_events.py`, PR 42892 (maps) and PR 45177 (topic in replies).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from threading import Lock, Thread
from time import sleep
from typing import Any

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored, EventLog

try:
    import msgspec
    import zmq
except ImportError as error:
    raise ImportError(
        "kv_events_zmq needs the packages msgspec and pyzmq: pip install 'quire-attention[events]'"
    ) from error

MOST_EVENTS = 4096  # in a batch
END = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 1024
MAX_READERS, MAX_WAITING = 64, 8  # readers that are answered at once; requests of each
MAX_RECEIVED, MAX_SENT = 32, 64  # messages between two pauses of the replay thread
PAUSE, STALLED_PAUSE = 1e-3, 2e-2  # seconds
_KINDS = {"dense": "full_attention", "window": "sliding_window", "state": "mamba"}
_LORA = b"\0lora\0"


def lora_key(name: str) -> bytes:
    """Key of an adapter, for `extra_keys` of `KVCache.match`; any other key there is an image's.

    Raises:
        ValueError: the name is no text, or empty.
    """
    if not name:
        raise ValueError(f"name: expected a text that is not empty, got {name!r}")
    return _LORA + _encoded("name", name)


def _encoded(name: str, text: Any) -> bytes:
    """A text in UTF-8; ValueError for anything else, and for a surrogate."""
    try:
        return text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise ValueError(f"{name}: expected a text, got {text!r}") from error


def encode_batch(
    events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared],
    *,
    ts: float,
    data_parallel_rank: int | None = None,
    int_hashes: bool = False,
    lora_ids: Mapping[str, int] | None = None,
    session_of: Callable[[Hashable], str | None] | None = None,
) -> bytes:
    """One batch as MessagePack. An event of several groups or adapters becomes one for each.

    Args:
        events: from `EventLog.take`.
        ts: seconds since 1970.
        data_parallel_rank: rank of the engine, if there are several.
        int_hashes: send the last 8 bytes of each hash as an unsigned integer, which vLLM does by
            default and Dynamo expects, instead of all 32 bytes.
        lora_ids: number of each adapter, beside its name.
        session_of: session of a request id, or None.
    """

    def hash_of(value: bytes) -> bytes | int:
        return int.from_bytes(value[-8:], "big") if int_hashes else value

    maps: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            maps.append({"type": "AllBlocksCleared"})
            continue
        if isinstance(event, BlockRemoved):
            common = {
                "type": "BlockRemoved",
                "block_hashes": [hash_of(h) for h in event.block_hashes],
                "medium": event.medium,
            }
            maps += [common | {"group_idx": g} for g in event.groups]
            continue
        for lora, part in _by_lora(event):
            common = _stored(part, lora)
            common["block_hashes"] = [hash_of(h) for h in part.block_hashes]
            common["parent_block_hash"] = None if part.parent is None else hash_of(part.parent)
            common["lora_id"] = (lora_ids or {}).get(lora or "")
            session = None if session_of is None else session_of(part.request_id)
            if session is not None:
                common["session_id"] = session
            named = zip(part.groups, part.names, strict=True)
            maps += [common | {"group_idx": g, "group_name": name} for g, name in named]
    # Always three: Dynamo reads no batch of two.
    return msgspec.msgpack.encode([ts, maps, data_parallel_rank])


def _by_lora(event: BlockStored) -> Iterator[tuple[str | None, BlockStored]]:
    """Split an event where the adapter of its blocks changes: a map names one.

    Yields the adapter's name, None for none; several over one block are joined by ``+``.
    """
    if not event.extra_keys:
        yield None, event
        return
    names = [
        "+".join(_text(k.removeprefix(_LORA)) for *_, k in keys if k.startswith(_LORA))
        for keys in event.extra_keys
    ]
    size, first = event.block_size, 0
    for name, group in groupby(names):
        stop = first + len(list(group))
        yield (
            name or None,
            replace(
                event,
                block_hashes=event.block_hashes[first:stop],
                parent=event.block_hashes[first - 1] if first else event.parent,
                start=event.start + first * size,
                token_ids=event.token_ids[first * size : stop * size],
                extra_keys=event.extra_keys[first:stop],
            ),
        )
        first = stop


def _stored(event: BlockStored, lora: str | None) -> dict[str, Any]:
    """The fields of an event of one adapter, but for hashes and numbers."""
    fields: dict[str, Any] = {
        "type": "BlockStored",
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "medium": event.medium,
        "lora_name": lora,
        "kv_cache_spec_kind": _KINDS[event.kind],
        "token_start": event.start,  # of this project: position of the first token
    }
    if event.sliding_window is not None:
        fields["kv_cache_spec_sliding_window"] = event.sliding_window
    # Of each block its images: identifier, and first token relative to the block's.
    images = [
        [
            (_text(key), start - event.start - i * event.block_size)
            for start, _, key in keys
            if not key.startswith(_LORA)
        ]
        for i, keys in enumerate(event.extra_keys or ((),) * len(event.block_hashes))
    ]
    keys: list[list[Any]] = [[*([lora] if lora else []), *of_block] for of_block in images]
    if salt := _text(event.salt):
        fields["cache_salt"] = salt  # of SGLang and Dynamo; vLLM adds it to the first block's keys
        if event.start == 0 and keys:
            keys[0].append(salt)
    if any(keys):
        fields["extra_keys"] = [of_block or None for of_block in keys]
    if any(images):  # for Dynamo
        objects = [[{"mm_hash": _image_hash(name), "offsets": []} for name, _ in x] for x in images]
        fields["block_mm_infos"] = [{"mm_objects": x} if x else None for x in objects]
    return fields


def _text(value: bytes) -> str:
    """`value` as text, or as hexadecimal digits if it is none."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    return text if text.isprintable() else value.hex()


def _image_hash(identifier: str) -> int:
    """Dynamo's number of an image: the first 16 of 64 hexadecimal digits, else XXH3 of the text."""
    if len(identifier) == 64 and not set(identifier.lower()) - set("0123456789abcdef"):
        return int(identifier[:16], 16)
    try:
        import xxhash
    except ImportError as error:
        raise ImportError(
            "images with identifiers that are not 64 hexadecimal digits need the package xxhash: "
            "pip install 'quire-attention[events]'"
        ) from error
    value: int = xxhash.xxh3_64_intdigest(identifier.encode())
    return value


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
        encoding: options of `encode_batch`: data_parallel_rank, int_hashes, lora_ids, session_of.

    Attributes:
        endpoint, replay_endpoint: where the sockets are bound, ports filled in.
        next_number: number of the next batch.

    Raises:
        ValueError: an endpoint that cannot be bound, such as a port in use; a topic that is no
            text; a num_kept or queue_size that is not an int in 0 .. 2**31 - 1.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        num_kept: int = 10_000,
        queue_size: int = 100_000,
        **encoding: Any,
    ) -> None:
        for name, number in (("num_kept", num_kept), ("queue_size", queue_size)):
            if type(number) is not int or not 0 <= number < 2**31:
                raise ValueError(f"{name}: expected an int in 0..{2**31 - 1}, got {number!r}")
        self.next_number, self._next_event = 0, 0
        self.replay_endpoint: str | None = None
        self._topic, self._encode = _encoded("topic", topic), partial(encode_batch, **encoding)
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
    """Answers replay requests until its context ends; the thread owns the socket.

    Readers are answered by turns, a batch each, as fast as they read; a batch that is dropped
    before its turn leaves a gap. Work between two pauses is bounded, so readers that ask without
    end do not keep the interpreter from the engine. Past MAX_READERS a new reader takes the place
    of the one that has taken nothing for longest.

    Attributes:
        readers: requests of each reader as [next number, end], of which the first is in progress;
            the reader that has taken nothing for longest comes first.
    """

    def __init__(self, socket: Any, topic: bytes, num_kept: int) -> None:
        super().__init__(name="kv-events-replay", daemon=True)
        self._socket, self._topic, self._num_kept = socket, topic, num_kept
        self._lock, self._end = Lock(), 0
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self.readers: OrderedDict[bytes, deque[list[int]]] = OrderedDict()

    def keep(self, number: int, payload: bytes) -> None:
        """Keep a batch, at the cost of the oldest where there is no room; for any thread."""
        with self._lock:
            self._kept[number], self._end = payload, number + 1
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)

    def _first(self, number: int, end: int) -> tuple[int, bytes] | None:
        """The first kept batch with a number in [number, end)."""
        with self._lock:
            if self._kept:
                number = max(number, next(iter(self._kept)))
            for n in range(number, min(end, number + 2)):  # between two batches one number may miss
                if n in self._kept:
                    return n, self._kept[n]
        return None

    def run(self) -> None:
        """Serve until the context ends."""
        moved = True
        try:
            while True:
                if not self.readers:
                    self._socket.poll()
                sleep(PAUSE if moved or not self.readers else STALLED_PAUSE)
                self.receive()
                moved = self.answer()
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)

    def receive(self) -> None:
        """Take requests, at most MAX_RECEIVED."""
        for _ in range(MAX_RECEIVED):
            if not self._socket.poll(0):
                return
            reader, *request = self._socket.recv_multipart()
            if len(request) != 2 or request[0] or len(request[1]) != 8:
                continue  # not a request
            if reader not in self.readers and len(self.readers) >= MAX_READERS:
                self.readers.popitem(last=False)
            waiting = self.readers.setdefault(reader, deque())
            if len(waiting) < MAX_WAITING:
                waiting.append([int.from_bytes(request[1], "big"), self._end])

    def answer(self) -> bool:
        """Send at most MAX_SENT messages, one to each reader in turn; True if any was sent."""
        any_sent = False
        for _ in range(MAX_SENT // max(1, len(self.readers))):
            if not any([self._send_one(reader) for reader in list(self.readers)]):
                break
            any_sent = True
        return any_sent

    def _send_one(self, reader: bytes) -> bool:
        requests = self.readers[reader]
        found = self._first(*requests[0])
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
