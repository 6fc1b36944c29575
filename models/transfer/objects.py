"""What objects are: a header of 64 bytes, and then what they hold.

    magic 8   CRC-32 4   rank 4   bytes that follow 8   digest of the key 32   zeros 8

The CRC-32 is of all but itself and what is before it: it finds damage, and the digest finds an
object under another's key. It does not find forgery: whoever can write a store can make a prompt
hit any page.

A segment holds its pages in the order of `Layout.segment_offset`, a resume point its own in the
order of `Layout.tail_offset` without those that are not there, and a page the bytes of all page
tensors. A manifest and a layout are JSON.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .store import Buffers, DamagedObject, StoreKey, num_bytes

MAGIC = b"quire-t1"
_HEAD = struct.Struct("<8sIIQ32s8x")
HEADER_BYTES = _HEAD.size
_CHECKED = 12  # bytes before what the CRC-32 is of
MANIFEST_VERSION = 1


def seal(key: StoreKey, buffers: Buffers) -> np.ndarray:
    """The header [HEADER_BYTES] uint8 of an object that holds ``buffers``."""
    header = _header(key, num_bytes(buffers))
    return np.frombuffer(
        header[:8] + struct.pack("<I", _sum(header, buffers)) + header[_CHECKED:], np.uint8
    )


def check(key: StoreKey, header: np.ndarray, buffers: Buffers) -> None:
    """That an object is as it was sealed.

    Raises:
        DamagedObject: it is not; the message says what was expected.
    """
    found = header.tobytes()
    expected = _header(key, num_bytes(buffers))
    for name, part in (("magic", slice(0, 8)), ("rank, size and key", slice(_CHECKED, None))):
        if found[part] != expected[part]:
            raise DamagedObject(
                key, f"expected {name} {expected[part].hex()}, got {found[part].hex()}"
            )
    (kept,) = struct.unpack_from("<I", found, 8)
    if (computed := _sum(found, buffers)) != kept:
        raise DamagedObject(key, f"expected CRC-32 {kept:08x}, got {computed:08x}")


def _header(key: StoreKey, size: int) -> bytes:
    """A header whose checksum is 0."""
    digest = hashlib.blake2b(key.text.encode(), digest_size=32).digest()
    return _HEAD.pack(MAGIC, 0, key.rank, size, digest)


def _sum(header: bytes, buffers: Buffers) -> int:
    value = zlib.crc32(header[_CHECKED:])
    for buffer in buffers:
        value = zlib.crc32(buffer.data, value)
    return value


@dataclass(frozen=True)
class Manifest:
    """What a hand-off consists of; it is put when all of that is there.

    Attributes:
        layout: texts of the sender's layout.
        num_tokens: of the prefix.
        segment_bytes, point_bytes: that a segment and the resume point hold; the latter 0 where
            there is none.
    """

    layout: Mapping[str, str]
    num_tokens: int
    segment_bytes: int
    point_bytes: int

    def dumps(self) -> bytes:
        """As JSON."""
        return json.dumps({"version": MANIFEST_VERSION, **asdict(self)}).encode()

    @classmethod
    def loads(cls, key: StoreKey, data: bytes) -> Manifest:
        """Of JSON whose checksum is right.

        Raises:
            DamagedObject: it is none, or of another version.
        """
        fields = loads(key, data)
        if fields.pop("version", None) != MANIFEST_VERSION:
            raise DamagedObject(key, f"expected version {MANIFEST_VERSION}, got {data!r:.200}")
        numbers = ("num_tokens", "segment_bytes", "point_bytes")
        if fields.keys() != {"layout", *numbers} or not all(
            type(fields[name]) is int and fields[name] >= 0 for name in numbers
        ):
            raise DamagedObject(key, f"expected fields of a manifest, got {data!r:.200}")
        return cls(**fields)


def loads(key: StoreKey, data: bytes) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        DamagedObject: it is none.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedObject(key, f"expected JSON, got {error}") from error
    if not isinstance(found, dict):
        raise DamagedObject(key, f"expected a JSON object, got {data!r:.200}")
    return found
