"""What parts prompts besides their tokens, as events name it: salts and extra keys.

A segment's key covers all tokens, and marks of extra keys, before its end. So what lies over its
own tokens follows from its key, whichever prompt cached it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .prefix.extra_keys import Mark

Ranges = tuple[tuple[int, int | None, bytes], ...]


class Identity(NamedTuple):
    """Of a prompt, or of some of its tokens.

    Attributes:
        salt: of the prompt.
        ranges: (start, stop, key) of the extra keys, sorted; stop None: to the end.
    """

    salt: bytes = b""
    ranges: Ranges = ()

    def over(self, first: int, last: int) -> Identity:
        """Of the tokens [first, last): the extra keys that lie over some of them; a stop behind
        them becomes `last`."""
        found = [
            (start, last if stop is None else min(stop, last), key)
            for start, stop, key in self.ranges
            if start < last and (stop is None or stop > first)
        ]
        return Identity(self.salt, tuple(found))


NOTHING = Identity()


def identity_of(salt: bytes, marks: Sequence[Mark]) -> Identity:
    """Identity of a prompt with these marks."""
    if not (salt or marks):
        return NOTHING
    ends = {(mark.start, mark.key): mark.position for mark in marks if mark.ends}
    begun = [(mark.start, mark.key) for mark in marks if not mark.ends]
    ranges = [(start, ends.get((start, key)), key) for start, key in begun]
    return Identity(salt, tuple(ranges))


def dumps(identities: Mapping[bytes, Identity], keys: Sequence[bytes]) -> bytes:
    """Identities of the segments `keys`, those that have one, as bytes."""
    found = {
        i: [told.salt.hex(), [[start, stop, key.hex()] for start, stop, key in told.ranges]]
        for i, key in enumerate(keys)
        if (told := identities.get(key)) is not None
    }
    return json.dumps(found).encode()


def loads(data: bytes, keys: Sequence[bytes]) -> dict[bytes, Identity]:
    """What `dumps` made of the identities of as many segments.

    Raises:
        ValueError: `data` is something else.
    """
    found: dict[bytes, Identity] = {}
    try:
        for number, (salt, ranges) in json.loads(data).items():
            parts = [_checked(start, stop, key) for start, stop, key in ranges]
            if not 0 <= int(number) < len(keys):
                raise ValueError(f"expected segments 0..{len(keys) - 1}, got {number}")
            found[keys[int(number)]] = Identity(bytes.fromhex(salt), tuple(parts))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"snapshot: identities: {error}") from error
    return found


def _checked(start: Any, stop: Any, key: Any) -> tuple[int, int, bytes]:
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop:
        raise ValueError(f"expected 0 <= start < stop, got {start!r:.60} and {stop!r:.60}")
    return start, stop, bytes.fromhex(key)
