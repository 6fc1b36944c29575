"""The block tables of all groups, and what a step does to them.

Tables know pages, blocks and positions; they know nothing of prompts, keys or what is cached. `plan` counts
the pages that a step needs, `fill` hands them out, `commit` makes the step real, and `settle` frees what nobody
took. All tables are columns of one array, so that a device copy needs one list of changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..pages import PagePool
from ..spec import Int32, Int64, Layout, count_true, ragged_arange, slice_of
from .decode import ONE, Decode, DecodeBatch, DecodeTables
from .drafts import Drafts, DraftTables
from .prefill import NO_ROWS, ZERO, BlockTables, Chunk
from .state import LIVE, SNAPSHOT, StateStep, StateTables

NOWHERE: Int64 = np.array(-1)  # in a slot mapping: not written
NO_COPIES: Int32 = np.empty((0, 2), dtype=np.int32)
NO_PAGES: Int32 = np.empty((0, 0), dtype=np.int32)


@dataclass(slots=True, eq=False)
class Step:
    """A step in terms of tables; see `Tables.plan`.

    Attributes:
        decode_rows, chunk_rows: requests that compute one token (unless all do), and the others.
        batch, decode: the requests of the decode rows and their plan, None if there are none.
        drafts: the plan instead, if each request of the batch computes several tokens.
        states: plans of state tables; none in a `steady` step, of which `decode` has all.
        needed: pages, in all. decode_slots: [tables, decode rows] slots of their tokens.
        copies: [m, 2] pages to copy before the step (source, destination).
        state_pages: [tables, n] live pages of state tables; [0, n] where there are none.
        written: [n] position from which dense groups write. replaying: whether it is past `start` anywhere.
        snapshot: rows that may end the step at a boundary whose state is to be kept.
        steady: one token for each of a batch of requests whose states have live pages.
    """

    slots: Int64
    start: Int64
    end: Int64
    written: Int64
    snapshot: Int64
    decode_rows: Int64
    chunk_rows: Int64
    batch: DecodeBatch | None
    decode: Decode | None
    drafts: Drafts | None
    chunks: list[Chunk]
    states: list[StateStep]
    needed: int
    decode_slots: Int64
    copies: Int32
    state_pages: Int32
    steady: bool

    @property
    def replaying(self) -> bool:
        """Whether some tokens are computed once more."""
        return self.written is not self.start and bool(np.count_nonzero(self.written > self.start))


@dataclass(slots=True, eq=False)
class Effects:
    """What a committed step left to settle.

    Attributes:
        tails: [m, pages_per_point] pages of the tails asked for.
        gone: pages that left window rings.
        copies: [m, 2] pages to copy after the step.
    """

    tails: Int32
    gone: list[Int32]
    copies: Int32


class Tables:
    """Block tables of every group.

    Args:
        layout: the groups.
        max_requests: rows.
        pool: the pages.
        track_deltas: collect changes for `take_deltas`.

    Attributes:
        array: [max_requests, num_columns] int32, all tables side by side.
        snapshot_at: [max_requests] int64 boundary of each request's newest state snapshot, 0 for none.
    """

    def __init__(
        self, layout: Layout, max_requests: int, pool: PagePool, track_deltas: bool
    ) -> None:
        self.layout = layout
        self.pool = pool
        self.array: Int32 = np.zeros((max_requests, layout.num_columns), dtype=np.int32)
        self.snapshot_at: Int64 = np.zeros(max_requests, dtype=np.int64)
        block_classes = [c for c in layout.classes if c.spec.kind != "state"]
        # Rows of a slot mapping where not every token has a slot.
        rows = [t for t, (g, _) in enumerate(layout.tables) if layout.groups[g].kind != "dense"]
        self._sparse_rows = slice_of(rows)
        rows = [t for t, (g, _) in enumerate(layout.tables) if layout.groups[g].kind == "state"]
        self._state_rows = slice_of(rows)
        self.blocks = [
            BlockTables(c, self.array, layout.alignment, layout.lookahead, pool)
            for c in block_classes
        ]
        # The decode rows of the last step, and where in it each slot's request is; -1 for those that were not.
        self._batch: DecodeBatch | None = None
        self._row_of: Int64 = np.full(max_requests, -1, dtype=np.int64)
        self.dense = [b for b in self.blocks if not b.is_window]
        self.windows = [b for b in self.blocks if b.is_window]
        self.states = [
            StateTables(c, self.array, layout.alignment, pool)
            for c in layout.classes
            if c.spec.kind == "state"
        ]
        self.decodes = DecodeTables(self.array, self.blocks, self.states, layout.alignment, pool)
        self.drafts = DraftTables(
            self.array, self.blocks, self.states, layout.alignment, layout.drafts, pool
        )
        # First column, width and block size of each table: [num_tables, 1] all, ones for states.
        each: Int64 = np.ones((3, len(layout.tables), 1), dtype=np.int64)
        for b in self.blocks:
            each[0, b.spec.tables, 0] = b.first
            each[1, b.spec.tables], each[2, b.spec.tables] = (
                b.spec.width,
                b.spec.block_size,
            )
        self._each = tuple(each)  # which is quicker to take apart
        self._flat = self.array.reshape(-1)
        self._no_replays = NO_ROWS, np.empty((len(layout.tables), 0), dtype=np.int64)
        self._track_deltas = track_deltas
        self._deltas: list[tuple[Int64, Int32]] = []

    # A step.

    def plan(
        self,
        slots: Int64,
        start: Int64,
        end: Int64,
        written: Int64,
        chunk_rows: Int64,
        kept: tuple[Int64, Int64],
        snapshot: Int64,
        batch: DecodeBatch | None = None,
    ) -> Step:
        """Count what a step needs; nothing changes.

        Args:
            slots, start, end: [n] requests and their tokens before and after the step.
            written: [n] position from which dense groups write; past `start` where a request computes cached tokens again.
            chunk_rows: requests that compute several tokens, or cached ones again.
            kept: (index in chunk_rows, boundary) of each tail that must outlive the step, sorted.
            snapshot: rows that may end the step at a boundary whose state is to be kept.
            batch: from `batch_again`, if the step is nothing else.
        """
        steady = False
        decode_rows = NO_ROWS  # which stands for all
        if not len(chunk_rows):
            batch = batch or self._batch_of(slots, start)
            steady = batch is not None and batch.is_steady
        else:
            if len(chunk_rows) < len(slots):
                alone = np.ones(len(slots), dtype=np.bool_)
                alone[chunk_rows] = False
                decode_rows = alone.nonzero()[0]
            batch = self._batch_of(slots[decode_rows], start[decode_rows])
        decode: Decode | None = None
        drafts: Drafts | None = None
        chunks: list[Chunk] = []
        states: list[StateStep] = []
        needed = 0
        if batch is not None and batch.size > 1:
            drafts = self.drafts.plan(batch, snapshot)
            needed = drafts.num_new
        elif batch is not None:
            decode = self.decodes.plan(batch, steady and len(snapshot) > 0)
            needed = decode.num_new
        if len(chunk_rows):
            begin, stop, low = start[chunk_rows], end[chunk_rows], written[chunk_rows]
            chunks = [b.plan_chunk(begin if b.is_window else low, stop, *kept) for b in self.blocks]
            for c, b in zip(chunks, self.blocks, strict=True):
                needed += c.num_new * b.spec.num_tables
        if not steady:
            states = [s.plan(slots, snapshot) for s in self.states]
            for p, s in zip(states, self.states, strict=True):
                needed += p.num_blocks * s.spec.num_tables
        return Step(
            slots, start, end, written, snapshot, decode_rows, chunk_rows, batch, decode, drafts, chunks, states, needed,
            NO_ROWS, NO_COPIES, NO_PAGES, steady,
        )  # fmt: skip

    def batch_again(self, slots: Int64, counts: Int64) -> DecodeBatch | None:
        """The decode batch of the last step, moved on, if `slots`, `counts` [n] ask for just that."""
        batch = self._batch
        return batch if batch is not None and batch.is_again(slots, counts) else None

    def batch_with_drafts(self, slots: Int64, start: Int64, counts: Int64) -> DecodeBatch | None:
        """The requests of a step as a batch, if each computes as many tokens as the others, and few enough (see `drafts`)."""
        size = int(counts[0])
        if size > self.drafts.most or count_true(counts == size) < len(counts):
            return None
        batch = self._batch_of(slots, start, size)
        return batch if batch is not None and batch.is_steady else None

    def _batch_of(self, slots: Int64, start: Int64, size: int = 1) -> DecodeBatch | None:
        if not len(slots):
            return None
        old = self._batch
        if old is None:
            shape = len(self.layout.tables), len(slots)
            slots = slots.copy()
            last, live = np.empty(shape, dtype=np.int64), np.zeros(shape, dtype=np.int32)
            rows = np.arange(len(slots))
        elif old.is_of(slots):
            if old.size == size:
                return old
            slots, last, live, rows = old.slots, old.last_slots, old.state_pages, NO_ROWS
        else:
            slots = slots.copy()
            known = self._row_of[slots]
            last = old.last_slots.take(known, axis=1)
            live = old.state_pages.take(known, axis=1)
            rows = (known < ZERO).nonzero()[0]
        if rows.size:
            last[:, rows] = self._last_slots(slots[rows], start[rows])
            for state in self.states:
                live[state.spec.tables[:, None], rows] = state.table[slots[rows], :, LIVE].T
        states = live[self._state_rows]
        is_steady = np.count_nonzero(states) == states.size
        columns = slots * self.layout.num_columns
        return DecodeBatch(
            slots, start, size, last, live, is_steady, columns, self.layout.alignment
        )

    def _last_slots(self, slots: Int64, computed: Int64) -> Int64:
        """Slots of the tokens before positions `computed` [m]: [num_tables, m], one below the next slot in an open block.

        What it has in rows of states, and where a block starts, means nothing.
        """
        first, width, size = self._each
        pages = self._flat[slots * self.layout.num_columns + first + computed // size % width]
        last: Int64 = pages * size + (computed % size - ONE)
        return last

    def check_batch(self, num_computed: Int64) -> None:
        """Compare what the batch knows of its requests, of which slots have `num_computed` tokens, with the tables.

        Raises:
            AssertionError: they differ.
        """
        rows = (self._row_of >= 0).nonzero()[0]
        if self._batch is None:
            assert not rows.size, "rows of no batch"
            return
        batch, known = self._batch, self._row_of[rows]
        assert (batch.slots[known] == rows).all() and (
            batch.start[known] == num_computed[rows]
        ).all()
        assert len(rows) == len(batch.slots) or not batch.is_whole, "a request left unseen"
        is_open = batch.start[known] % self._each[2] > 0
        same = batch.last_slots[:, known] == self._last_slots(rows, batch.start[known])
        assert same[is_open].all(), "slots of the last tokens"
        for s in self.states:
            assert (batch.state_pages[s.spec.tables][:, known] == s.table[rows, :, LIVE].T).all()

    def per_group(self, step: Step) -> dict[str, int]:
        """Pages that each group needs."""
        tables = self.layout.tables
        demand = [0] * len(tables)
        if step.batch is not None and step.decode is not None:
            demand = self.decodes.demand(step.decode, len(tables), len(step.batch.slots))
        if step.drafts is not None:
            demand = self.drafts.demand(step.drafts, len(tables), len(step.slots))
        chunks = zip((b.spec for b in self.blocks), (c.num_new for c in step.chunks), strict=False)
        states = zip(
            (s.spec for s in self.states), (p.num_blocks for p in step.states), strict=False
        )
        for spec, num_new in (*chunks, *states):
            for t in spec.tables.tolist():
                demand[t] += num_new
        needed = {g.name: 0 for g in self.layout.groups}
        for (group, _), n in zip(tables, demand, strict=True):
            needed[self.layout.groups[group].name] += n
        return needed

    def fill(self, step: Step, pages: Int64, cu: Int32, total: int) -> Int64:
        """Give `pages` [needed] to the step; returns the slot mapping [num_tables, total]."""
        if step.drafts is not None:
            batch = step.batch
            assert batch is not None
            step.decode_slots = batch.last_slots.take(batch.row_of, axis=1)
            step.decode_slots += batch.steps
            step.decode_slots[self._state_rows] = NOWHERE
            self.drafts.fill(step.drafts, batch, pages, step.decode_slots)
            step.state_pages = batch.state_pages
            return step.decode_slots
        if step.batch is not None and step.decode is not None:
            n = step.decode.num_new
            step.decode_slots = step.batch.last_slots + ONE
            step.decode_slots[self._state_rows] = NOWHERE
            self.decodes.fill(step.decode, pages[:n], step.decode_slots)
            pages = pages[n:]
        if step.batch is not None and not step.chunk_rows.size:
            mapping = step.decode_slots
        else:
            mapping = np.empty((len(self.layout.tables), total), np.int64)
            mapping[self._sparse_rows] = NOWHERE
        if step.chunks:
            rows = step.chunk_rows
            slots, start, end = step.slots[rows], step.start[rows], step.end[rows]
            offset = cu[rows].astype(np.int64)
            low = step.written[rows]
            skipped = offset + (low - start) if step.replaying else offset
            if step.replaying:
                mapping[:] = -1
            for chunk, block in zip(step.chunks, self.blocks, strict=True):
                size = chunk.num_new * block.spec.num_tables
                if block.is_window:
                    filled = block.fill_chunk(chunk, slots, start, offset, end, pages[:size])
                else:
                    filled = block.fill_chunk(chunk, slots, low, skipped, end, pages[:size])
                tokens, where = filled
                if isinstance(tokens, slice):
                    mapping[block.spec.rows, tokens] = where
                else:
                    mapping[block.spec.tables[:, None], tokens] = where
                pages = pages[size:]
        if step.batch is not None and mapping is not step.decode_slots:
            mapping[:, cu[step.decode_rows]] = step.decode_slots
        if step.steady:
            assert step.batch is not None
            step.state_pages = step.batch.state_pages
        elif self.states:
            step.state_pages = np.zeros((len(self.layout.tables), len(step.slots)), np.int32)
            for plan, state in zip(step.states, self.states, strict=True):
                size = plan.num_blocks * state.spec.num_tables
                state.fill(plan, step.slots, pages[:size])
                pages = pages[size:]
                step.state_pages[state.spec.rows] = plan.pages.T
            copies = [p.copies for p in step.states if p.copies is not None]
            step.copies = np.concatenate(copies) if copies else NO_COPIES
        return mapping

    def replays(self, step: Step, cu: Int32) -> tuple[Int64, Int64]:
        """Rows of the step that dense groups hold already, and their slots [num_tables, m]; -1 in other groups."""
        if not step.replaying:
            return self._no_replays
        counts = np.maximum(0, np.minimum(step.written, step.end) - step.start)
        which, positions = ragged_arange(step.start, counts)
        rows = cu[which] + positions - step.start[which]
        where = np.full((len(self.layout.tables), len(rows)), -1, dtype=np.int64)
        for block in self.dense:
            size = block.spec.block_size
            pages = block.pages(step.slots[which], positions // size).T
            where[block.spec.tables] = pages * np.int64(size) + positions % size
        return rows, where

    def commit(self, step: Step, end: Int64, kept: tuple[Int64, Int64]) -> Effects:
        """Make a step real.

        Args:
            end: [n] tokens after the step, rejected ones not counted.
            kept: (chunk rows, boundaries) whose tails the caller is about to keep, sorted.
        """
        if step.drafts is not None:
            return self._commit_drafts(step, step.drafts, end)
        tails = NO_PAGES
        if kept[0].size:
            tails = np.empty((len(kept[0]), self.layout.pages_per_point), dtype=np.int32)
        gone: list[Int32] = []
        if step.chunks:
            slots, stop = step.slots[step.chunk_rows], end[step.chunk_rows]
            reached = stop if end is step.end else step.end[step.chunk_rows]
            for chunk, block in zip(step.chunks, self.blocks, strict=True):
                if block.is_window:
                    strip, base = block.strip(chunk, slots, stop, kept[1])
                    if len(tails):
                        self._place(tails, block, block.tails(strip, base, *kept))
                    places, pages, left = block.commit_window(
                        chunk, strip, base, slots, stop, reached
                    )
                    gone.append(left)
                    self._delta(places, pages)
                else:
                    rows, blocks, taken = block.commit_dense(chunk, slots, stop, reached)
                    if self._track_deltas:
                        self._delta(block.places(slots[rows], blocks), taken)
        batch = step.batch
        if batch is not None and step.decode is not None:
            self._delta(*self.decodes.commit(step.decode, batch))
        copies = NO_COPIES
        if self.states:
            copies = self._commit_states(step, end)
            if len(tails):
                where = step.slots[step.chunk_rows[kept[0]]]
                for state in self.states:
                    self._place(tails, state, state.table[where, :, SNAPSHOT, None])
        self._keep_batch(batch)
        if batch is not None:
            batch.advance(step.decode_slots)
        return Effects(tails, gone, copies)

    def _commit_drafts(self, step: Step, plan: Drafts, end: Int64) -> Effects:
        batch = step.batch
        assert batch is not None
        taken = end - batch.start
        self._delta(*self.drafts.commit(plan, batch, taken))
        copies = NO_COPIES
        if plan.snapshot_rows.size:
            rows, copies = self.drafts.snapshots(plan, end)
            self.snapshot_at[batch.slots[rows]] = end[rows]
        self._keep_batch(batch)
        batch.take(end, step.decode_slots.take(batch.firsts + (taken - ONE), axis=1))
        return Effects(NO_PAGES, [], copies)

    def _keep_batch(self, batch: DecodeBatch | None) -> None:
        """Remember the batch of the last step."""
        if batch is not self._batch:
            self._forget_batch()
            if batch is not None:
                self._row_of[batch.slots] = np.arange(len(batch.slots))
            self._batch = batch

    def _forget_batch(self) -> None:
        if self._batch is not None:
            self._row_of[self._batch.slots] = -1
            self._batch = None

    def _leave_batch(self, slot: int) -> None:
        """The request of `slot` is not where the batch left it."""
        if self._batch is not None and self._row_of[slot] >= 0:
            self._row_of[slot] = -1
            self._batch.is_whole = False

    def _commit_states(self, step: Step, end: Int64) -> Int32:
        if step.steady:
            assert step.batch is not None and step.decode is not None
            if not step.snapshot.size:
                return NO_COPIES
            ending = step.batch.ending
            self.snapshot_at[ending.slots] = ending.end
            return self.decodes.snapshots(step.decode)
        if step.batch is not None and not step.batch.is_steady:
            pages = step.state_pages
            step.batch.state_pages = pages[:, step.decode_rows] if step.chunk_rows.size else pages
            step.batch.is_steady = True
        ends = step.snapshot
        if ends.size:
            ends = ends[end[ends] % self.layout.alignment == 0]
        if not ends.size and not any(plan.num_blocks for plan in step.states):
            return NO_COPIES
        self.snapshot_at[step.slots[ends]] = end[ends]
        copies = []
        for plan, state in zip(step.states, self.states, strict=True):
            more, places, pages = state.commit(plan, step.slots, end, ends)
            copies.append(more)
            self._delta(places, pages)
        return copies[0] if len(copies) == 1 else np.concatenate(copies)

    def _place(self, tails: Int32, part: BlockTables | StateTables, pages: Int32) -> None:
        """Put the tail pages [m, k, tail] of one class into their columns of `tails`."""
        c = part.spec
        size = c.num_tables * c.tail
        tails[:, c.tail_offset : c.tail_offset + size] = pages.reshape(len(tails), size)

    def settle(self, step: Step, effects: Effects) -> None:
        """Free what the step left and nobody holds: pages out of windows, and blocks that nobody took."""
        for pages in effects.gone:
            self.pool.unuse(pages)
        if not step.chunks:
            return
        for chunk, block in zip(step.chunks, self.blocks, strict=True):
            if block.is_window and chunk.num_left:
                assert chunk.pages is not None
                fresh = chunk.pages[chunk.is_new].ravel()
                self.pool.put(fresh[self.pool.counts[fresh] == 0])

    # One request.

    def tail(self, slot: int, boundary: int) -> Int32:
        """Pages of the tail of `boundary`, which the rings of `slot` still have: [pages_per_point]."""
        tails = np.zeros((1, self.layout.pages_per_point), dtype=np.int32)
        slots = np.array([slot])
        for block in self.windows:
            c = block.spec
            blocks = boundary // c.block_size - np.arange(c.tail, 0, -1)
            self._place(tails, block, block.read(slots, blocks[None, :]))
        for state in self.states:
            self._place(tails, state, state.table[slots, :, SNAPSHOT, None])
        row: Int32 = tails[0]
        return row

    def segment_pages(self, slot: int, first: int, end: int) -> Int32:
        """Dense pages of the segments [first, end) of a request: [end - first, pages_per_segment]."""
        pages = np.empty((end - first, self.layout.pages_per_segment), dtype=np.int32)
        for block in self.dense:
            c = block.spec
            part = block.table[slot, :, first * c.per_segment : end * c.per_segment]
            part = part.reshape(c.num_tables, end - first, c.per_segment).transpose(1, 0, 2)
            columns = slice(c.segment_offset, c.segment_offset + c.num_tables * c.per_segment)
            pages[:, columns] = part.reshape(end - first, -1)
        return pages

    def fill_dense(self, slot: int, first: int, pages: Int32) -> None:
        """Set the dense entries of segments from `first` on to `pages` [n, pages_per_segment]."""
        for block in self.dense:
            c = block.spec
            part = pages[:, c.segment_offset : c.segment_offset + c.num_tables * c.per_segment]
            part = part.reshape(len(pages), c.num_tables, c.per_segment).transpose(0, 2, 1)
            part = part.reshape(-1, c.num_tables)
            blocks = first * c.per_segment + np.arange(len(part))
            where = np.full(len(part), slot)
            self._delta(block.write(where, blocks, part), part)

    def load(self, slot: int, boundary: int, pages: Int32) -> None:
        """A hit: the request starts at `boundary` with the resume point's `pages` [pages_per_point]."""
        self.pool.use(pages[pages != 0])
        for block in self.windows:
            c = block.spec
            blocks = boundary // c.block_size - np.arange(c.tail, 0, -1)
            valid = blocks >= 0
            where = np.full(int(valid.sum()), slot)
            part = pages[c.tail_offset : c.tail_offset + c.num_tables * c.tail]
            part = part.reshape(c.num_tables, c.tail).T[valid]
            self._delta(block.write(where, blocks[valid], part), part)
        for state in self.states:
            c = state.spec
            state.table[slot, :, SNAPSHOT] = pages[c.tail_offset : c.tail_offset + c.num_tables]
        self.snapshot_at[slot] = boundary

    def shrink(self, slot: int, old: int, new: int) -> None:
        """Forget the tokens [new, old) of a request; they are in no cached segment."""
        slots = np.array([slot])
        if self.snapshot_at[slot] > new:  # its page holds the state of tokens that are taken back
            self.snapshot_at[slot] = 0
        for block in self.blocks:
            size = block.spec.block_size
            blocks = np.arange(-(-new // size), -(-old // size))
            if len(blocks):
                pages = block.read(slots, blocks[None, :]).ravel()
                if block.is_window:
                    self.pool.unuse(pages)
                else:
                    self.pool.put(pages)
                block.write(np.repeat(slots, len(blocks)), blocks, np.zeros(1, np.int32))
        self._leave_batch(slot)

    def release(self, slot: int, cached: int, computed: int) -> None:
        """Empty the row of a request, whose tokens past `cached` are its own."""
        for block in self.dense:
            size = block.spec.block_size
            own = block.table[slot, :, cached // size : -(-computed // size)]
            self.pool.put(own.ravel())
            block.table[slot, :, : -(-max(cached, computed) // size)] = 0
        for table in [b.table for b in self.windows] + [s.table for s in self.states]:
            self.pool.unuse(table[slot].ravel())
            table[slot] = 0
        self.snapshot_at[slot] = 0
        self._leave_batch(slot)

    # Device copies.

    def take_deltas(self) -> tuple[Int64, Int32]:
        """Entries that changed since the last call; see `KVCache.take_deltas`."""
        if not self._track_deltas:
            raise ValueError(
                "track_deltas: expected True at construction to take deltas, got False"
            )
        deltas, self._deltas = self._deltas, []
        if not deltas:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        return np.concatenate([d[0] for d in deltas]), np.concatenate([d[1] for d in deltas])

    def _delta(self, places: Int64, pages: Int32 | Int64 | None) -> None:
        if self._track_deltas and pages is not None and pages.size:
            self._deltas.append((places.ravel(), pages.ravel().astype(np.int32)))
