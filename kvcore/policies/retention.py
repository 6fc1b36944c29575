"""Retention: the boundaries of a sequence at which a resume point is kept.

Some are kept whatever the setting: those of `resend_boundaries`, the last one that a request
reached, and the *junction*, where a request left a chain with cached dense blocks but no resume
point. docs/concepts.md draws them.
"""

from __future__ import annotations

import numpy as np

from ..arguments import refusal
from ..arrays import NO_ROWS, Int64, ragged_arange
from ..spec import MOST_TOKENS, Layout

# A prompt of at least this many tokens also keeps the last boundary up to a multiple of them.
EDITED_TOKENS = 512

NO_BOUNDARIES = NO_ROWS, NO_ROWS

Retention = str | int


def parse_retention(retention: Retention, layout: Layout, span: int = 0) -> int:
    """Tokens between kept boundaries; 0 for none besides those that are always kept.

    Between two resume points at most `span` segments (`Layout.span`) apart all boundaries are
    resumable too. So an interval shorter than the span is raised to its longest multiple within it.

    Args:
        retention: ``"auto"`` (see `affordable_interval`), ``"dense"`` (all boundaries are
            resumable), ``"latest"`` (none besides), or an interval in tokens.

    Raises:
        ValueError: unknown word, or an interval that is not a positive multiple of the alignment.
    """
    alignment = layout.alignment
    named = {"auto": affordable_interval(layout), "dense": alignment, "latest": 0}
    if isinstance(retention, str) and retention in named:
        interval = named[retention]
    elif isinstance(retention, bool) or not isinstance(retention, (int, np.integer)):
        raise refusal("retention", "'auto', 'dense', 'latest' or an int", repr(retention))
    elif retention < 1 or retention % alignment:
        raise refusal("retention", f"a positive multiple of the alignment {alignment}", retention)
    else:
        interval = int(retention)
    if interval and layout.pages_per_point:
        longest = min(span * alignment, MOST_TOKENS)
        interval *= max(1, longest // interval)
    return interval if interval <= MOST_TOKENS else 0  # past any sequence


def affordable_interval(layout: Layout) -> int:
    """Tokens between resume points that take at most a quarter of the pages of the dense blocks
    between them: a power of two times the alignment; 0 without dense blocks, or without points.
    """
    if not (layout.pages_per_segment and layout.pages_per_point):
        return 0
    segments = 8 * layout.pages_per_point // layout.pages_per_segment
    return layout.alignment << max(0, segments.bit_length() - 1)


def resend_boundaries(num_tokens: int, alignment: int) -> tuple[int, int, int]:
    """Boundaries of a prompt that are always kept, 0 for none: for a resend, which leaves a token
    to compute; for a longer prompt; for one with edited last lines.
    """
    end = num_tokens // alignment * alignment
    edited = num_tokens // EDITED_TOKENS * EDITED_TOKENS // alignment * alignment
    return (num_tokens - 1) // alignment * alignment, end, edited


def kept_boundaries(start: Int64, end: Int64, always: Int64, interval: int) -> tuple[Int64, Int64]:
    """Sorted (requests [k], boundaries [k]) that are kept in (start, end] [n], each once, with
    those of `always` [n, m].
    """
    if len(start) == 1:
        return kept_of_one(int(start[0]), int(end[0]), always[0].tolist(), interval)
    inside = (always > start[:, None]) & (always <= end[:, None])
    rows, columns = np.nonzero(inside)
    positions = always[rows, columns]
    passed = start // interval if interval else start
    if interval and np.count_nonzero(end // interval - passed):
        more_rows, index = ragged_arange(passed + 1, end // interval - passed)
        rows = np.concatenate([rows, more_rows])
        positions = np.concatenate([positions, index * interval])
    if len(rows) > 1:
        stride = int(end.max()) + 1
        merged = np.sort(rows * stride + positions)
        merged = merged[np.append(True, merged[1:] != merged[:-1])]
        rows, positions = merged // stride, merged % stride
    return rows, positions


def kept_of_one(start: int, end: int, always: list[int], interval: int) -> tuple[Int64, Int64]:
    """`kept_boundaries` of one request."""
    every = {b for b in always if start < b <= end}
    if interval:
        every.update(range(start // interval * interval + interval, end + 1, interval))
    if not every:
        return NO_BOUNDARIES
    return np.zeros(len(every), dtype=np.int64), np.array(sorted(every), dtype=np.int64)
