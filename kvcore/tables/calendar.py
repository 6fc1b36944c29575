"""Which entries of the tables each step of a decode batch changes, found once for all steps.

Each request changes the same entries every `alignment` steps, so that a batch that lasts gets a
*decode calendar* of them. Alignment 8; a dense table in blocks of 4 tokens, a window table in
blocks of 2, a state table; request a has 5 tokens, request b 6, as the batch starts:

    step                0    1    2    3    4    5    6    7
    position of a       5    6    7    8    9    10   11   12
    position of b       6    7    8    9    10   11   12   13
    dense  (p % 4 = 0)  .    .    b    a    .    .    b    a
    window (p % 2 = 0)  b    a    b    a    b    a    b    a
    state  (p % 8 = 7)  .    b    a    .    .    .    .    .

The calendar has one list of entries, sorted by step: [b | a b | b b a | a a | b | a | b b | a a].
Step 2 takes the third slice (dense b, window b, state a), as do steps 10, 18 and so on, in the
columns of later blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Int64


class Part(NamedTuple):
    """Entries of one class of tables that change in decode steps.

    Attributes:
        tables: [k] rows of its tables in a slot mapping. first: [k] first columns of their entries
            in the fused table.
        width: entries of a table, which are used in turns.
        period, at: a request at position p changes an entry where ``p % period == at``.
        block_size: rows of a page.
    """

    tables: Int64
    first: Int64
    width: int
    period: int
    at: int
    block_size: int


class Calendar:
    """Entries that change in each step of a batch; every `alignment` steps all come round.

    Args:
        parts: which entries there are. cuts: how many of the parts end before each of the cuts that
            `due` is to tell.
        origin: [n] tokens of the requests in step 0. row_starts: [n] flat indices of their rows in
            the fused table.
        alignment: tokens of a segment.
    """

    def __init__(
        self, parts: list[Part], cuts: list[int], origin: Int64, row_starts: Int64, alignment: int
    ) -> None:
        n, num_parts, rows = len(origin), len(parts), np.arange(len(origin))[:, None]
        turns = [alignment // p.period for p in parts]  # of each part, in `alignment` steps
        sizes = [n * t * len(p.tables) for t, p in zip(turns, parts, strict=True)]
        total = sum(sizes)
        # Two bytes are sorted several times as fast as eight.
        keys = np.empty(total, np.uint16 if alignment * num_parts < 1 << 16 else np.int64)
        blocks = np.empty(total, dtype=np.int32)
        columns, outputs = np.empty((2, total), dtype=np.int64)
        counts = np.empty((alignment, num_parts), dtype=np.int64)  # entries of each step and part
        stop = 0
        for i, part in enumerate(parts):
            start, stop = stop, stop + sizes[i]
            shape = n, turns[i], len(part.tables)
            wait = (part.at - origin) % part.period
            counts[:, i] = np.tile(np.bincount(wait, minlength=part.period) * shape[2], turns[i])
            turn = np.arange(turns[i])
            steps = wait[:, None] + turn * part.period
            first = (origin + wait) // part.period
            keys[start:stop].reshape(shape)[:] = (steps * num_parts + i)[:, :, None]
            blocks[start:stop].reshape(shape)[:] = (first[:, None] + turn)[:, :, None]
            columns[start:stop].reshape(shape)[:] = (row_starts[:, None] + part.first)[:, None]
            outputs[start:stop].reshape(shape)[:] = (rows + part.tables * n)[:, None]
        order = keys.argsort(kind="stable")
        self._blocks, self._columns, self._outputs = blocks[order], columns[order], outputs[order]
        part_of = np.tile(np.arange(num_parts), alignment).repeat(counts.ravel())
        self._turns = np.array(turns, dtype=np.int32)[part_of]
        self._widths = np.array([p.width for p in parts], dtype=np.int32)[part_of]
        self._sizes = np.array([p.block_size for p in parts])[part_of]
        until = np.zeros((alignment, num_parts + 1), dtype=np.int64)
        counts.cumsum(axis=1, out=until[:, 1:])
        ends = until[:, -1].cumsum()
        bounds = np.stack([ends - until[:, -1], ends, *until[:, cuts].T], axis=1)
        self._steps: list[list[int]] = bounds.tolist()
        self._alignment, self._number, self._indices = alignment, -1, self._columns

    def due(self, age: int, snapshots: bool) -> tuple[tuple[Int64, Int64, Int64], list[int]]:
        """What changes in step `age`; of states the snapshots only if these are wanted.

        Returns:
            (flat indices, outputs and block sizes of the entries [m], as of
            `decode.DecodeChanges`; the cuts between them).
        """
        number, step = divmod(age, self._alignment)
        if number != self._number:
            self._number = number
            self._indices = self._columns + (self._blocks + number * self._turns) % self._widths
        low, high, *cuts = self._steps[step]
        if not snapshots:
            high = low + cuts[-1]
        due = slice(low, high)
        return (self._indices[due], self._outputs[due], self._sizes[due]), cuts
