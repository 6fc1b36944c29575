"""Extra keys: content of prompt tokens besides their ids, such as an image or an adapter.

An extra key of the tokens [start, stop) enters the key chain as *marks*, where it begins and where
it ends: prompts share all before `start`, and what is after `stop` only with the same one.

    alignment 4, an image of the tokens [6, 14)

    tokens        0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15
    image                          [...............................)
    marks                          begins                   ends
    keys          k0           k1 = H(H(k0, begins), 4..7)
                               k2 = H(k1, 8..11)     k3 = H(H(k2, ends), 12..15)

With a lookahead of k a mark at token p belongs to the segment of token p - k.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from ..arguments import as_bytes, as_int, refusal

ExtraKeys = Sequence[tuple[int, int | None, bytes]]
Ranges = tuple[tuple[int, int | None, bytes], ...]


class Mark(NamedTuple):
    """Start or end of an extra key at the token `position`; `start` is where it began."""

    position: int
    ends: bool
    start: int
    key: bytes

    def packed(self) -> bytes:
        """Unambiguous bytes, also when concatenated."""
        size = len(self.key)
        return struct.pack("<QBQQ", self.position, self.ends, self.start, size) + self.key


def parse_extra_keys(extra_keys: Any, num_tokens: int) -> tuple[Mark, ...]:
    """Sorted marks of the extra keys of `KVCache.match`; ValueError for wrong ones."""
    marks: set[Mark] = set()
    try:
        parts = [(start, stop, key) for start, stop, key in extra_keys]
    except (TypeError, ValueError):
        raise refusal("extra_keys", "(start, stop, key) each", repr(extra_keys)) from None
    for start, stop, key in parts:
        start = as_int("extra_keys: start", start, 0, num_tokens - 1)
        begin = Mark(start, False, start, as_bytes("extra_keys: key", key))
        if begin in marks:
            got = f"several {key!r} at {start}"
            raise refusal("extra_keys", "each key once at one start", got)
        marks.add(begin)
        if stop is not None:
            stop = as_int("extra_keys: stop", stop, start + 1, num_tokens)
            marks.add(Mark(stop, True, start, key))
    return tuple(sorted(marks))


def by_segment(marks: tuple[Mark, ...], alignment: int, lookahead: int) -> dict[int, bytes]:
    """Marks, packed, of each segment that has some."""
    found: dict[int, bytes] = {}
    for mark in marks:
        segment = max(0, mark.position - lookahead) // alignment
        found[segment] = found.get(segment, b"") + mark.packed()
    return found


def marked_key(previous: bytes, marks: bytes) -> bytes:
    """Key that replaces `previous` in a segment with `marks`. No tokens make the same key: what is
    hashed has an odd number of bytes after `previous`."""
    return sha256(previous + sha256(marks).digest() + b"\0").digest()


class Identity(NamedTuple):
    """Salt and extra keys of a prompt, or of some of its tokens: `ranges` are (start, stop, key),
    sorted; a stop of None is the end."""

    salt: bytes = b""
    ranges: Ranges = ()

    def over(self, first: int, last: int) -> Identity:
        """Identity of the tokens [first, last), stops cut to `last`."""
        found = [
            (start, last if stop is None else min(stop, last), key)
            for start, stop, key in self.ranges
            if start < last and (stop is None or stop > first)
        ]
        return Identity(self.salt, tuple(found))


NOTHING = Identity()


def identity_of(salt: bytes, marks: Sequence[Mark]) -> Identity:
    if not (salt or marks):
        return NOTHING
    ends = {(mark.start, mark.key): mark.position for mark in marks if mark.ends}
    begun = [(mark.start, mark.key) for mark in marks if not mark.ends]
    ranges = [(start, ends.get((start, key)), key) for start, key in begun]
    return Identity(salt, tuple(ranges))
