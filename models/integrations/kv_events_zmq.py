"""KV-cache events on the wire, in the schema that vLLM publishes, so that existing routers can read them.

A batch is ``[ts, [event, ...], data_parallel_rank]`` in MessagePack, the rank left out when None; an event is a map
with its name under ``"type"``. Readers must skip fields they do not know. Live batches are sent by a PUB socket as
``[topic, number, batch]``, number 8 bytes big-endian. A replay request to the ROUTER socket is ``[empty, first number]``
from a DEALER (which must read all answers), answered by ``[empty, topic, number, batch]`` for each batch still kept,
then ``[empty, empty, -1, empty]``.

Source: vLLM `distributed/kv_events.py`, with map-encoded events (vLLM PR 42892) and the topic in replies (PR 45177).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored, EventLog

try:
    import msgspec
    import zmq
except ImportError as error:
    raise ImportError(
        "kv_events_zmq needs the packages msgspec and pyzmq: pip install 'quire[events]'"
    ) from error

END = (-1).to_bytes(8, "big", signed=True)
_KINDS = {"dense": "full_attention", "window": "sliding_window", "state": "mamba"}


def encode_batch(
    events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared],
    *,
    ts: float,
    data_parallel_rank: int | None = None,
    int_hashes: bool = False,
) -> bytes:
    """One batch as MessagePack. An event of several groups becomes one for each.

    Args:
        events: from `EventLog.take`.
        ts: seconds since 1970.
        data_parallel_rank: of the engine, if it has several.
        int_hashes: send the last 8 bytes of each hash as an unsigned integer, which older readers expect, instead of
            all 32 bytes.

    Returns:
        The payload of a message.
    """
    maps = [m for event in events for m in _maps(event, int_hashes)]
    batch: list[Any] = [ts, maps]
    if data_parallel_rank is not None:
        batch.append(data_parallel_rank)
    return msgspec.msgpack.encode(batch)


def _maps(
    event: BlockStored | BlockRemoved | AllBlocksCleared, int_hashes: bool
) -> list[dict[str, Any]]:
    if isinstance(event, AllBlocksCleared):
        return [{"type": "AllBlocksCleared"}]
    hashes = [_hash(h, int_hashes) for h in event.block_hashes]
    if isinstance(event, BlockRemoved):
        common = {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium}
        return [{**common, "group_idx": g} for g in event.groups]
    parent = None if event.parent is None else _hash(event.parent, int_hashes)
    common = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "lora_id": None,
        "medium": event.medium,
        "lora_name": None,
        "kv_cache_spec_kind": _KINDS[event.kind],
        "token_start": event.start,  # of this project: position of the first token
    }
    if event.sliding_window is not None:
        common["kv_cache_spec_sliding_window"] = event.sliding_window
    return [
        {**common, "group_idx": g, "group_name": name}
        for g, name in zip(event.groups, event.names, strict=True)
    ]


def _hash(value: bytes, as_int: bool) -> bytes | int:
    return int.from_bytes(value[-8:], "big") if as_int else value


class Publisher:
    """Publishes an `EventLog`, and answers replay requests when it is called. Not for several threads.

    Sends never wait: a reader that is too slow misses batches, sees a gap in their numbers, and asks for a replay.
    Events that the log itself dropped leave a gap too, which no replay can fill: the reader must start over.

    Args:
        endpoint: where to bind the PUB socket, e.g. ``"tcp://127.0.0.1:5557"``; port 0 or ``*`` picks a free one.
        replay_endpoint: where to bind the ROUTER socket; None offers no replay.
        topic: first frame of each message.
        num_kept: batches kept for replay.
        queue_size: messages that a socket holds for each slow reader.
        data_parallel_rank, int_hashes: as for `encode_batch`.

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
    ) -> None:
        self.next_number = 0
        self.replay_endpoint: str | None = None
        self._topic = topic.encode()
        self._rank, self._int_hashes = data_parallel_rank, int_hashes
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=num_kept)
        self._next_event = 0
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        try:
            self._live, self.endpoint = self._bind(zmq.PUB, endpoint, queue_size)
            if replay_endpoint is not None:
                size = max(queue_size, num_kept + 1)
                self._replay, self.replay_endpoint = self._bind(zmq.ROUTER, replay_endpoint, size)
        except BaseException:
            self.close()
            raise

    def _bind(self, kind: int, endpoint: str, queue_size: int) -> tuple[Any, str]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.linger = 0
        socket.sndhwm = queue_size
        socket.bind(endpoint)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, log: EventLog, *, ts: float) -> int:
        """Send what `log` has as one batch (none if it is empty), then answer replay requests.

        Returns:
            Events sent.
        """
        first, events = log.take()
        if events:
            self.next_number += first != self._next_event  # lost events: a batch nobody can replay
            self._next_event = first + len(events)
            number = self.next_number.to_bytes(8, "big")
            payload = encode_batch(
                events, ts=ts, data_parallel_rank=self._rank, int_hashes=self._int_hashes
            )
            self._live.send_multipart((self._topic, number, payload))
            self._kept.append((number, payload))
            self.next_number += 1
        self.answer()
        return len(events)

    def answer(self, timeout_ms: int = 0) -> int:
        """Answer the replay requests that are waiting; call it now and then while nothing is published.

        Args:
            timeout_ms: wait so long for the first request.

        Returns:
            Requests answered.
        """
        answered = 0
        while self.replay_endpoint is not None and self._replay.poll(timeout_ms):
            timeout_ms = 0
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a request
            reader, empty, start = frames
            for number, payload in self._kept:
                if number >= start:
                    self._replay.send_multipart((reader, empty, self._topic, number, payload))
            self._replay.send_multipart((reader, empty, b"", END, b""))
            answered += 1
        return answered

    def close(self) -> None:
        """Close the sockets."""
        for socket in self._sockets:
            socket.close()
        self._context.term()
