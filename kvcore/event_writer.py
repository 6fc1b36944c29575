"""Write the events of one cache: changes of the index as records of `events`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from .arrays import NO_VALUES, Int32, Int64
from .events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventLog,
    split_keys,
    tail_hashes,
)
from .prefix.extra_keys import NOTHING, Identity, identity_of
from .prefix.keys import KEY_BYTES, Prompt
from .prefix.requests import Sequences
from .spec import GroupClass, Layout

if TYPE_CHECKING:
    from .prefix.tree import Run

SegmentContent = tuple[Int32, Identity]  # tokens of a segment, and its salt and extra keys


class EventWriter:
    """Write the events of one index; keeps the tokens of requests and segments, which they name.

    Attributes:
        tokens: [alignment] int32 tokens of each cached segment, by its key.
        identities: salts and extra keys of cached segments, by key, if the log names them.
    """

    def __init__(
        self, log: EventLog, layout: Layout, sequences: Sequences, medium: str | None = None
    ) -> None:
        self.log = log
        self.medium = log.medium if medium is None else medium
        self.alignment = layout.alignment
        self.tokens: dict[bytes, Int32] = {}
        self.identities: dict[bytes, Identity] = {}
        self._sequences = sequences
        self._prompts: list[Int32] = [np.empty(0, np.int32)] * sequences.max_requests
        self._identities: list[Identity] = [NOTHING] * sequences.max_requests
        self._request_ids: list[Hashable] = [None] * sequences.max_requests
        # The newest tokens after the prompt, a ring a request: those that no cached segment has
        # yet, and room for a step.
        self._kept = 2 * layout.alignment + layout.lookahead
        self._answers: Int32 = np.empty((sequences.max_requests, 2 * self._kept), dtype=np.int32)
        self._num_known: Int64 = np.zeros(sequences.max_requests, dtype=np.int64)  # tokens
        dense = [i for i, g in enumerate(layout.groups) if g.kind == "dense"]
        self._dense = tuple(dense)
        self._dense_names = tuple(layout.groups[i].name for i in dense)
        self._tails: list[tuple[GroupClass, tuple[int, ...], tuple[str, ...]]] = []
        for c in layout.classes:
            if c.spec.kind != "dense":
                groups = tuple(c.tables.tolist())
                self._tails.append((c, groups, tuple(layout.groups[i].name for i in groups)))
        # Segments that the longest tail reaches into.
        self._reach = max([1, *(-(-c.tail // c.per_segment) for c, _, _ in self._tails)])

    def _write(self, event: Event) -> None:
        """Append an event to the log; drop it if the log raises, as a change is half done here."""
        number = self.log.next_number
        try:
            self.log.append(event)
        except Exception:
            if self.log.next_number == number:
                self.log.next_number += 1
                self.log.num_dropped += 1

    # Tokens of running requests.

    def admitted(self, slot: int, prompt: Prompt, request_id: Hashable) -> None:
        assert prompt.tokens is not None and prompt.salt is not None
        self._prompts[slot], self._request_ids[slot] = prompt.tokens, request_id
        if self.log.identities:
            self._identities[slot] = identity_of(prompt.salt, prompt.marks)
        self._num_known[slot] = 0

    def computed(
        self, slots: Int64, counts: Int64, positions: Int64, ids: Int32, end: Int64
    ) -> None:
        """Keep computed tokens of requests `slots` [n], `counts` [n] each; those at `positions`
        [total] at or past `end` [n] were rejected."""
        longest = int(counts.max()) if len(positions) > len(slots) else 1
        if len(positions) > len(slots):
            slots = np.repeat(slots, counts)
            end = np.repeat(end, counts)
        columns = positions - self._sequences.prompt_len[slots]  # tokens of prompts are known
        new = (columns >= 0) & (positions < end)
        if np.count_nonzero(new) < len(new):
            slots, columns, ids = slots[new], columns[new], ids[new]
            end = end[new]
        if not len(ids):
            return
        needed, width = self._kept + longest, self._answers.shape[1]
        if needed > width or 4 * needed < width > 2 * self._kept:
            self._resize(max(needed, 2 * self._kept))
        self._answers[slots, columns % self._answers.shape[1]] = ids
        self._num_known[slots] = end

    def _resize(self, width: int) -> None:
        known = np.minimum(self._num_known, self._sequences.num_computed)
        done = known - self._sequences.prompt_len
        columns = done[:, None] - np.arange(1, self._kept + 1)
        rows = np.arange(len(done))[:, None]
        rings = np.empty((len(done), width), dtype=np.int32)
        rings[rows, columns % width] = self._answers[rows, columns % self._answers.shape[1]]
        self._answers = rings

    def released(self, slot: int) -> None:
        self._prompts[slot], self._request_ids[slot] = NO_VALUES, None

    # Changes of the index.

    def segments(self, slot: int, first: int, last: int) -> None:
        keys = split_keys(self._sequences.keys(slot, first, last))
        a, prompt = self.alignment, self._prompts[slot]
        n = len(prompt)
        columns = np.arange(max(0, first * a - n), max(0, last * a - n))
        answer = self._answers[slot, columns % self._answers.shape[1]]
        parts = np.concatenate([prompt[first * a : last * a], answer]).reshape(-1, a)
        for i, (key, tokens) in enumerate(zip(keys, parts, strict=True)):
            self.tokens[key] = tokens.copy()
            if self._identities[slot] is not NOTHING:
                begin = (first + i) * a
                self.identities[key] = self._identities[slot].over(begin, begin + a)
        parent = self._sequences.keys(slot, first - 1, first) if first else None
        if self._dense:
            contents = self.of_segments(keys)
            self._write(self._segments(keys, contents, parent, first, self._request_ids[slot]))

    def adopted(
        self,
        keys: bytes,
        contents: Sequence[SegmentContent] | None,
        parent: bytes | None,
        first: int,
    ) -> None:
        """Segments with `keys` from segment `first` on were cached by a copy from another index."""
        assert contents is not None
        hashes = split_keys(keys)
        for key, (tokens, identity) in zip(hashes, contents, strict=True):
            self.tokens[key] = tokens.copy()
            if identity is not NOTHING:
                self.identities[key] = identity
        if self._dense:
            self._write(self._segments(hashes, list(contents), parent, first))

    def point(self, run: Run, depth: int, slot: int | None = None) -> None:
        """A resume point was added at segment `depth`, by the request of `slot` if given."""
        keys = split_keys(self._before(run, depth))
        request_id = None if slot is None else self._request_ids[slot]
        for event in self._point(keys, self.of_segments(keys), depth, request_id):
            self._write(event)

    def of_prompt(self, prompt: Prompt, first: int, last: int) -> list[SegmentContent]:
        assert prompt.tokens is not None and prompt.salt is not None
        a, whole = self.alignment, NOTHING
        if self.log.identities:
            whole = identity_of(prompt.salt, prompt.marks)
        return [
            (
                prompt.tokens[i * a : (i + 1) * a],
                whole if whole is NOTHING else whole.over(i * a, (i + 1) * a),
            )
            for i in range(first, last)
        ]

    def of_segments(self, keys: tuple[bytes, ...]) -> list[SegmentContent]:
        return [(self.tokens[key], self.identities.get(key, NOTHING)) for key in keys]

    def _before(self, run: Run | None, depth: int) -> bytes:
        """Keys of the segments before `depth` that a tail reaches, and of one more."""
        keys, first = b"", max(0, depth - self._reach - 1)
        while run is not None and run.length and len(keys) < (depth - first) * KEY_BYTES:
            low, high = max(0, first - run.start), max(0, depth - run.start)
            keys = bytes(run.keys[low * KEY_BYTES : high * KEY_BYTES]) + keys
            run = run.parent
        return keys

    def everything(
        self, runs: Iterable[Run], others: Iterable[tuple[Iterator[Event], int]] = ()
    ) -> None:
        """Replace all events by those of `runs` (parents first) and `others`, made when taken."""
        parts = [self.snapshot(runs), *others]
        events = chain([AllBlocksCleared()], *(part for part, _ in parts))
        self.log.announce(events, 1 + sum(number for _, number in parts))

    def snapshot(self, runs: Iterable[Run]) -> tuple[Iterator[Event], int]:
        """Events of the present content of `runs` (parents first), and their number."""
        contents: list[tuple[int, bytes, list[SegmentContent], int, list[int]]] = []
        number = 0
        for run in runs:
            keys = self._before(run.parent, run.start) + bytes(run.keys)
            parts = self.of_segments(split_keys(keys))
            contents.append((run.start, keys, parts, run.length, run.depths[:]))
            number += bool(self._dense) + len(run.depths) * len(self._tails)
        return self._snapshot_events(contents), number

    def _snapshot_events(
        self, contents: list[tuple[int, bytes, list[SegmentContent], int, list[int]]]
    ) -> Iterator[Event]:
        for start, packed, parts, length, depths in contents:
            keys = split_keys(packed)
            above = len(keys) - length
            if self._dense:
                parent = keys[above - 1] if above else None
                yield self._segments(keys[above:], parts[above:], parent, start)
            for depth in depths:
                end = above + depth - start
                part = slice(max(0, end - self._reach - 1), end)
                yield from self._point(keys[part], parts[part], depth)

    def _segments(
        self,
        keys: tuple[bytes, ...],
        contents: list[SegmentContent],
        parent: bytes | None,
        first: int,
        request_id: Hashable = None,
    ) -> Event:
        a, ids = self.alignment, tuple(np.concatenate([tokens for tokens, _ in contents]).tolist())
        over = tuple(identity.ranges for _, identity in contents)
        return BlockStored(
            "dense", self._dense, self._dense_names, keys, parent, first * a, ids, a, None,
            self.medium, contents[-1][1].salt, over if any(over) else (), request_id,
        )  # fmt: skip

    def _point(
        self,
        keys: tuple[bytes, ...],
        contents: list[SegmentContent],
        depth: int,
        request_id: Hashable = None,
    ) -> Iterator[Event]:
        boundary, first = depth * self.alignment, depth - len(keys)
        for c, groups, names in self._tails:
            num_blocks = min(c.tail, boundary // c.block_size)
            start = boundary - num_blocks * c.block_size
            within, skipped = divmod(start - first * self.alignment, self.alignment)
            ids = np.concatenate([NO_VALUES, *(tokens for tokens, _ in contents[within:])])
            over = tuple(
                contents[at // self.alignment - first][1].over(at, at + c.block_size).ranges
                for at in range(start, boundary, c.block_size)
            )
            parent = keys[within - 1] if within else None
            yield BlockStored(
                c.spec.kind, groups, names, tail_hashes(keys[-1], num_blocks), parent, start,
                tuple(ids[skipped:].tolist()), c.block_size, c.spec.sliding_window, self.medium,
                contents[-1][1].salt, over if any(over) else (), request_id,
            )  # fmt: skip

    def segments_removed(self, keys: bytes) -> None:
        hashes = split_keys(keys)
        for key in hashes:
            del self.tokens[key]
            self.identities.pop(key, None)
        if self._dense:
            names = self._dense_names
            self._write(BlockRemoved("dense", self._dense, names, hashes, self.medium))

    def point_removed(self, key: bytes, depth: int) -> None:
        for c, groups, names in self._tails:
            hashes = tail_hashes(key, min(c.tail, depth * self.alignment // c.block_size))
            self._write(BlockRemoved(c.spec.kind, groups, names, hashes, self.medium))

    def cleared(self) -> None:
        self.tokens.clear()
        self.identities.clear()
        self._write(AllBlocksCleared())
