"""Which boundaries running requests pass, and at which of them they keep resume points."""

from __future__ import annotations

import numpy as np

from ..arrays import NO_ROWS, ONE, Int64
from ..policies.retention import kept_boundaries, kept_of_one
from ..tables.decode import NOBODY, DecodeBatch, Ending
from ..tables.drafts import DraftBatch
from ..tables.groups import Tables
from .replays import Replays
from .requests import Sequences

FOREVER = 1 << 62  # steps


class Boundaries:
    """Boundaries of the running requests. They depend on positions alone, not on tokens.

    Args:
        interval: tokens between kept boundaries, from `policies.retention`.
        sequences, tables: what the requests are, and where their pages are.

    Attributes:
        cached: [max_requests] int64 tokens of each request that are in the index, or will be once
            the tokens of all its steps are known.
        replays: which tokens the requests compute again.
    """

    def __init__(self, interval: int, sequences: Sequences, tables: Tables) -> None:
        self.layout = layout = tables.layout
        self.alignment, self.interval = layout.alignment, interval
        self._drafts = layout.drafts
        self._segment: Int64 = np.array(layout.alignment)
        self.sequences, self._tables = sequences, tables
        n = sequences.max_requests
        self.cached: Int64 = np.zeros(n, dtype=np.int64)
        self.replays = Replays(n)
        self._keep: Int64 = np.zeros((n, 4), dtype=np.int64)  # replay boundaries, junction; 0: none
        self._keep_end: Int64 = np.zeros(n, dtype=np.int64)  # the last of these
        # The ends that a chunk may have: with and without its drafts, with and without the key of
        # its last segment.
        late = {0, layout.lookahead}
        self._late = sorted(late | {k + layout.drafts for k in late})
        self._uncertain = np.array(self._late)

    def keep(self, slot: int, boundaries: tuple[int, ...]) -> None:
        """The request of `slot` keeps these besides those of the interval."""
        self._keep[slot], self._keep_end[slot] = boundaries or 0, max(boundaries, default=0)

    # Before a step.

    def stops(self, slots: Int64, start: Int64, end: Int64) -> Int64:
        """Where chunks from `start` to at most `end` [n] should end so that the states there can be
        kept."""
        stops = [self._keep[slots], (end // self.alignment * self.alignment)[:, None]]
        if self.interval:
            stops.append(((start // self.interval + 1) * self.interval)[:, None])
        after = np.concatenate(stops, axis=1)
        after[after <= start[:, None]] = np.iinfo(np.int64).max
        nearest: Int64 = np.minimum(end, after.min(axis=1))
        return nearest

    def boundaries(
        self, slots: Int64, start: Int64, end: Int64, chunks: Int64, batch: DecodeBatch | None
    ) -> tuple[tuple[Int64, Int64], Int64]:
        """What a step must not lose.

        Args:
            slots, start, end: [n] requests and their tokens before and after the step.
            chunks: rows that compute several tokens, or cached ones again.
            batch: of the other rows, if there are no chunks.

        Returns:
            ((index in chunks, boundary) of tails that must survive the step, rows that may need a
            snapshot of their state).
        """
        none = (NO_ROWS, NO_ROWS)
        if not self.layout.hybrid:
            return none, NO_ROWS
        a = self.alignment
        snapshot = NO_ROWS
        if self._tables.states:
            if batch is not None:
                snapshot = batch.reaching if isinstance(batch, DraftBatch) else batch.ending.rows
            else:
                within = end % self._segment
                most = np.minimum(end - start, self._drafts + 1) if self._drafts else ONE
                snapshot = (within < most).nonzero()[0]
        if not chunks.size:
            return none, snapshot
        if len(chunks) == 1:
            i = chunks[0]
            kept = self._boundaries_of_one(int(slots[i]), int(start[i]), int(end[i]))
            return kept, snapshot
        slots, start, end = slots[chunks], start[chunks], end[chunks]
        # The windows are not exact before the end of a replay.
        start = self.replays.exact_after(slots, start, end)
        if self._tables.states:  # no state is kept but where a step may end
            start = np.maximum(start, end - (self._drafts + 1))
        # The last boundary, and the last that has its key, stay in the ring, whatever is accepted.
        ends = (end[:, None] - self._uncertain) // a * a
        always = np.concatenate([self._keep[slots], ends], axis=1)
        return kept_boundaries(start, end, always, self.interval), snapshot

    def _boundaries_of_one(self, slot: int, start: int, end: int) -> tuple[Int64, Int64]:
        """The tails of `boundaries` for one chunk."""
        a = self.alignment
        start = min(end, max(start, int(self.replays.stop[slot]) - 1))
        if self._tables.states:
            start = max(start, end - (self._drafts + 1))
        ends = [(end - known) // a * a for known in self._late]
        return kept_of_one(start, end, self._keep[slot].tolist() + ends, self.interval)

    # After a step.

    def ending(self, slots: Int64, end: Int64) -> Ending:
        """Which of the requests `slots` have segments to cache, and up to which token."""
        rows = (end - self.cached[slots] >= self._segment).nonzero()[0]
        if not rows.size:
            return NOBODY
        slots, to = slots[rows], end[rows]
        to = to - to % self._segment
        if self.layout.lookahead:
            known = np.maximum(end[rows], self.sequences.prompt_len[slots]) - self.layout.lookahead
            known -= known % self._segment
            ready = known > self.cached[slots]
            rows, slots, to = rows[ready], slots[ready], np.minimum(to, known)[ready]
        return Ending(rows, slots, slots.tolist(), to)

    def kept(self, batch: DecodeBatch | None, end: Int64, ending: Ending) -> tuple[Int64, Int64]:
        """Rows of those `ending` segments that keep a resume point, and at which boundaries;
        `batch`: of all rows, if there are no chunks."""
        slots = ending.slots
        if batch is not None:
            if batch.age >= batch.quiet_until:
                batch.quiet_until = batch.age + self._quiet_steps(batch)
            if batch.age < batch.quiet_until:
                return NO_ROWS, NO_ROWS
        rows, kept = kept_boundaries(
            self.cached[slots], ending.end, self._keep[slots], self.interval
        )
        if rows.size and self._tables.states:
            known = kept == end[ending.rows[rows]]
            known |= kept == self._tables.snapshot_at[slots[rows]]
            rows, kept = rows[known], kept[known]
        return ending.rows[rows], kept

    def _quiet_steps(self, batch: DecodeBatch) -> int:
        """In how many steps from this one on no request of `batch` keeps a boundary."""
        cached = self.cached[batch.slots]
        if np.count_nonzero(self._keep_end[batch.slots] > cached):
            return 0
        if not self.interval:
            return FOREVER
        tokens = cached // self.interval * self.interval + self.interval - batch.start
        return (int(tokens.min()) - 1) // batch.size
