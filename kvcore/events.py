"""Events: records of blocks stored and removed, for routers and other readers.

* A *segment* has one event of kind ``"dense"``: one block of `alignment` tokens, its key the hash.
* A *resume point* has one event for each kind, block size and window. The last hash is the key of
  the segment before the boundary; the others are made from it.

A reader can predict hits. One can end at a boundary if all segments before it are stored, and its
key in every group that is not dense; or between two such boundaries (or the start and one) at most
`Layout.span` apart. Without dense groups the chain is unknown, and a hit may be longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Literal

from .arguments import as_flag, as_int
from .prefix.extra_keys import Ranges
from .prefix.keys import KEY_BYTES


@dataclass(frozen=True)
class BlockStored:
    """Blocks were stored.

    Attributes:
        kind: ``"dense"``, ``"window"`` or ``"state"``.
        groups, names: indices and names of the groups that store them.
        block_hashes: one for each block, in the order of the sequence.
        parent: key of the last boundary at or before the first block; None at the start.
        start: position of the first token.
        token_ids: tokens of exactly these blocks. (A window of one token keeps no blocks: then the
            boundary's key stands alone.)
        block_size: tokens of one block; the alignment for dense groups.
        sliding_window: tokens, window groups only.
        medium: place of the blocks.
        salt, extra_keys: if the log has identities, the salt of the prompt and each block's extra
            keys (start, stop, key), stops cut to its end; b"" and () for none.
        request_id: request that stored them; None if unknown.
    """

    kind: Literal["dense", "window", "state"]
    groups: tuple[int, ...]
    names: tuple[str, ...]
    block_hashes: tuple[bytes, ...]
    parent: bytes | None
    start: int
    token_ids: tuple[int, ...]
    block_size: int
    sliding_window: int | None
    medium: str
    salt: bytes = b""
    extra_keys: tuple[Ranges, ...] = ()
    request_id: Hashable = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks were removed; fields as of `BlockStored`."""

    kind: Literal["dense", "window", "state"]
    groups: tuple[int, ...]
    names: tuple[str, ...]
    block_hashes: tuple[bytes, ...]
    medium: str


@dataclass(frozen=True)
class AllBlocksCleared:
    """All blocks were removed."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """A bounded queue of events of one cache, numbered from 0. Not for several threads at once.

    When it is full the oldest events are dropped, and the numbers that `take` returns have a gap. A
    reader that sees one has lost track; `KVCache.announce` tells it everything again. An event is
    lost, too, if `append` of a subclass raises.

    Args:
        capacity: events kept until they are taken.
        max_bytes: approximate memory that they may take.
        medium: place named in each event.
        identities: name salts and extra keys, which may be secrets of tenants.

    Attributes:
        next_number: number of the next event.
        num_dropped: events lost so far.
        num_bytes: approximate memory of the events.
    """

    def __init__(
        self,
        capacity: int = 100_000,
        *,
        max_bytes: int = 1 << 28,
        medium: str = "GPU",
        identities: bool = False,
    ) -> None:
        self._capacity = as_int("capacity", capacity, 1)
        self._max_bytes = as_int("max_bytes", max_bytes, 1)
        self.medium, self.identities = medium, as_flag("identities", identities)
        self.next_number = 0
        self.num_dropped = 0
        self.num_bytes = 0
        self._events: deque[Event] = deque()
        # Events of `announce` before these, and their number.
        self._announced: Iterator[Event] = iter(())
        self._num_announced = 0

    def __len__(self) -> int:
        return self._num_announced + len(self._events)

    def append(self, event: Event) -> None:
        """Add an event, at the cost of the oldest where there is no room."""
        self._events.append(event)
        self.next_number += 1
        self.num_bytes += size_of(event)
        while len(self._events) > self._capacity or self.num_bytes > self._max_bytes:
            self._drop_announced()
            self.num_bytes -= size_of(self._events.popleft())
            self.num_dropped += 1

    def announce(self, events: Iterator[Event], number: int) -> None:
        """Replace all events by `number` others, made when they are taken. They take no room, and
        are dropped together when events after them are.
        """
        self.next_number += number - len(self)
        self._events.clear()
        self.num_bytes = 0
        self._announced, self._num_announced = events, number

    def _drop_announced(self) -> None:
        self.num_dropped += self._num_announced
        self._announced, self._num_announced = iter(()), 0

    def take(self, most: int | None = None) -> tuple[int, list[Event]]:
        """Take out the oldest events, at most `most`: (number of the first or next, events)."""
        left = len(self) if most is None else min(len(self), as_int("most", most, 1))
        first = self.next_number - len(self)
        events = list(islice(self._announced, min(left, self._num_announced)))
        self._num_announced -= len(events)
        while len(events) < left:
            event = self._events.popleft()
            self.num_bytes -= size_of(event)
            events.append(event)
        return first, events


def size_of(event: Event) -> int:
    if isinstance(event, AllBlocksCleared):
        return 64
    size = 400 + 80 * len(event.block_hashes)
    if isinstance(event, BlockStored):
        size += 36 * len(event.token_ids) + len(event.salt)
        size += sum(200 + len(key) for keys in event.extra_keys for *_, key in keys)
    return size


def tail_hashes(key: bytes, num_blocks: int) -> tuple[bytes, ...]:
    """Hashes of the blocks of a resume point; the last is `key`, that of the segment before it.

    There is always one, even without blocks.
    """
    # Not `key + i` alone: that is what the key of a following segment of one token, i, is made of.
    before = [
        sha256(key + b"tail" + i.to_bytes(4, "little")).digest()
        for i in range(num_blocks - 1, 0, -1)
    ]
    return (*before, key)


def split_keys(keys: bytes) -> tuple[bytes, ...]:
    return tuple(bytes(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES))
