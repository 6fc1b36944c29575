"""Objects in one piece of memory: where each of them is, who reads it, and which goes first.

Integers only; whoever has the memory calls it.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

ALIGNMENT = 4096
# Seconds for which nobody gets the place of a put that was given up: its bytes may still come.
QUARANTINE = 10.0


@dataclass(eq=False)
class Span:
    """A place.

    Attributes:
        offset, size: bytes. readers: that read it now. is_gone: it is to be free when they have.
    """

    offset: int
    size: int
    readers: int = 0
    is_gone: bool = False


class Arena:
    """Places of objects by name, the one used last at the end.

    Args:
        num_bytes: of the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.objects: OrderedDict[str, Span] = OrderedDict()
        self._free: list[tuple[int, int]] = [(0, num_bytes)]  # (offset, end), in order
        self._late: list[tuple[float, Span]] = []

    def reserve(self, size: int) -> Span | None:
        """A place for an object that is to come; evicts objects that nobody reads, the one that was
        not used for longest first. None where even that is not enough."""
        while self._late and self._late[0][0] <= time.monotonic():
            self._give_back(self._late.pop(0)[1])
        length = _length(size)
        while (span := self._fit(length, size)) is None:
            idle = next((n for n, found in self.objects.items() if not found.readers), None)
            if idle is None:
                return None
            self.remove(idle)
        return span

    def _fit(self, length: int, size: int) -> Span | None:
        for i, (offset, end) in enumerate(self._free):
            if end - offset >= length:
                self._free[i : i + 1] = [(offset + length, end)] if end - offset > length else []
                return Span(offset, size)
        return None

    def commit(self, name: str, span: Span) -> None:
        """The object is there. One that is there already stays, and the place is free again."""
        if name in self.objects:
            self._give_back(span)
        else:
            self.objects[name] = span

    def give_up(self, span: Span) -> None:
        """A reserved place is not used."""
        self._late.append((time.monotonic() + QUARANTINE, span))

    def find(self, name: str) -> Span | None:
        """The place of an object, which stays until `release`."""
        span = self.objects.get(name)
        if span is not None:
            self.objects.move_to_end(name)
            span.readers += 1
        return span

    def release(self, span: Span) -> None:
        """One reader of a place less."""
        span.readers -= 1
        if span.is_gone and not span.readers:
            self._give_back(span)

    def remove(self, name: Hashable) -> None:
        """Forget an object, if it is there."""
        span = self.objects.pop(name, None)
        if span is not None:
            span.is_gone = True
            if not span.readers:
                self._give_back(span)

    def _give_back(self, span: Span) -> None:
        insort(self._free, (span.offset, span.offset + _length(span.size)))
        merged: list[tuple[int, int]] = []
        for offset, end in self._free:
            if merged and merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((offset, end))
        self._free = merged


def _length(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
