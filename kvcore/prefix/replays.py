"""Replays: computing cached tokens once more, to restore the windows that no resume point kept.

Dense blocks may reach much further than any resume point. Then a request computes their last
`replay_tokens` tokens again and writes only the rows of its windows:

    alignment 32, replay_tokens 48, prompt of 200 tokens

    tokens          0    32   64   96   128  160  192  200
    dense blocks    |=========================|              cached up to 160: `dense_tokens`
    resume point         |                                   at 32: `num_tokens`, the hit without it
    replay                          |.........|              [96, 160): `replay_from`, `replay_to`
    new tokens                                |--------|     [160, 200)

The first rows of windows saw nothing before 96 and are wrong, but no query from 160 on sees them:
each window layer adds at most its W - 1 wrong rows. Attention over all keys, or over compressed
entries, reads the cached dense rows (`StepPlan.replay_rows`, or pages), which the step does not
write again. Window tables begin with page 0, whose rows must be finite: kernels multiply by weights
of 0. The first resume point is made at 160.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Int64
from ..tables.planner import StepChanges


def replay_range(
    dense: int, hit: int, replay_tokens: int, alignment: int
) -> tuple[int, int] | None:
    """Tokens [first, end) to compute again, `end` being `dense`; None where that saves nothing."""
    start = max(0, dense - replay_tokens) // alignment * alignment
    return (start, dense) if start > hit else None


class Replays:
    """Token ranges that running requests compute again.

    Attributes:
        start, stop: [max_requests] int64 `replay_from` and `replay_to`; 0 where there is no replay.
    """

    def __init__(self, max_requests: int) -> None:
        self.start: Int64 = np.zeros(max_requests, dtype=np.int64)
        self.stop: Int64 = np.zeros(max_requests, dtype=np.int64)

    def begin(self, slot: int, start: int | None, stop: int | None) -> None:
        self.start[slot], self.stop[slot] = start or 0, stop or 0

    def written_from(self, slots: Int64, start: Int64) -> Int64:
        """Positions [n] from which a step from `start` [n] on writes the rows of dense groups."""
        stop = self.stop[slots]
        written: Int64 = np.maximum(start, stop)
        return written if (stop > start).any() else start

    def finished(
        self, changes: StepChanges, end: Int64, rows: Int64, kept: Int64
    ) -> tuple[Int64, Int64]:
        """Add the ends of replays that a step to `end` [n] finished to its sorted (rows, kept)."""
        stop = self.stop[changes.slots]
        done = ((changes.start < stop) & (stop <= end)).nonzero()[0]
        rows, kept = np.concatenate([rows, done]), np.concatenate([kept, stop[done]])
        order = np.lexsort((kept, rows))
        return rows[order], kept[order]
