"""KV-cache events in vLLM's schema, which SGLang and Dynamo read; extra `events`.

A batch is ``[ts, [event, ...], data_parallel_rank]`` in MessagePack; an event is a map with its
name under ``"type"``. `kv_events_zmq` sends them.
Source: vLLM `distributed/kv_events.py`, PR 42892 (maps).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored

try:
    import msgspec
except ImportError as error:
    raise ImportError(
        "kv_events needs the package msgspec: pip install 'quire-attention[events]'"
    ) from error

_KINDS = {"dense": "full_attention", "window": "sliding_window", "state": "mamba"}
_LORA = b"\0lora\0"


def lora_key(name: str) -> bytes:
    """Key of an adapter, for `extra_keys` of `KVCache.match`; any other key there is an image's.

    Raises:
        ValueError: the name is no text, or empty.
    """
    if not name:
        raise ValueError(f"name: expected a text that is not empty, got {name!r}")
    return _LORA + encoded_text("name", name)


def encoded_text(name: str, text: Any) -> bytes:
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
    session_of: Callable[[Hashable], str | None] | None = None,
) -> bytes:
    """One batch as MessagePack. An event of several groups or adapters becomes one for each.

    Args:
        events: from `EventLog.take`.
        ts: seconds since 1970.
        data_parallel_rank: rank of the engine, if there are several.
        int_hashes: send the last 8 bytes of each hash as an unsigned integer, which vLLM does by
            default and Dynamo expects, instead of all 32 bytes.
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
        part = replace(
            event,
            block_hashes=event.block_hashes[first:stop],
            parent=event.block_hashes[first - 1] if first else event.parent,
            start=event.start + first * size,
            token_ids=event.token_ids[first * size : stop * size],
            extra_keys=event.extra_keys[first:stop],
        )
        yield name or None, part
        first = stop


def _stored(event: BlockStored, lora: str | None) -> dict[str, Any]:
    """The fields of an event of one adapter, but for hashes, groups and session."""
    fields: dict[str, Any] = {
        "type": "BlockStored",
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "medium": event.medium,
        "lora_id": None,  # deprecated there
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
    return fields


def _text(value: bytes) -> str:
    """`value` as text, or as hexadecimal digits if it is none."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    return text if text.isprintable() else value.hex()
