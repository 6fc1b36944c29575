"""Which boundaries running requests pass, and at which of them they keep resume points."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import NO_ROWS, Int64
from ..policies.retention import kept_boundaries
from ..tables.planner import Tables
from .replays import Replays
from .requests import Sequences


class Ending(NamedTuple):
    """Requests of a step that complete segments.

    Attributes:
        rows, slots: [m] int64 rows in the step, and their slots. slot_list: these as ints.
        end: [m] int64 tokens up to which their segments are complete.
    """

    rows: Int64
    slots: Int64
    slot_list: list[int]
    end: Int64


NONE_ENDING = Ending(NO_ROWS, NO_ROWS, [], NO_ROWS)


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
        self.sequences, self._tables = sequences, tables
        n = sequences.max_requests
        self.cached: Int64 = np.zeros(n, dtype=np.int64)
        self.replays = Replays(n)
        self._keep: Int64 = np.zeros((n, 4), dtype=np.int64)  # replay boundaries, junction; 0: none
        # The ends that a chunk may have: with and without its drafts, with and without the key of
        # its last segment.
        late = {0, layout.lookahead}
        self._uncertain = np.array(sorted(late | {k + layout.drafts for k in late}))

    def keep(self, slot: int, boundaries: tuple[int, ...]) -> None:
        """The request of `slot` keeps these besides those of the interval."""
        self._keep[slot] = boundaries or 0

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
        self, slots: Int64, start: Int64, end: Int64
    ) -> tuple[tuple[Int64, Int64], Int64]:
        """Boundaries that a step must not lose.

        Args:
            slots, start, end: [n] requests and their tokens before and after the step.

        Returns:
            ((row, boundary) of tails that must survive the step, rows that may need a snapshot of
            their state).
        """
        none, snapshot = (NO_ROWS, NO_ROWS), NO_ROWS
        a, drafts = self.alignment, self._drafts
        if not self.layout.hybrid:
            return none, NO_ROWS
        counts = end - start
        if self._tables.states:
            snapshot = (end % a < np.minimum(counts, drafts + 1)).nonzero()[0]
        # Of a boundary that no more than the drafts follow, the next query sees the whole tail.
        rows = (counts > drafts + 1).nonzero()[0]
        if rows.size:
            rows = rows[end[rows] // a > start[rows] // a]
        if not rows.size:
            return none, snapshot
        slots, start, end = slots[rows], start[rows], end[rows]
        # The windows are not exact before the end of a replay.
        start = np.minimum(end, np.maximum(start, self.replays.stop[slots] - 1))
        if self._tables.states:  # no state is kept but where a step may end
            start = np.maximum(start, end - (drafts + 1))
        # The last boundary, and the last that has its key, stay in the ring, whatever is accepted.
        ends = (end[:, None] - self._uncertain) // a * a
        always = np.concatenate([self._keep[slots], ends], axis=1)
        which, kept = kept_boundaries(start, end, always, self.interval)
        return (rows[which], kept), snapshot

    # After a step.

    def ending(self, slots: Int64, end: Int64) -> Ending:
        """Which of the requests `slots` have segments to cache, and up to which token."""
        rows = (end - self.cached[slots] >= self.alignment).nonzero()[0]
        if not rows.size:
            return NONE_ENDING
        slots, to = slots[rows], end[rows]
        to = to - to % self.alignment
        if self.layout.lookahead:
            known = np.maximum(end[rows], self.sequences.prompt_len[slots]) - self.layout.lookahead
            known -= known % self.alignment
            ready = known > self.cached[slots]
            rows, slots, to = rows[ready], slots[ready], np.minimum(to, known)[ready]
        return Ending(rows, slots, slots.tolist(), to)

    def kept(self, end: Int64, ending: Ending) -> tuple[Int64, Int64]:
        """Rows of those `ending` segments that keep a resume point, and at which boundaries."""
        slots = ending.slots
        rows, kept = kept_boundaries(
            self.cached[slots], ending.end, self._keep[slots], self.interval
        )
        if rows.size and self._tables.states:
            known = kept == end[ending.rows[rows]]
            known |= kept == self._tables.snapshot_at[slots[rows]]
            rows, kept = rows[known], kept[known]
        return ending.rows[rows], kept
