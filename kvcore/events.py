"""Events: records of what became findable and what did not stay so, for routers and other readers outside.

What is cached has two kinds of entries, and so have the events:

* a *segment*: the dense blocks of `alignment` tokens. Its record is of kind ``"dense"``, with the segment key as the
  hash of one block of `alignment` tokens;
* a *resume point*: at one boundary, the last blocks of each window group and the snapshot of each state group. It has a
  record for each kind, block size and window; the last hash is the key of the segment before the boundary, and the
  blocks before it have hashes made from that key, since a tail is stored and removed whole.

A reader that keeps these hashes knows each hit: the longest boundary whose segments are all stored, and whose
key is stored in every group that is not dense, or which lies between two such boundaries of a chain (or the start and one) that
are at most a tail apart in each window group (`Layout.span`; with replays, at most sliding_window - 1 tokens). Where no group is
dense, which keys lead to a boundary is not told, and a hit between two of them may be longer than a reader expects. Keys are hashes of all tokens before; a salt never shows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from .plan import StepPlan
from .prefix.keys import KEY_BYTES, Prompt
from .prefix.requests import Sequences
from .spec import GroupClass, Int32, Int64, Layout, as_int

if TYPE_CHECKING:
    from .prefix.index import Run

_NO_TOKENS: Int32 = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class BlockStored:
    """Blocks became findable.

    Attributes:
        kind: ``"dense"``, ``"window"`` or ``"state"``.
        groups, names: indices and names of the groups that store them.
        block_hashes: one for each block, in the order of the sequence.
        parent: key of the last boundary at or before the first block; None at the start of a sequence.
        start: position of the first token, in tokens.
        token_ids: tokens of exactly these blocks, ``block_size`` for each. (A window of one token keeps no
            blocks: then the boundary's key stands alone.)
        block_size: tokens of one of these blocks; the alignment for dense groups.
        sliding_window: tokens, window groups only.
        medium: where the blocks are.
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


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks are not findable any more; fields as of `BlockStored`."""

    kind: Literal["dense", "window", "state"]
    groups: tuple[int, ...]
    names: tuple[str, ...]
    block_hashes: tuple[bytes, ...]
    medium: str


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is findable any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """A bounded queue of events of one cache, numbered from 0. Not for several threads at once.

    When it is full the oldest events are dropped and counted: the numbers that `take` returns then have a gap. A
    reader that sees one has lost track; `KVCache.announce` tells it everything again. So does an event that an `append` of a
    subclass raises for: the cache goes on.

    Args:
        capacity: events kept until they are taken.
        max_bytes: about how much memory they may take. An event that alone takes more is dropped too.
        medium: named in each event.

    Attributes:
        next_number: number of the next event.
        num_dropped: events lost so far.
        num_bytes: about how much memory the events take.

    Raises:
        ValueError: capacity or max_bytes is below 1.
    """

    def __init__(
        self, capacity: int = 100_000, *, max_bytes: int = 1 << 28, medium: str = "GPU"
    ) -> None:
        self._capacity = as_int("capacity", capacity, 1)
        self._max_bytes = as_int("max_bytes", max_bytes, 1)
        self.medium = medium
        self.next_number = 0
        self.num_dropped = 0
        self.num_bytes = 0
        self._events: deque[Event] = deque()
        # What comes before these: events that are made when they are taken, and how many are left of them.
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
        """Put `number` events, which are made when they are taken, in place of all that nobody took yet.

        They do not count against capacity and max_bytes, and go as a whole when events after them are dropped.
        """
        self.next_number += number - len(self)
        self._events.clear()
        self.num_bytes = 0
        self._announced, self._num_announced = events, number

    def _drop_announced(self) -> None:
        self.num_dropped += self._num_announced
        self._announced, self._num_announced = iter(()), 0

    def take(self, most: int | None = None) -> tuple[int, list[Event]]:
        """Take out the oldest events: the number of the first (of the next to come, if there is none), and the events.

        Args:
            most: how many at most; all if None.

        Raises:
            ValueError: `most` is below 1.
        """
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
    """About how many bytes of memory an event takes: its hashes, and a pointer and an int for each token."""
    if isinstance(event, AllBlocksCleared):
        return 64
    size = 400 + 80 * len(event.block_hashes)
    return size + 36 * len(event.token_ids) if isinstance(event, BlockStored) else size


def tail_hashes(key: bytes, num_blocks: int) -> tuple[bytes, ...]:
    """Hashes of the blocks of a resume point, the last one `key` itself.

    Args:
        key: of the segment that ends at the boundary.
        num_blocks: blocks of the tail; 0 still names the boundary.
    """
    # Not `key + i` alone: that is what the key of a following segment of one token, i, is made of.
    before = [
        sha256(key + b"tail" + i.to_bytes(4, "little")).digest()
        for i in range(num_blocks - 1, 0, -1)
    ]
    return (*before, key)


class Announcer:
    """Writes the events of one cache; keeps the tokens of running requests and cached segments, which events must name.

    Args:
        log: where events go.
        layout: the groups.
        sequences: the running requests and their keys.

    Attributes:
        tokens: [alignment] int32 tokens of each cached segment, by its key.
    """

    def __init__(self, log: EventLog, layout: Layout, sequences: Sequences) -> None:
        self.log = log
        self.alignment = layout.alignment
        self.tokens: dict[bytes, Int32] = {}
        # How often besides a key is cached: in several places only after a snapshot that somebody forged.
        self.copies: Counter[bytes] = Counter()
        self._sequences = sequences
        self._prompts: list[Int32] = [np.empty(0, np.int32)] * sequences.max_requests
        # The newest tokens after the prompt, a ring a request: those that no cached segment has yet, and room for a step.
        self._kept = 2 * layout.alignment + layout.lookahead
        self._answers: Int32 = np.empty((sequences.max_requests, 2 * self._kept), dtype=np.int32)
        dense = [i for i, g in enumerate(layout.groups) if g.kind == "dense"]
        self._dense = tuple(dense)
        self._dense_names = tuple(layout.groups[i].name for i in dense)
        self._tails: list[tuple[GroupClass, tuple[int, ...], tuple[str, ...]]] = []
        for c in layout.classes:
            if c.spec.kind != "dense":
                groups = tuple(dict.fromkeys(layout.tables[t][0] for t in c.tables.tolist()))
                self._tails.append((c, groups, tuple(layout.groups[i].name for i in groups)))
        # Segments that the longest tail reaches into.
        self._reach = max([1, *(-(-c.tail // c.per_segment) for c, _, _ in self._tails)])

    def _tell(self, event: Event) -> None:
        """Write an event. A log's code may be anybody's, and this is in the middle of a change: where it raises, the event is dropped."""
        number = self.log.next_number
        try:
            self.log.append(event)
        except Exception:
            if self.log.next_number == number:
                self.log.next_number += 1
                self.log.num_dropped += 1

    # Tokens of running requests.

    def admitted(self, slot: int, prompt: Prompt) -> None:
        """A request starts."""
        assert prompt.tokens is not None
        self._prompts[slot] = prompt.tokens

    def computed(self, plan: StepPlan, ids: Int32, end: Int64) -> None:
        """Tokens `ids` of a step were computed, those of each request up to position `end` [n] to stay."""
        slots, positions = plan.slots, plan.positions
        if len(positions) > len(slots):
            slots = np.repeat(slots, plan.num_new_tokens)
            end = np.repeat(end, plan.num_new_tokens)
        columns = positions - self._sequences.prompt_len[slots]  # tokens of prompts are known
        new = (columns >= 0) & (positions < end)
        if np.count_nonzero(new) < len(new):
            slots, columns, ids = slots[new], columns[new], ids[new]
        if not len(ids):
            return
        longest = int(plan.num_new_tokens.max()) if len(positions) > len(plan.slots) else 1
        needed, width = self._kept + longest, self._answers.shape[1]
        if needed > width or 4 * needed < width > 2 * self._kept:
            self._resize(max(needed, 2 * self._kept))
        self._answers[slots, columns % self._answers.shape[1]] = ids

    def _resize(self, width: int) -> None:
        """Make the rings `width` tokens long; a step that is much longer than the others leaves nothing behind."""
        done = self._sequences.num_computed - self._sequences.prompt_len
        columns = done[:, None] - np.arange(1, self._kept + 1)
        rows = np.arange(len(done))[:, None]
        rings = np.empty((len(done), width), dtype=np.int32)
        rings[rows, columns % width] = self._answers[rows, columns % self._answers.shape[1]]
        self._answers = rings

    def released(self, slot: int) -> None:
        """A request ended."""
        self._prompts[slot] = np.empty(0, np.int32)

    # What the index did.

    def segments(self, slot: int, first: int, last: int) -> None:
        """Segments [first, last) of a request are cached now."""
        keys = split_keys(self._sequences.keys(slot, first, last))
        a, prompt = self.alignment, self._prompts[slot]
        n = len(prompt)
        columns = np.arange(max(0, first * a - n), max(0, last * a - n))
        answer = self._answers[slot, columns % self._answers.shape[1]]
        parts = np.concatenate([prompt[first * a : last * a], answer]).reshape(-1, a)
        for key, tokens in zip(keys, parts, strict=True):
            if key in self.tokens:
                self.copies[key] += 1
            self.tokens[key] = tokens.copy()
        parent = self._sequences.keys(slot, first - 1, first) if first else None
        if self._dense:
            self._tell(self._segments(keys, list(parts), parent, first))

    def point(self, run: Run, depth: int) -> None:
        """There is a resume point at segment `depth` on the path to `run` now."""
        keys = split_keys(self._before(run, depth))
        for event in self._point(keys, [self.tokens[key] for key in keys], depth):
            self._tell(event)

    def _before(self, run: Run | None, depth: int) -> bytes:
        """Keys of the segments before segment `depth` on the path to `run`, as far as tails reach and one more."""
        keys, first = b"", max(0, depth - self._reach - 1)
        while run is not None and run.length and len(keys) < (depth - first) * KEY_BYTES:
            low, high = max(0, first - run.start), max(0, depth - run.start)
            keys = bytes(run.keys[low * KEY_BYTES : high * KEY_BYTES]) + keys
            run = run.parent
        return keys

    def everything(self, runs: Iterable[Run]) -> None:
        """All that `runs` (parents first) hold is cached, and nothing else: for readers that know nothing, or lost track.

        What is held now is noted; the events are made of it when they are taken.
        """
        noted: list[tuple[int, bytes, list[Int32], int, list[int]]] = []
        number = 1
        for run in runs:
            keys = self._before(run.parent, run.start) + bytes(run.keys)
            tokens = [self.tokens[key] for key in split_keys(keys)]
            noted.append((run.start, keys, tokens, run.length, run.depths[:]))
            number += bool(self._dense) + len(run.depths) * len(self._tails)
        self.log.announce(self._noted_events(noted), number)

    def _noted_events(
        self, noted: list[tuple[int, bytes, list[Int32], int, list[int]]]
    ) -> Iterator[Event]:
        """Events of runs: (first segment, keys of the run and before it, their tokens, segments, boundaries of resume points)."""
        yield AllBlocksCleared()
        for start, packed, tokens, length, depths in noted:
            keys = split_keys(packed)
            above = len(keys) - length
            if self._dense:
                yield self._segments(
                    keys[above:], tokens[above:], keys[above - 1] if above else None, start
                )
            for depth in depths:
                end = above + depth - start
                part = slice(max(0, end - self._reach - 1), end)
                yield from self._point(keys[part], tokens[part], depth)

    def _segments(
        self, keys: tuple[bytes, ...], tokens: list[Int32], parent: bytes | None, first: int
    ) -> Event:
        """The event of segments with these keys and tokens, from segment `first` on, after `parent`."""
        a, ids = self.alignment, tuple(np.concatenate(tokens).tolist())
        return BlockStored(
            "dense", self._dense, self._dense_names, keys, parent, first * a, ids, a, None, self.log.medium
        )  # fmt: skip

    def _point(self, keys: tuple[bytes, ...], tokens: list[Int32], depth: int) -> Iterator[Event]:
        """Events of the resume point at segment `depth`; keys and tokens of the segments before it, as far as tails reach and one more."""
        boundary, first = depth * self.alignment, depth - len(keys)
        for c, groups, names in self._tails:
            num_blocks = min(c.tail, boundary // c.block_size)
            start = boundary - num_blocks * c.block_size
            within, skipped = divmod(start - first * self.alignment, self.alignment)
            ids = np.concatenate([_NO_TOKENS, *tokens[within:]])[skipped:]
            parent = keys[within - 1] if within else None
            yield BlockStored(
                c.spec.kind, groups, names, tail_hashes(keys[-1], num_blocks), parent, start, tuple(ids.tolist()),
                c.block_size, c.spec.sliding_window, self.log.medium,
            )  # fmt: skip

    def segments_removed(self, keys: bytes) -> None:
        """Segments with these keys are not cached any more."""
        hashes = split_keys(keys)
        for key in hashes:
            if self.copies[key]:
                self.copies[key] -= 1
            else:
                del self.tokens[key]
        if self._dense:
            names = self._dense_names
            self._tell(BlockRemoved("dense", self._dense, names, hashes, self.log.medium))

    def point_removed(self, key: bytes, depth: int) -> None:
        """The resume point at segment `depth`, after the segment of `key`, is gone."""
        for c, groups, names in self._tails:
            hashes = tail_hashes(key, min(c.tail, depth * self.alignment // c.block_size))
            self._tell(BlockRemoved(c.spec.kind, groups, names, hashes, self.log.medium))

    def cleared(self) -> None:
        """Nothing is cached any more."""
        self.tokens.clear()
        self.copies.clear()
        self._tell(AllBlocksCleared())


def split_keys(keys: bytes) -> tuple[bytes, ...]:
    """Segment keys one by one."""
    return tuple(bytes(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES))
