"""One planner for every step: decode, drafts, prefill chunks, states, and any mix of them.

`plan` counts pages, `give` hands them out and `mapping` lays them out: all of these only read.
`commit` changes the tables, and `settle` frees the pages that the step left. A step is a list of
*entries*: one for each block of each table that the step writes rows into.

*Survivors-only pages*: a window group has entries only for the blocks that outlive the step, those
that the next query can see and the tails of boundaries that retention keeps. All other rows get
slot -1 and are never written. A chunk [0, 160) of a window of 33 tokens in blocks of 16; a query at
160 sees the 32 tokens before it, and retention keeps the boundaries 64, 128 and 160:

    tokens      0    16   32   48   64   80   96   112  128  144  160
    block       | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  | 8  | 9  |
    kept for              [   64    ]         [   128   ][   160  ]
    page          -    -   new  new   -    -   new  new  new  new

What the ring does not need after the step (blocks 2, 3, 6, 7), only resume points hold. Groups
whose queries read the step's own rows from pages (`KVCache(reads="pages")`) have entries for all
blocks.

The tables change in `commit`, so a step's attention reads them as the last step left them. A ring
is *turned* when a request starts a block: the ring then has the blocks that the next query can see
and the tail of the last boundary, and lets the others go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..arrays import NO_ROWS, Flags, Int32, Int64, ragged_arange
from ..pages import NULL, UNSHARED
from .rows import LIVE, SNAPSHOT, ClassTables, Tables

NO_COPIES: Int32 = np.empty((0, 2), dtype=np.int32)
NO_PAGES: Int32 = np.empty((0, 0), dtype=np.int32)
FAR = 1 << 40  # tokens, past any sequence
BLOCK_BITS = 32  # of an entry's sort key: (table * requests + row) << BLOCK_BITS | block


@dataclass(slots=True, eq=False)
class StepChanges:
    """A planned step: the blocks it writes, and the pages it takes.

    Attributes:
        slots, start, end: [n] requests, and their tokens before and after the step.
        written: [n] position from which dense groups write; past `start` in a replay.
        snapshot: [s] rows that may end the step at a boundary whose state is to be kept.
        tables, rows, blocks: [m] of each entry: the number of its table among dense and window
            tables, its row in the step, its block; sorted in this order.
        indices: [m] flat index of each entry in the fused table.
        inside: [tables, n] row in the page, where each request computes one token, else None.
        is_new: [m] whether an entry takes a page; else its block is open already.
        starting: [i] rows whose states have no live pages yet.
        snapping: of each state class: rows of `snapshot` that take new pages for it.
        num_new: pages needed, in all.
        pages: [m] pages of the entries. snapshots: of each state class, [j, num_tables] new pages.
        copies: [c, 2] int32 pages to copy before the step (source, destination).
        state_pages: [num_tables, n] int32 live pages of states, 0 in other rows.
    """

    slots: Int64
    start: Int64
    end: Int64
    written: Int64
    snapshot: Int64
    tables: Int64
    rows: Int64
    blocks: Int64
    indices: Int64
    inside: Int64 | None
    is_new: Flags
    starting: Int64
    snapping: list[Int64]
    num_new: int
    pages: Int64 = field(default_factory=lambda: NO_ROWS)
    snapshots: list[Int64] = field(default_factory=list)
    copies: Int32 = field(default_factory=lambda: NO_COPIES)
    state_pages: Int32 = field(default_factory=lambda: NO_PAGES)

    @property
    def replaying(self) -> bool:
        """Whether some tokens are computed once more."""
        return self.written is not self.start and bool((self.written > self.start).any())


@dataclass(slots=True, eq=False)
class Effects:
    """What a committed step left to settle.

    Attributes:
        tails: [k, pages_per_point] pages of the tails asked for.
        gone: pages that left window rings. unclaimed: new window pages that no ring took.
        copies: [c, 2] int32 pages to copy after the step.
    """

    tails: Int32
    gone: list[Int32]
    unclaimed: Int64
    copies: Int32


class StepPlanner:
    """Steps over the tables of all groups.

    Args:
        tables: what the steps read and write.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables, self._pool, self._layout = tables, tables.pool, tables.layout
        self._dense, self._windows, self._states = tables.dense, tables.windows, tables.states
        self._flat = tables.array.reshape(-1)
        self._row: Int64 = np.array(self._layout.num_columns)
        blocks = tables.blocks
        each = [(b.spec, t, f) for b in blocks for t, f in zip(b.spec.tables, b.first, strict=True)]
        self._num_dense = sum(b.spec.num_tables for b in tables.dense)

        def per_table(values: list[int]) -> Int64:
            return np.array(values, dtype=np.int64)

        # Of each dense and window table: its row in a slot mapping, first column, ring width, block
        # size, and the tokens before the end of a step whose blocks survive it.
        self._table_row = per_table([int(t) for _, t, _ in each])
        self._first = per_table([int(f) for _, _, f in each])
        self._width = per_table([c.width for c, _, _ in each])
        self._size = per_table([c.block_size for c, _, _ in each])
        self._size_column = self._size[:, None]
        self.sizes: list[int] = self._size.tolist()  # of blocks, in the order of these tables
        # Row in a slot mapping of each table, those of states last.
        states = [t for state in tables.states for t in state.spec.tables.tolist()]
        self.table_rows: list[int] = self._table_row.tolist() + states
        reach = [FAR if c.holds_all else max(1, c.reach) for c, _, _ in each]
        self._reach = per_table(reach)[:, None]
        self._tail = per_table([c.tail for c, _, _ in each])
        self._sparse = per_table([i for i, (c, _, _) in enumerate(each) if not c.holds_all])
        self._pairs = NO_ROWS, NO_ROWS  # of `_every_pair`

    # Plan.

    def plan(
        self,
        slots: Int64,
        start: Int64,
        end: Int64,
        written: Int64,
        kept: tuple[Int64, Int64],
        snapshot: Int64,
    ) -> StepChanges:
        """Count what a step needs; nothing changes.

        Args:
            slots, start, end, written, snapshot: as of `StepChanges`.
            kept: (row, boundary) of each tail that must outlive the step, sorted.
        """
        inside: Int64 | None = None
        if written is start and (end - start).max() == 1:  # an entry for each table and request
            tables, rows = self._every_pair(len(slots))
            numbers, inside = np.divmod(start, self._size_column)
            blocks, is_new = numbers.ravel(), (inside == 0).ravel()
        else:
            tables, rows, blocks, is_new = self._entries(start, end, written, *kept)
        indices: Int64 = (slots * self._row)[rows] + self._first[tables]
        indices += blocks % self._width[tables]
        num_new = int(np.count_nonzero(is_new))
        starting, snapping = NO_ROWS, []
        for state in self._states:
            starting = (state.table[slots, 0, LIVE] == NULL).nonzero()[0]
            shared = self._pool.counts[state.table[slots[snapshot], 0, SNAPSHOT]] != UNSHARED
            snapping.append(snapshot[shared])
            num_new += (len(starting) + len(snapping[-1])) * state.spec.num_tables
        return StepChanges(
            slots, start, end, written, snapshot, tables, rows, blocks, indices, inside, is_new,
            starting, snapping, num_new,
        )  # fmt: skip

    def _every_pair(self, n: int) -> tuple[Int64, Int64]:
        """(tables, rows) [tables * n] of all pairs; the last ones are kept."""
        if len(self._pairs[0]) != n * len(self._size):
            tables = np.arange(len(self._size)).repeat(n)
            self._pairs = tables, np.tile(np.arange(n), len(self._size))
        return self._pairs

    def _entries(
        self, start: Int64, end: Int64, written: Int64, kept_rows: Int64, kept: Int64
    ) -> tuple[Int64, Int64, Int64, Flags]:
        """Tables, rows, blocks and `is_new` of the entries [m] of a step."""
        begin: Int64 = np.empty((len(self._size), len(start)), dtype=np.int64)
        begin[: self._num_dense], begin[self._num_dense :] = written, start
        first, stop = begin // self._size_column, -(-end // self._size_column)
        low = np.maximum(first, np.maximum(end - self._reach, 0) // self._size_column)
        owners: Int64 | None = None  # table * n + row of each interval, unless it is its index
        lows, highs = low.ravel(), stop.ravel()
        if kept.size and self._sparse.size:
            owners, lows, highs = self._with_tails(first, low, stop, kept_rows, kept)
        which, blocks = ragged_arange(lows, np.maximum(highs - lows, 0))
        pairs = which if owners is None else owners[which]
        tables, rows = np.divmod(pairs, len(start))
        return tables, rows, blocks, blocks * self._size[tables] >= begin.ravel()[pairs]

    def _with_tails(
        self, first: Int64, low: Int64, stop: Int64, rows: Int64, boundaries: Int64
    ) -> tuple[Int64, Int64, Int64]:
        """The intervals of blocks [low, stop) [tables, n], with the tails of `boundaries` [k] in
        tables that keep survivors only, none of them twice.

        Returns:
            (table * n + row, first block, block after the last) of each interval, sorted.
        """
        n = low.shape[1]
        tables = self._sparse.repeat(len(rows))
        rows, boundaries = np.tile(rows, len(self._sparse)), np.tile(boundaries, len(self._sparse))
        highs = boundaries // self._size[tables]
        lows = np.maximum(highs - self._tail[tables], first[tables, rows])
        before = (lows < low[tables, rows]).nonzero()[0]
        owners = np.concatenate([(tables * n + rows)[before], np.arange(low.size)])
        lows = np.concatenate([lows[before], low.ravel()])
        highs = np.concatenate([highs[before], stop.ravel()])
        order = np.lexsort((highs, owners))
        owners, lows, highs = owners[order], lows[order], highs[order]
        # Each interval starts where those of its table and row before it stopped.
        same = owners[1:] == owners[:-1]
        lows[1:] = np.where(same, np.maximum(lows[1:], highs[:-1]), lows[1:])
        return owners, lows, highs

    def per_group(self, keys: Int64) -> dict[str, int]:
        """Pages that each group needs for `keys` of pages (see `wanted`)."""
        needed = {g.name: 0 for g in self._layout.groups}
        counts = np.bincount(keys >> BLOCK_BITS, minlength=len(self.table_rows)).tolist()
        for row, n in zip(self.table_rows, counts, strict=True):
            needed[self._layout.groups[row].name] += n
        return needed

    # Pages and slots.

    def wanted(self, step: StepChanges) -> tuple[Int64, Int64]:
        """Whose pages a step takes, and what for, in the order in which `give` gets them.

        Returns:
            (rows of the step [num_new], keys [num_new]): ``number of the table << BLOCK_BITS |
            block``, where tables of states come last and have `LIVE` or `SNAPSHOT` for a block.
        """
        new = step.is_new.nonzero()[0]
        rows, keys = [step.rows[new]], [step.tables[new] << BLOCK_BITS | step.blocks[new]]
        first = len(self._size)
        for state, snapping in zip(self._states, step.snapping, strict=True):
            tables = first + np.arange(state.spec.num_tables)
            for column, which in ((LIVE, step.starting), (SNAPSHOT, snapping)):
                rows.append(which.repeat(len(tables)))
                keys.append(np.tile(tables << BLOCK_BITS | column, len(which)))
            first += len(tables)
        return np.concatenate(rows), np.concatenate(keys)

    def few(self, start: int, end: int) -> list[int]:
        """Keys of the blocks that start in [start, end), as of `wanted`: all that a request without
        states takes for so few tokens that each of its blocks survives the step."""
        return [
            t << BLOCK_BITS | block
            for t, size in enumerate(self.sizes)
            for block in range(-(-start // size), -(-end // size))
        ]

    def give(self, step: StepChanges, pages: Int64) -> None:
        """Give `pages` [num_new] to the step."""
        step.pages = own = self._flat[step.indices].astype(np.int64)
        num_blocks = np.count_nonzero(step.is_new)
        own[step.is_new] = pages[:num_blocks]
        self._fill_states(step, pages[num_blocks:])

    def mapping(self, step: StepChanges, cu: Int32, total: int) -> Int64:
        """The slot mapping [num_tables, total] of a step that has its pages."""
        own = step.pages
        mapping: Int64 = np.full((len(self._layout.groups), total), -1, dtype=np.int64)
        if step.inside is not None:
            mapping[self._table_row] = own.reshape(step.inside.shape) * self._size_column
            mapping[self._table_row] += step.inside
            return mapping
        tables, rows, blocks = step.tables, step.rows, step.blocks
        size, begin, end = self._size[tables], step.start[rows], step.end[rows]
        low = np.maximum(blocks * size, begin)
        if step.replaying:
            dense = tables < self._num_dense
            low[dense] = np.maximum(low, step.written[rows])[dense]
        high = np.minimum((blocks + 1) * size, end)
        # The rows of an entry are neighbours, in the slot mapping as in its page.
        at = self._table_row[tables] * total + cu[rows] + (low - begin)
        slot = own * size + (low - blocks * size)
        which, rows_of = ragged_arange(at, high - low)
        mapping.reshape(-1)[rows_of] = (slot - at)[which] + rows_of
        return mapping

    def _fill_states(self, step: StepChanges, pages: Int64) -> None:
        """Give `pages` to the states; those that start do so from their snapshot, or page 0."""
        if not self._states:
            return
        n, copies = len(step.slots), []
        step.state_pages = np.zeros((len(self._layout.groups), n), dtype=np.int32)
        for state, snapping in zip(self._states, step.snapping, strict=True):
            k = state.spec.num_tables
            num_live, num_snapshots = len(step.starting) * k, len(snapping) * k
            new, pages = pages[:num_live], pages[num_live:]
            step.snapshots.append(pages[:num_snapshots].reshape(-1, k))
            pages = pages[num_snapshots:]
            live = state.table[step.slots, :, LIVE]
            if num_live:
                live[step.starting] = new.reshape(-1, k)
                sources = state.table[step.slots[step.starting], :, SNAPSHOT].ravel()
                copies.append(np.stack([sources, new.astype(np.int32)], axis=1))
            step.state_pages[state.spec.rows] = live.T
        if copies:
            step.copies = np.concatenate(copies)

    def cached_rows(self, step: StepChanges, cu: Int32) -> tuple[Int64, Int64]:
        """Rows of a replay that dense groups hold already.

        Returns:
            (rows of the step [m] int64, their slots [num_tables, m] int64, -1 in other groups).
        """
        counts = np.maximum(0, np.minimum(step.written, step.end) - step.start)
        which, positions = ragged_arange(step.start, counts)
        rows = cu[which] + positions - step.start[which]
        where = np.full((len(self._layout.groups), len(rows)), -1, dtype=np.int64)
        for block in self._dense:
            size = block.spec.block_size
            indices = block.indices(step.slots[which], positions[:, None] // size)[:, :, 0]
            where[block.spec.tables] = self._flat[indices.T] * np.int64(size) + positions % size
        return rows, where

    # Commit.

    def commit(self, step: StepChanges, end: Int64, kept: tuple[Int64, Int64]) -> Effects:
        """Make a step real; the caller holds what it needs of the tails, and calls `settle`.

        Args:
            end: [n] tokens after the step, rejected ones not counted.
            kept: [k] (rows, boundaries) whose tails the caller is about to keep, sorted by row.
        """
        tails = np.zeros((len(kept[0]), self._layout.pages_per_point), dtype=np.int32)
        gone: list[Int32] = []
        taken, cut = step.is_new, int(step.tables.searchsorted(self._num_dense))
        dense = taken[:cut].nonzero()[0]
        if end is not step.end:
            stays = step.blocks[dense] * self._size[step.tables[dense]] < end[step.rows[dense]]
            self._pool.put(step.pages[dense[~stays]])
            dense = dense[stays]
        if dense.size:
            indices, pages = step.indices[dense], step.pages[dense]
            self._flat[indices] = pages
            self._tables.note(indices, pages)
        first = self._num_dense
        for window in self._windows:
            if kept[0].size:
                part = self._tails_in(step, window, first, *kept)
                c = window.spec
                columns = slice(c.tail_offset, c.tail_offset + c.num_tables * c.tail)
                tails[:, columns] = part.reshape(len(tails), -1)
            gone.append(self._turn(step, window, first, end))
            first += window.spec.num_tables
        new = cut + taken[cut:].nonzero()[0]
        copies = self._commit_states(step, end) if self._states else NO_COPIES
        for state in self._states if kept[0].size else ():
            c = state.spec
            columns = slice(c.tail_offset, c.tail_offset + c.num_tables)
            tails[:, columns] = state.table[step.slots[kept[0]], :, SNAPSHOT]
        return Effects(tails, gone, step.pages[new], copies)

    def settle(self, effects: Effects) -> None:
        """Free what a step left and nobody holds."""
        for pages in effects.gone:
            self._pool.unuse(pages)
        new = effects.unclaimed
        if new.size:
            self._pool.put(new[self._pool.counts[new] == NULL])

    def _turn(self, step: StepChanges, window: ClassTables, first: int, end: Int64) -> Int32:
        """Turn the rings of the rows that start a block; returns the pages that leave them.

        Args:
            first: number of the class's first table.
            end: [n] tokens after the step.
        """
        c, size = window.spec, window.spec.block_size
        rows = ((end - 1) // size > (step.start - 1) // size).nonzero()[0]
        if not rows.size:
            return NO_PAGES.ravel()
        last, before = (end[rows] - 1) // size, (step.start[rows] - 1) // size
        blocks = (last - (c.width - 1))[:, None] + np.arange(c.width)
        indices = window.indices(step.slots[rows], blocks)
        old = self._flat[indices]
        pages = old * (blocks <= before[:, None])[:, None, :]
        # Entries of these rows, where they are in the rings.
        low, high = step.tables.searchsorted((first, first + c.num_tables)).tolist()
        row_in = np.full(len(step.slots), -1)
        row_in[rows] = np.arange(len(rows))
        r = row_in[step.rows[low:high]]
        column = step.blocks[low:high] - blocks[r, 0]
        inside = ((r >= 0) & (column >= 0) & (column < c.width)).nonzero()[0]
        table = step.tables[low:high][inside] - first
        pages[r[inside], table, column[inside]] = step.pages[low:high][inside]
        # The query of the newest token sees one row more than the next one.
        live = blocks >= (np.maximum(0, step.end[rows] - c.reach - 1) // size)[:, None]
        # The last boundary stays resumable, and the last one whose segment has its key.
        for known in {0, self._layout.lookahead}:
            tail_end = ((end[rows] - known) // self._layout.alignment * c.per_segment)[:, None]
            live |= (blocks < tail_end) & (blocks >= tail_end - c.tail)
        pages *= (live & (blocks >= 0))[:, None, :]
        changed = old != pages
        indices, new, gone = indices[changed], pages[changed], old[changed]
        self._pool.use_new(new)
        self._flat[indices] = new
        self._tables.note(indices, new)
        left: Int32 = gone[gone != 0]
        return left

    def _tails_in(
        self, step: StepChanges, window: ClassTables, first: int, rows: Int64, boundaries: Int64
    ) -> Int32:
        """Pages of the tails of `boundaries` [k] of `rows` [k], from the entries and from the rings
        before they turn: [k, num_tables, tail]."""
        c, size = window.spec, window.spec.block_size
        blocks = (boundaries // size)[:, None] - np.arange(c.tail, 0, -1)
        before = ((step.start[rows] - 1) // size)[:, None]
        in_ring = (blocks >= 0) & (blocks > before - c.width) & (blocks <= before)
        pages = self._flat[window.indices(step.slots[rows], blocks)] * in_ring[:, None, :]
        n = len(step.slots)
        keys = (step.tables * n + step.rows) << BLOCK_BITS | step.blocks
        tables = first + np.arange(c.num_tables)[:, None]
        wanted = (tables * n + rows[:, None, None]) << BLOCK_BITS
        wanted = wanted | np.maximum(blocks, 0)[:, None, :]
        at = np.minimum(keys.searchsorted(wanted), len(keys) - 1)
        found = (keys[at] == wanted) & (blocks >= 0)[:, None, :]
        tails: Int32 = np.where(found, step.pages[at], pages).astype(np.int32)
        return tails

    def _commit_states(self, step: StepChanges, end: Int64) -> Int32:
        """Make the states of a step real; returns the copies [c, 2] that snapshots need."""
        if not (step.snapshot.size or step.starting.size):
            return NO_COPIES
        ends = step.snapshot[end[step.snapshot] % self._layout.alignment == 0]
        self._tables.snapshot_at[step.slots[ends]] = end[ends]
        copies = []
        for state, snapping, new in zip(self._states, step.snapping, step.snapshots, strict=True):
            live = step.state_pages[state.spec.tables].T  # [n, num_tables]
            if step.starting.size:
                slots = step.slots[step.starting]
                indices = state.indices(slots, np.full((len(slots), 1), LIVE))[:, :, 0]
                self._put(indices, live[step.starting])
            due = end[snapping] % self._layout.alignment == 0
            self._pool.put(new[~due].ravel())
            slots = step.slots[snapping[due]]
            indices = state.indices(slots, np.full((len(slots), 1), SNAPSHOT))[:, :, 0]
            self._pool.unuse(self._flat[indices].ravel())
            self._put(indices, new[due].astype(np.int32))
            snapshots = state.table[step.slots[ends], :, SNAPSHOT]
            copies.append(np.stack([live[ends].ravel(), snapshots.ravel()], axis=1))
        return np.concatenate(copies)

    def _put(self, indices: Int64, pages: Int32) -> None:
        """Put pages that were just taken into entries of state tables."""
        self._flat[indices] = pages
        self._pool.users[pages] = 1
        self._tables.note(indices, pages)
