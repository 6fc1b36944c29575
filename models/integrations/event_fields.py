"""Adapters and images in KV-cache events, as vLLM, SGLang and Dynamo name them.

kvcore has a salt and extra keys for all that separates prompts of equal tokens. A request of such
an engine is looked up as

    kv.match(tokens, salt=cache_salt.encode(), extra_keys=[
        (0, None, lora_key("sql")),     # its adapter, from the token on that it starts at
        (4, 580, b"image-identifier"),  # each image: where its placeholders are
    ])

and an `EventLog` with `identities` reports them in its events. A key that `lora_key` did not make
is an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from quire.kvcore import BlockStored

_LORA = b"\0lora\0"


def lora_key(name: str) -> bytes:
    """Key of an adapter, for `extra_keys` of `KVCache.match`.

    Raises:
        ValueError: the name is no text, or empty, which these formats take for no adapter.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name: expected a text that is not empty, got {name!r}")
    return _LORA + name.encode()


def text_of(value: bytes) -> str:
    """`value` as text, or as hexadecimal digits if it is none."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    return text if text.isprintable() else value.hex()


def images_of(event: BlockStored) -> list[list[tuple[str, int]]]:
    """The images in each block of an event: identifier, and first token relative to the block's
    (negative where the image begins before it)."""
    blocks = event.extra_keys or ((),) * len(event.block_hashes)
    return [
        [
            (text_of(key), start - event.start - i * event.block_size)
            for start, _, key in keys
            if not key.startswith(_LORA)
        ]
        for i, keys in enumerate(blocks)
    ]


def mm_info(images: list[tuple[str, int]]) -> dict[str, Any] | None:
    """The images of a block in Dynamo's form; None if it has none."""
    objects = [{"mm_hash": _image_hash(text), "offsets": []} for text, _ in images]
    return {"mm_objects": objects} if objects else None


def _image_hash(identifier: str) -> int:
    """Dynamo's number of an image: the first 16 of 64 hexadecimal digits, else XXH3 of the text."""
    if len(identifier) == 64 and not set(identifier.lower()) - set("0123456789abcdef"):
        return int(identifier[:16], 16)
    try:
        import xxhash
    except ImportError as error:
        raise ImportError(
            "images with identifiers that are not 64 hexadecimal digits need the package xxhash: "
            "pip install 'quire[events]'"
        ) from error
    value: int = xxhash.xxh3_64_intdigest(identifier.encode())
    return value


def by_lora(event: BlockStored) -> Iterator[tuple[str | None, BlockStored]]:
    """Split an event, which names one adapter, where the adapter of its blocks changes.

    Yields the adapter's name, None for none; several over one block are joined by ``+``.
    """
    if not event.extra_keys:
        yield None, event
        return
    names = [
        "+".join(text_of(k.removeprefix(_LORA)) for *_, k in keys if k.startswith(_LORA))
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
