"""What events name besides tokens, in the terms of vLLM's, SGLang's and Dynamo's event formats.

These formats have an adapter's name, images and a salt where kvcore has a salt and extra keys. A
request of such an engine is looked up as

    kv.match(tokens, salt=cache_salt.encode(), extra_keys=[
        (0, None, lora_key("sql")),   # its adapter, from the token on that it starts at
        (4, 580, b"image-identifier"),  # each image: where its placeholders are
    ])

and an `EventLog` with `identities` tells the events of it, from which these functions get the
formats' fields. A key that `lora_key` did not make is an image. Bytes that are no text are named in
hexadecimal digits.
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


def short_hash(block_hash: bytes) -> int:
    """The last 8 bytes of a block's hash as an unsigned integer: vLLM's and Dynamo's name of it."""
    return int.from_bytes(block_hash[-8:], "big")


def images_of(event: BlockStored) -> list[list[tuple[str, int]]]:
    """Of each block of an event the images in it: identifier, and first token relative to the
    block's (negative where the image begins before it)."""
    blocks = event.extra_keys or ((),) * len(event.block_hashes)
    return [
        [
            (text_of(key), start - event.start - i * event.block_size)
            for start, _, key in keys
            if not key.startswith(_LORA)
        ]
        for i, keys in enumerate(blocks)
    ]


def mm_infos(event: BlockStored) -> list[dict[str, Any] | None]:
    """Of each block of an event its images as Dynamo has them, None if it has none."""
    return [
        {"mm_objects": [{"mm_hash": image_hash(text), "offsets": []} for text, _ in images]}
        if images
        else None
        for images in images_of(event)
    ]


def image_hash(identifier: str) -> int:
    """What Dynamo puts in a block's hash for an image with this identifier: of 64 hexadecimal
    digits the first 16, of any other XXH3."""
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
    """The parts of an event whose blocks have one adapter, or none, and its name.

    The formats name one adapter of an event. Of several over one block the name is theirs, joined
    by ``+``.
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
