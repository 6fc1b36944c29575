"""One planner for every step: decode, drafts, prefill chunks, states, and any mix of them.

A plan changes no table: `commit` does. A window group takes pages only for blocks that outlive the
step: those that the next query sees, and tails of kept boundaries. Other rows get slot -1 and are
never written. With ``reads="pages"`` all rows get pages. A chunk [0, 160), window 33, blocks of 16,
where retention keeps the boundaries 64, 128 and 160:

    tokens      0    16   32   48   64   80   96   112  128  144  160
    block       | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  | 8  | 9  |
    kept for              [   64    ]         [   128   ][   160  ]
    page          -    -   new  new   -    -   new  new  new  new

After the step only resume points hold blocks 2, 3 and 6; the window of token 159 begins in block 7.
Where a request starts a block, its ring *turns*: dead blocks leave and new ones enter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import NO_ROWS, ONE, Int32, Int64, ragged_arange
from ..pages import NULL, UNSHARED, UNUSED
from ..plan import StepPlan
from .rows import LIVE, SNAPSHOT, ClassTables, Tables

NO_COPIES: Int32 = np.empty((0, 2), dtype=np.int32)
NO_PAGES: Int32 = np.empty((0, 0), dtype=np.int32)
BLOCK_BITS = 32  # of a block reference: table << BLOCK_BITS | block


@dataclass(slots=True, eq=False)
class NewBlocks:
    """Blocks of one class that a step starts and that take a page in each table of the class.

    Attributes:
        requests, newest: [r] requests (numbers in the step) that start a block; their newest block
            before the step, -1 for none.
        which, blocks: [m] index into `requests`, and block, sorted.
        unwritten: [r] position from which a token has slot -1 unless its block is in `blocks`;
            None: every token has a slot.
        pages: [num_tables, m] of the blocks; [num_tables, 0] until `StepPlanner.give`.
    """

    requests: Int64
    newest: Int64
    which: Int64
    blocks: Int64
    unwritten: Int64 | None
    pages: Int64


@dataclass(slots=True, eq=False)
class StepChanges:
    """A planned step: the blocks it starts, and the pages it takes.

    Attributes:
        slots: [n] slots of the requests.
        start, end: [n] tokens of each request before and after the step.
        written: [n] position from which dense groups write; past `start` in a replay.
        replaying: True if some tokens are computed once more.
        longest: most tokens of a request in the step.
        snapshot_requests: [s] requests that may end the step at a boundary that keeps its state.
        blocks: new blocks of each dense and window class.
        num_new: pages needed.
        starting: [i] requests whose states have no live pages yet.
        needs_snapshot_page, snapshot_pages: [state class] [j] `snapshot_requests` that take new
            pages, and [j, num_tables] these.
        copies, state_pages: see `StepPlan`.
    """

    slots: Int64
    start: Int64
    end: Int64
    written: Int64
    replaying: bool
    longest: int
    snapshot_requests: Int64
    blocks: list[NewBlocks]
    num_new: int
    starting: Int64
    needs_snapshot_page: list[Int64]
    snapshot_pages: list[Int64]
    copies: Int32
    state_pages: Int32


@dataclass(slots=True, eq=False)
class Effects:
    """Pages of a committed step: [k, pages_per_point] of kept tails, those that left window rings,
    new ones that rings took or not, and copies [c, 2]."""

    tails: Int32
    gone: list[Int32]
    new: list[Int64]
    copies: Int32


class StepPlanner:
    """Steps over the tables of all groups.

    Attributes:
        sizes: block sizes of the dense and window tables.
        table_groups: group (row of a slot mapping) of each table, those of states last.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables, self._pool, self._layout = tables, tables.pool, tables.layout
        self._dense, self._states = tables.dense, tables.states
        self._flat = tables.array.reshape(-1)
        self.sizes = [b.cls.block_size for b in tables.blocks for _ in b.first]
        each = tables.blocks + tables.states
        self.table_groups: list[int] = [t for b in each for t in b.cls.tables.tolist()]
        # Group of each state table, and the live page of each slot.
        self._live_pages = [
            (group, state.table[:, i, LIVE])
            for state in tables.states
            for i, group in enumerate(state.cls.tables.tolist())
        ]
        self._alignment: Int64 = np.array(self._layout.alignment)
        self._no_replays = NO_ROWS, np.empty((len(self._layout.groups), 0), dtype=np.int64)
        # Tokens that the key of a segment looks ahead, and none.
        self._lookaheads = [np.array(k) for k in sorted({0, self._layout.lookahead})]

    # Plan.

    def plan(
        self,
        slots: Int64,
        start: Int64,
        end: Int64,
        written: Int64,
        longest: int,
        kept: tuple[Int64, Int64],
        snapshot_requests: Int64,
    ) -> StepChanges:
        """List the changes of a step. `kept`: sorted (requests, boundaries) of the tails that must
        outlive it; others as in `StepChanges`."""
        final = end - ONE
        before = start - ONE
        first = before if written is start else written - ONE
        blocks, num_new = [], 0
        for table in self._tables.blocks:
            begin = before if table.is_window else first
            new = self._new_blocks(table, begin, final, longest, kept)
            blocks.append(new)
            num_new += table.cls.num_tables * len(new.blocks)
        replaying = written is not start and bool((written > start).any())
        changes = StepChanges(
            slots, start, end, written, replaying, longest, snapshot_requests, blocks, num_new,
            NO_ROWS, [], [], NO_COPIES, NO_PAGES,
        )  # fmt: skip
        if self._states:
            self._plan_states(changes)
        return changes

    def _plan_states(self, changes: StepChanges) -> None:
        slots, requests = changes.slots, changes.snapshot_requests
        shape = len(self._layout.groups), len(slots)
        changes.state_pages = np.zeros(shape, dtype=np.int32)
        for group, pages in self._live_pages:
            changes.state_pages[group] = pages[slots]
        changes.starting = (changes.state_pages[self._live_pages[0][0]] == NULL).nonzero()[0]
        for state in self._states:
            shared = requests
            if requests.size:
                pages = state.table[slots[requests], 0, SNAPSHOT]
                shared = requests[self._pool.counts[pages] != UNSHARED]
            changes.needs_snapshot_page.append(shared)
            changes.num_new += (len(changes.starting) + len(shared)) * state.cls.num_tables

    def _new_blocks(
        self,
        table: ClassTables,
        before: Int64,
        final: Int64,
        longest: int,
        kept: tuple[Int64, Int64],
    ) -> NewBlocks:
        """Blocks of one class that a step starts. `before`, `final`: [n] position before the first
        that it writes, and its last."""
        newest, last = before // table.size, final // table.size  # blocks
        requests = (last > newest).nonzero()[0]
        if not requests.size:
            return NewBlocks(requests, NO_ROWS, NO_ROWS, NO_ROWS, None, table.no_pages)
        newest, last = newest[requests], last[requests]
        reach = max(1, table.cls.reach)  # with a window of one token the newest row still stays
        # Within the reach the next token sees every row of the step, so that all blocks get pages.
        # (`longest` is of the batch: one long chunk sends all of it the general way.)
        if table.cls.holds_all or longest <= reach:
            if longest <= table.cls.block_size:  # one each
                which = np.arange(len(requests))
                return NewBlocks(requests, newest, which, last, None, table.no_pages)
            which, blocks = ragged_arange(newest + ONE, last - newest)
            return NewBlocks(requests, newest, which, blocks, None, table.no_pages)
        begin, stop = before[requests] + ONE, last + ONE
        first = begin // table.size  # the open block, if there is one
        low = np.maximum(first, np.maximum(final[requests] + 1 - reach, 0) // table.size)
        owners, boundaries = self._of_requests(requests, *kept)
        high = boundaries // table.size
        tails = np.maximum(high - table.cls.tail, first[owners])
        # Count for each block the intervals that need it: they begin at or before it, and end
        # after it.
        which, blocks = ragged_arange(first, stop - first)
        at, num = np.cumsum(stop - first) - stop, len(blocks) + 1
        needed = np.bincount(np.concatenate([at + low, at[owners] + tails]), minlength=num)
        needed -= np.bincount(np.concatenate([at + stop, at[owners] + high]), minlength=num)
        stays, is_open = needed.cumsum()[:-1] > 0, blocks == newest[which]
        unwritten = (newest + ONE) * table.size
        lost = which[is_open & ~stays]
        unwritten[lost] = begin[lost]
        stays &= ~is_open
        return NewBlocks(requests, newest, which[stays], blocks[stays], unwritten, table.no_pages)

    @staticmethod
    def _of_requests(requests: Int64, owner: Int64, kept: Int64) -> tuple[Int64, Int64]:
        owners = np.minimum(requests.searchsorted(owner), len(requests) - 1)
        known = requests[owners] == owner
        return owners[known], kept[known]

    def per_group(self, block_refs: Int64) -> dict[str, int]:
        needed = {g.name: 0 for g in self._layout.groups}
        counts = np.bincount(block_refs >> BLOCK_BITS, minlength=len(self.table_groups)).tolist()
        for group, n in zip(self.table_groups, counts, strict=True):
            needed[self._layout.groups[group].name] += n
        return needed

    # Pages and slots.

    def wanted(self, changes: StepChanges) -> tuple[Int64, Int64]:
        """Blocks that need the pages of a step, in the order of `give`: (requests [num_new], block
        references [num_new]). A reference is ``number of the table << BLOCK_BITS | block``; tables
        of states come last, with `LIVE` or `SNAPSHOT` for a block."""
        requests, block_refs, first = [], [], 0
        for table, new in zip(self._tables.blocks, changes.blocks, strict=True):
            tables = first + np.arange(table.cls.num_tables)
            requests.append(np.tile(new.requests[new.which], len(tables)))
            block_refs.append((tables[:, None] << BLOCK_BITS | new.blocks).ravel())
            first += len(tables)
        for state, needing in zip(self._states, changes.needs_snapshot_page, strict=True):
            tables = first + np.arange(state.cls.num_tables)
            for column, which in ((LIVE, changes.starting), (SNAPSHOT, needing)):
                requests.append(which.repeat(len(tables)))
                block_refs.append(np.tile(tables << BLOCK_BITS | column, len(which)))
            first += len(tables)
        return np.concatenate(requests), np.concatenate(block_refs)

    def few(self, start: int, end: int) -> list[int]:
        """References (see `wanted`) of the blocks that start in [start, end). A step of one request
        needs no other pages if it starts at most one block a table and takes no state pages."""
        return [
            t << BLOCK_BITS | block
            for t, size in enumerate(self.sizes)
            for block in range(-(-start // size), -(-end // size))
        ]

    def give(self, changes: StepChanges, pages: Int64) -> None:
        for table, new in zip(self._tables.blocks, changes.blocks, strict=True):
            num = table.cls.num_tables * len(new.blocks)
            new.pages, pages = pages[:num].reshape(table.cls.num_tables, -1), pages[num:]
        if self._states:
            self._fill_states(changes, pages)

    def arrays(self, changes: StepChanges, pages: Int64) -> StepPlan:
        """Give a step its `pages`, and make the arrays that kernels need."""
        if len(pages) or self._states:
            self.give(changes, pages)
        slots, counts, one_each = changes.slots, changes.end - changes.start, changes.longest == 1
        if one_each:
            cu, positions = np.arange(len(counts) + 1, dtype=np.int32), changes.start
        else:
            cu = np.zeros(len(counts) + 1, dtype=np.int32)
            np.cumsum(counts, out=cu[1:])
            positions = np.arange(int(cu[-1])) + (changes.start - cu[:-1]).repeat(counts)
            slots = slots.repeat(counts)
        mapping: Int64 = self._tables.offset.take(slots, axis=1)
        mapping += positions
        for state in self._states:
            mapping[state.cls.tables] = -1
        for table, new in zip(self._tables.blocks, changes.blocks, strict=True):
            if not new.requests.size:
                continue
            tables = table.cls.tables[:, None]
            if one_each:
                mapping[tables, new.requests] = new.pages * table.size
                continue
            shift = cu[:-1] - changes.start  # from a position to its row in the step
            if new.unwritten is not None:
                beyond = changes.end[new.requests] - new.unwritten
                mapping[tables, ragged_arange(new.unwritten + shift[new.requests], beyond)[1]] = -1
            owners, first = new.requests[new.which], new.blocks * table.size
            lengths = np.minimum(changes.end[owners] - first, table.size)
            which, rows = ragged_arange(first + shift[owners], lengths)
            offset = new.pages * table.size - (first + shift[owners])
            mapping[tables, rows] = offset[:, which] + rows
        replays = self._no_replays
        if changes.replaying:
            replays = self.cached_rows(changes, cu)
            mapping[:, replays[0]] = np.where(replays[1] >= 0, -1, mapping[:, replays[0]])
        return StepPlan(
            changes.slots, counts, cu, changes.end.astype(np.int32), positions, mapping, *replays,
            changes.copies, changes.state_pages, changes,
        )  # fmt: skip

    def _fill_states(self, changes: StepChanges, pages: Int64) -> None:
        """Give `pages` to the states; those that start do so from their snapshot, or page 0."""
        copies = []
        for state, needing in zip(self._states, changes.needs_snapshot_page, strict=True):
            k = state.cls.num_tables
            if changes.starting.size:
                num = len(changes.starting) * k
                new, pages = pages[:num].astype(np.int32), pages[num:]
                changes.state_pages[state.cls.tables[:, None], changes.starting] = new.reshape(
                    -1, k
                ).T
                sources = state.table[changes.slots[changes.starting], :, SNAPSHOT].ravel()
                copies.append(np.stack([sources, new], axis=1))
            num = len(needing) * k
            changes.snapshot_pages.append(pages[:num].reshape(-1, k))
            pages = pages[num:]
        if copies:
            changes.copies = np.concatenate(copies)

    def cached_rows(self, changes: StepChanges, cu: Int32) -> tuple[Int64, Int64]:
        """Rows [m] of a replay that dense groups hold already, and their slots [num_groups, m], -1
        in others."""
        counts = np.maximum(0, np.minimum(changes.written, changes.end) - changes.start)
        which, positions = ragged_arange(changes.start, counts)
        rows = cu[which] + positions - changes.start[which]
        where = np.full((len(self._layout.groups), len(rows)), -1, dtype=np.int64)
        for table in self._dense:
            indices = table.indices_of_block(changes.slots[which], positions // table.size)
            where[table.cls.tables] = self._flat[indices] * table.size + positions % table.size
        return rows, where

    # Commit.

    def commit(
        self, changes: StepChanges, end: Int64, kept: tuple[Int64, Int64], all_stay: bool
    ) -> Effects:
        """Make a step to `end` [n] real; `all_stay`: no token was rejected. The caller holds tails
        of `kept` (requests, boundaries) that it needs, then calls `free_unheld`."""
        effects = Effects(NO_PAGES, [], [], NO_COPIES)
        if kept[0].size:
            effects.tails = np.zeros((len(kept[0]), self._layout.pages_per_point), dtype=np.int32)
        for table, new in zip(self._tables.blocks, changes.blocks, strict=True):
            if kept[0].size and table.is_window:
                table.cls.tails(effects.tails)[:] = self._tails(changes, table, new, *kept)
            if not new.requests.size:
                continue
            slots = changes.slots[new.requests]
            one_each = all_stay and len(new.blocks) == len(new.requests)
            if not table.is_window:
                self._append(changes, table, new, None if all_stay else end)
            else:
                effects.gone.append(self._turn(changes, table, new, slots, end, all_stay, one_each))
                if not one_each:
                    effects.new.append(new.pages.ravel())
            if one_each:
                offset = (new.pages - new.blocks) * table.size
                self._tables.offset[table.cls.tables[:, None], slots] = offset
            else:
                self._tables.open(table, slots, end[new.requests])
        if self._states:
            effects.copies = self._commit_states(changes, end)
        for state in self._states if kept[0].size else ():
            snapshots = state.table[changes.slots[kept[0]], :, SNAPSHOT]
            state.cls.tails(effects.tails)[:, :, 0] = snapshots
        return effects

    def free_unheld(self, effects: Effects) -> None:
        for gone in effects.gone:
            self._pool.unuse(gone)
        for new in effects.new:
            self._pool.put(new[self._pool.counts[new] == UNUSED])

    def _append(
        self, changes: StepChanges, dense: ClassTables, new: NewBlocks, end: Int64 | None
    ) -> None:
        """Write new blocks to the tables of a dense class. `end`: [n] tokens after the commit, past
        which blocks are freed; None if no token was rejected."""
        requests, blocks, pages = new.requests[new.which], new.blocks, new.pages
        if end is not None:
            stays = blocks * dense.size < end[requests]
            self._pool.put(pages[:, ~stays].ravel())
            requests, blocks, pages = requests[stays], blocks[stays], pages[:, stays]
        indices = dense.indices_of_block(changes.slots[requests], blocks)
        self._flat[indices] = pages
        self._tables.note(indices, pages)

    def _turn(
        self,
        changes: StepChanges,
        window: ClassTables,
        new: NewBlocks,
        slots: Int64,
        end: Int64,
        all_stay: bool,
        one_each: bool,
    ) -> Int32:
        """Turn the rings of the requests that start a block; returns the pages that leave them.
        `one_each`: each of the requests takes one block, its last."""
        c, until = window.cls, end[new.requests]
        last = new.blocks if one_each else (until - ONE) // window.size
        # At most `num` columns of a ring change: that of the first new block and those after it.
        # The others hold newest blocks, which stay. Width 4, `c.blocks_in_reach` 2, a step of at
        # most 16 tokens that starts block 6: `num` is 3, and block 5 stays.
        #     block    2   3   4   5   6
        #     column   2   3   0   1   2
        #     may change   x   x       x    in the order 6, 3, 4; block 6 replaces block 2
        num = min(c.width, c.width - c.blocks_in_reach - (-changes.longest // c.block_size))
        first = np.maximum(new.newest, last - window.width) + ONE
        # All columns of all requests are in one dimension, in which numpy is quickest.
        row, column = np.divmod(np.arange(len(last) * num), num)
        blocks = first[row] + column
        blocks -= (blocks > last[row]) * window.width
        # The query of the step's last token may read this table after the commit. With a window
        # of 33 and end 100, it sees rows from 67 on, and the query after it those from 68 on.
        low = (changes.end[new.requests] - window.reach - ONE) // window.size
        needed = blocks >= low[row]
        # The last boundary stays resumable, and the last one whose segment has its key.
        for lookahead in self._lookaheads:
            tail_end = ((until - lookahead) // self._alignment * window.per_segment)[row]
            needed |= (blocks < tail_end) & (blocks >= tail_end - window.tail)
        if not all_stay:  # some may end in the block where they began
            needed |= (last == new.newest)[row]
        stays = needed & (blocks <= new.newest[row])
        indices = window.indices_of_blocks(slots, blocks.reshape(-1, num))
        old = self._flat[indices]
        pages = old * stays.reshape(-1, 1, num)
        gone: Int32 = old[pages != old]
        which, column, entering = new.which, new.blocks - first[new.which], new.pages
        if not one_each:
            inside = ((column >= 0) & (new.blocks <= last[which])).nonzero()[0]
            inside = inside[needed[which[inside] * num + column[inside]]]
            which, column, entering = which[inside], column[inside], entering[:, inside]
        pages[which, :, column] = entering.T
        self._pool.counts[entering] = UNSHARED
        self._flat[indices] = pages
        if self._tables.deltas is not None:
            changed = pages != old
            self._tables.note(indices[changed], pages[changed])
        return gone

    def _tails(
        self,
        changes: StepChanges,
        window: ClassTables,
        new: NewBlocks,
        requests: Int64,
        boundaries: Int64,
    ) -> Int32:
        """[k, num_tables, tail] pages of tails, from new blocks and from rings not turned yet."""
        c = window.cls
        blocks = (boundaries // window.size)[:, None] - np.arange(c.tail, 0, -1)
        before = ((changes.start[requests] - 1) // window.size)[:, None]
        in_ring = (blocks >= 0) & (blocks <= before)
        pages = (
            self._flat[window.indices_of_blocks(changes.slots[requests], blocks)]
            * in_ring[:, None, :]
        )
        started = new.requests[new.which] << BLOCK_BITS | new.blocks
        wanted = requests[:, None] << BLOCK_BITS | np.maximum(blocks, 0)
        at = started.searchsorted(wanted)
        found = np.append(started, -1)[at] == wanted
        found &= blocks >= 0
        row, column = found.nonzero()
        pages[row, :, column] = new.pages[:, at[row, column]].T
        return pages

    def _commit_states(self, changes: StepChanges, end: Int64) -> Int32:
        """Make the states of a step real; returns the copies [c, 2] that snapshots need."""
        if not (changes.snapshot_requests.size or changes.starting.size):
            return NO_COPIES
        ends = changes.snapshot_requests
        if self._layout.drafts:
            ends = ends[end[ends] % self._alignment == 0]
        self._tables.snapshot_at[changes.slots[ends]] = end[ends]
        copies = []
        for state, needing, new in zip(
            self._states, changes.needs_snapshot_page, changes.snapshot_pages, strict=True
        ):
            live = changes.state_pages[state.cls.tables].T  # [n, num_tables]
            if changes.starting.size:
                slots = changes.slots[changes.starting]
                indices = state.indices_of_block(slots, LIVE).T
                self._put(indices, live[changes.starting])
            if needing.size:
                if self._layout.drafts:
                    due = end[needing] % self._alignment == 0
                    self._pool.put(new[~due].ravel())
                    needing, new = needing[due], new[due]
                indices = state.indices_of_block(changes.slots[needing], SNAPSHOT).T
                old = self._flat[indices].ravel()
                self._pool.unuse(old[old != NULL])
                self._put(indices, new.astype(np.int32))
            snapshots = state.table[changes.slots[ends], :, SNAPSHOT]
            copies.append(np.array([live[ends].ravel(), snapshots.ravel()]).T)
        return np.concatenate(copies)

    def _put(self, indices: Int64, pages: Int32) -> None:
        self._flat[indices] = pages
        self._pool.users[pages] = 1
        self._tables.note(indices, pages)
