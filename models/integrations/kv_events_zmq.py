"""KV-cache events on a ZMQ socket, in the schema that vLLM publishes, for existing routers.

A batch is ``[ts, [event, ...], data_parallel_rank]`` in MessagePack; an event is a map with its
name under ``"type"``, and readers skip fields they do not know. A PUB socket sends batches as
``[topic, number, batch]``, the number in 8 bytes, big-endian. A DEALER asks the ROUTER socket for a
replay with ``[empty, first number]``; the answers are ``[empty, topic, number, batch]`` for each
batch still kept, then ``[empty, empty, -1, empty]``.

Source: vLLM `distributed/kv_events.py`, with map-encoded events (vLLM PR 42892) and the topic in
    replies (PR 45177).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from threading import Thread
from typing import Any

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored, EventLog

from .event_fields import by_lora, images_of, mm_info, text_of

try:
    import msgspec
    import zmq

    from .event_replays import Kept, Replies
except ImportError as error:
    raise ImportError(
        "kv_events_zmq needs the packages msgspec and pyzmq: pip install 'quire[events]'"
    ) from error

MOST_EVENTS = 4096  # of a batch; an announcement of a large cache is many
MAX_REQUEST_BYTES = 1024
REPLAY_QUEUE = 64  # batches that the socket holds for a reader
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

    def hash_of(value: bytes) -> bytes | int:
        return int.from_bytes(value[-8:], "big") if int_hashes else value

    maps: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            maps.append({"type": "AllBlocksCleared"})
            continue
        hashes = [hash_of(h) for h in event.block_hashes]
        if isinstance(event, BlockRemoved):
            common = {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium}
            maps += [{**common, "group_idx": g} for g in event.groups]
            continue
        for lora, part in by_lora(event):
            common = _stored(part, lora)
            common["block_hashes"] = [hash_of(h) for h in part.block_hashes]
            common["parent_block_hash"] = None if part.parent is None else hash_of(part.parent)
            common["lora_id"] = (lora_ids or {}).get(lora or "")
            session = None if session_of is None else session_of(part.request_id)
            if session is not None:
                common["session_id"] = session
            maps += [
                {**common, "group_idx": g, "group_name": name}
                for g, name in zip(part.groups, part.names, strict=True)
            ]
    # Always three: Dynamo reads no batch of two.
    return msgspec.msgpack.encode([ts, maps, data_parallel_rank])


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
    images = images_of(event)
    keys: list[list[Any]] = [[*([lora] if lora else []), *of_block] for of_block in images]
    if salt := text_of(event.salt):
        fields["cache_salt"] = salt  # of SGLang and Dynamo; vLLM adds it to the first block's keys
        if event.start == 0 and keys:
            keys[0].append(salt)
    if any(keys):
        fields["extra_keys"] = [of_block or None for of_block in keys]
    if any(images):
        fields["block_mm_infos"] = [mm_info(of_block) for of_block in images]  # for Dynamo
    if event.sliding_window is not None:
        fields["kv_cache_spec_sliding_window"] = event.sliding_window
    return fields


class Publisher:
    """Publishes an `EventLog`; a thread of its own answers replay requests.

    `publish` and `close` are for one thread. Sends never wait: a reader that is too slow misses
    batches, sees a gap in their numbers, and asks for a replay. Events that the log itself dropped
    leave a gap that no replay fills: the reader must start over.

    Readers of replays are answered by turns, a batch each, as fast as they read; a batch that is
    dropped before its turn leaves a gap. No reader costs `publish` anything, nor much memory: of
    one reader's requests at most `MAX_WAITING` wait, and past `MAX_READERS` a new reader takes the
    place of the one that has taken nothing for longest.

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
        self.next_number, self._next_event = 0, 0
        self.replay_endpoint: str | None = None
        self._topic = topic.encode()
        self._encode = partial(
            encode_batch, data_parallel_rank=data_parallel_rank, int_hashes=int_hashes,
            lora_ids=lora_ids, session_of=session_of,
        )  # fmt: skip
        self._kept = Kept(num_kept)
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._thread: Thread | None = None
        replay: Any = None
        try:
            self.endpoint = _bind(self._live, endpoint, queue_size)
            if replay_endpoint is not None:
                replay = self._context.socket(zmq.ROUTER)
                replay.router_mandatory = True  # an error where a reader does not read, not a loss
                replay.maxmsgsize = MAX_REQUEST_BYTES
                self.replay_endpoint = _bind(replay, replay_endpoint, REPLAY_QUEUE)
        except BaseException:
            if replay is not None:
                replay.close()
            self.close()
            raise
        if replay is not None:  # the thread's from here on
            replies = Replies(replay, self._topic, self._kept)
            self._thread = Thread(target=replies.run, name="kv-events-replay", daemon=True)
            self._thread.start()

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
            payload = self._encode(events, ts=ts)
            self._live.send_multipart((self._topic, self.next_number.to_bytes(8, "big"), payload))
            self._kept.add(self.next_number, payload)
            self.next_number += 1

    def close(self) -> None:
        """Close the sockets and end the thread."""
        self._live.close()
        self._context.term()  # waits for the thread to close its socket
        if self._thread is not None:
            self._thread.join()


def _bind(socket: Any, endpoint: str, queue_size: int) -> str:
    socket.linger, socket.sndhwm = 0, queue_size
    socket.bind(endpoint)
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound
