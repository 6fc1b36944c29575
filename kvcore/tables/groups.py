"""The block tables of all groups, and what a step with chunks, drafts or new states does to them.

Of one token for each of a batch of requests `decode` has all, and `plan` asks it itself. Tables
know pages, blocks and positions; they know nothing of prompts, keys or what is cached.
`plan` counts the pages that a step needs, `fill` hands them out, `commit` makes the step real, and
`settle` frees what nobody took. All tables are columns of one array, so that a device copy needs
one list of changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import NO_ROWS, ONE, Int32, Int64, slice_of
from ..pages import PagePool
from ..spec import Layout
from .decode import NOWHERE, DecodeBatch, DecodeChanges, DecodeTables
from .drafts import DraftBatch, Drafts
from .prefill import Chunk
from .rows import RowTables
from .state import NO_COPIES, SNAPSHOT, StateStep

NO_PAGES: Int32 = np.empty((0, 0), dtype=np.int32)


@dataclass(slots=True, eq=False)
class StepChanges:
    """What a step changes in the tables, but for a plain decode step; see `Tables.plan`.

    Attributes:
        decode_rows, chunk_rows: requests that compute one token (unless all do), and the others.
        batch, decode: the requests of the decode rows and what they change, None if there are none.
        drafts: the plan instead, if each request of the batch computes several tokens.
        chunks, states: plans of the classes of tables.
        num_new: pages needed, in all.
        copies: [m, 2] pages to copy before the step (source, destination).
        state_pages: [tables, n] live pages of state tables; [0, n] where there are none.
        written: [n] position from which dense groups write. replaying: whether it is past `start`
            anywhere.
        snapshot: rows that may end the step at a boundary whose state is to be kept.
    """

    slots: Int64
    start: Int64
    end: Int64
    written: Int64
    snapshot: Int64
    decode_rows: Int64
    chunk_rows: Int64
    batch: DecodeBatch | None
    decode: DecodeChanges | None
    drafts: Drafts | None
    chunks: list[Chunk]
    states: list[StateStep]
    num_new: int
    copies: Int32
    state_pages: Int32

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


class Tables(RowTables):
    """Steps of all tables: each class plans its part, of chunks and of states; `decode` all of
    them.

    Args:
        layout, max_requests, pool, track_deltas: as of `RowTables`.
    """

    def __init__(
        self, layout: Layout, max_requests: int, pool: PagePool, track_deltas: bool
    ) -> None:
        super().__init__(layout, max_requests, pool, track_deltas)
        # Rows of a slot mapping where not every token has a slot.
        rows = [t for t, (g, _) in enumerate(layout.tables) if layout.groups[g].kind != "dense"]
        self._sparse_rows = slice_of(rows)
        self.decodes = DecodeTables(
            self.array, self.blocks, self.states, layout.alignment, pool, self.snapshot_at,
            self.deltas,
        )  # fmt: skip

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
    ) -> StepChanges:
        """Count what a step needs; nothing changes.

        Args:
            slots, start, end: [n] requests and their tokens before and after the step.
            written: [n] position from which dense groups write; past `start` where a request
                computes cached tokens again.
            chunk_rows: requests that compute several tokens, or cached ones again.
            kept: (index in chunk_rows, boundary) of each tail that must outlive the step, sorted.
            snapshot: rows that may end the step at a boundary whose state is to be kept.
            batch: of all requests, if there are no chunk_rows.
        """
        decode_rows = NO_ROWS  # which stands for all
        if 0 < len(chunk_rows) < len(slots):
            alone = np.ones(len(slots), dtype=np.bool_)
            alone[chunk_rows] = False
            decode_rows = alone.nonzero()[0]
            batch = self.batches.of(slots[decode_rows], start[decode_rows])
        decode: DecodeChanges | None = None
        drafts: Drafts | None = None
        chunks: list[Chunk] = []
        states: list[StateStep] = []
        num_new = 0
        if isinstance(batch, DraftBatch):
            drafts = self.drafts.plan(batch, snapshot)
            num_new = drafts.num_new
        elif batch is not None:
            decode = self.decodes.plan(batch, False)
            num_new = decode.num_new
        if len(chunk_rows):
            begin, stop, low = start[chunk_rows], end[chunk_rows], written[chunk_rows]
            chunks = [b.plan_chunk(begin if b.is_window else low, stop, *kept) for b in self.blocks]
            for c, b in zip(chunks, self.blocks, strict=True):
                num_new += c.num_new * b.spec.num_tables
        if drafts is None:
            states = [s.plan(slots, snapshot) for s in self.states]
            for p, s in zip(states, self.states, strict=True):
                num_new += p.num_blocks * s.spec.num_tables
        return StepChanges(
            slots,
            start,
            end,
            written,
            snapshot,
            decode_rows,
            chunk_rows,
            batch,
            decode,
            drafts,
            chunks,
            states,
            num_new,
            NO_COPIES,
            NO_PAGES,
        )

    def per_group(self, step: StepChanges | DecodeChanges) -> dict[str, int]:
        """Pages that each group needs."""
        tables = self.layout.tables
        demand = [0] * len(tables)
        decode = step if isinstance(step, DecodeChanges) else step.decode
        if decode is not None:
            fixed = decode.num_always_new
            outputs = [decode.outputs[:fixed], decode.outputs[fixed:][decode.is_new]]
            of_table = np.concatenate(outputs) // len(decode.batch.slots)
            demand = np.bincount(of_table, minlength=len(tables)).tolist()
        if isinstance(step, StepChanges):
            if step.drafts is not None:
                demand = self.drafts.demand(step.drafts, len(tables), len(step.slots))
            parts = [
                *((b.spec, c.num_new) for b, c in zip(self.blocks, step.chunks, strict=False)),
                *((s.spec, p.num_blocks) for s, p in zip(self.states, step.states, strict=False)),
            ]
            for spec, num_new in parts:
                for t in spec.tables.tolist():
                    demand[t] += num_new
        needed = {g.name: 0 for g in self.layout.groups}
        for (group, _), n in zip(tables, demand, strict=True):
            needed[self.layout.groups[group].name] += n
        return needed

    def fill(self, step: StepChanges, pages: Int64, cu: Int32, total: int) -> Int64:
        """Give `pages` [num_new] to the step; returns the slot mapping [num_tables, total]."""
        if step.drafts is not None:
            step.state_pages = step.drafts.batch.state_pages
            return self.drafts.fill(step.drafts, pages)
        decoded = None
        if step.decode is not None:
            n = step.decode.num_new
            decoded = self.decodes.fill(step.decode, pages[:n])
            pages = pages[n:]
        if decoded is not None and not step.chunk_rows.size:
            mapping = decoded
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
        if decoded is not None and mapping is not decoded:
            mapping[:, cu[step.decode_rows]] = decoded
        if self.states:
            step.state_pages = np.zeros((len(self.layout.tables), len(step.slots)), np.int32)
            for plan, state in zip(step.states, self.states, strict=True):
                size = plan.num_blocks * state.spec.num_tables
                state.fill(plan, step.slots, pages[:size])
                pages = pages[size:]
                step.state_pages[state.spec.rows] = plan.pages.T
            copies = [p.copies for p in step.states if p.copies is not None]
            step.copies = np.concatenate(copies) if copies else NO_COPIES
        return mapping

    def commit(self, step: StepChanges, end: Int64, kept: tuple[Int64, Int64]) -> Effects:
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
                        self._put_tail(tails, block, block.tails(strip, base, *kept))
                    indices, pages, left = block.commit_window(
                        chunk, strip, base, slots, stop, reached
                    )
                    gone.append(left)
                    self._delta(indices, pages)
                else:
                    rows, blocks, taken = block.commit_dense(chunk, slots, stop, reached)
                    if self.deltas is not None:
                        self._delta(block.indices(slots[rows], blocks), taken)
        if step.decode is not None:
            self.decodes.commit(step.decode)
        copies = NO_COPIES
        if self.states:
            copies = self._commit_states(step, end)
            if len(tails):
                where = step.slots[step.chunk_rows[kept[0]]]
                for state in self.states:
                    self._put_tail(tails, state, state.table[where, :, SNAPSHOT, None])
        self.batches.keep(step.batch)
        return Effects(tails, gone, copies)

    def _commit_drafts(self, step: StepChanges, plan: Drafts, end: Int64) -> Effects:
        batch = plan.batch
        taken = end - batch.start
        self._delta(*self.drafts.commit(plan, taken))
        copies = NO_COPIES
        if plan.snapshot_rows.size:
            rows, copies = self.drafts.snapshots(plan, end)
            self.snapshot_at[batch.slots[rows]] = end[rows]
        self.batches.keep(batch)
        batch.take(end, plan.slot_mapping.take(batch.firsts + (taken - ONE), axis=1))
        return Effects(NO_PAGES, [], copies)

    def _commit_states(self, step: StepChanges, end: Int64) -> Int32:
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
            more, indices, pages = state.commit(plan, step.slots, end, ends)
            copies.append(more)
            self._delta(indices, pages)
        return copies[0] if len(copies) == 1 else np.concatenate(copies)

    def settle(self, step: StepChanges, effects: Effects) -> None:
        """Free what the step left and nobody holds: pages out of windows, and blocks that nobody
        took."""
        for pages in effects.gone:
            self.pool.unuse(pages)
        if not step.chunks:
            return
        for chunk, block in zip(step.chunks, self.blocks, strict=True):
            if block.is_window and chunk.num_left:
                assert chunk.pages is not None
                new_pages = chunk.pages[chunk.is_new].ravel()
                self.pool.put(new_pages[self.pool.counts[new_pages] == 0])
