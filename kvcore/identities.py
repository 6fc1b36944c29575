"""Salts and extra keys of prompts, as events name them.

A segment's key covers all tokens and extra keys before its end. So the extra keys over its tokens
follow from its key, whichever prompt cached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .prefix.extra_keys import Mark

Ranges = tuple[tuple[int, int | None, bytes], ...]


class Identity(NamedTuple):
    """Salt and extra keys of a prompt, or of some of its tokens.

    Attributes:
        salt: of the prompt.
        ranges: (start, stop, key) of the extra keys, sorted; a stop of None is the end.
    """

    salt: bytes = b""
    ranges: Ranges = ()

    def over(self, first: int, last: int) -> Identity:
        """Identity of the tokens [first, last): extra keys over some of them, stops cut to `last`."""
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
