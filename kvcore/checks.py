"""What callers give as the requests of a step, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import ONE, Int32, Int64, as_ints
from .prefix.requests import Sequences
from .spec import MOST_TOKENS


def as_batch(slots: Any, num_new_tokens: Any) -> tuple[Int64, Int64]:
    """`slots` and `num_new_tokens` as arrays [n], perhaps the caller's own, which are not to be
    kept.

    Raises:
        ValueError: they are no ints, or no two vectors of one length above 0.
    """
    slots, counts = as_ints("slots", slots), as_ints("num_new_tokens", num_new_tokens)
    if slots.ndim != 1 or counts.shape != slots.shape or not len(slots):
        raise ValueError(
            f"slots, num_new_tokens: expected two vectors of one length > 0, "
            f"got {list(slots.shape)} and {list(counts.shape)}"
        )
    return slots, counts


def check_batch(slots: Int64, counts: Int64, sequences: Sequences) -> None:
    """Raise ValueError for a count out of range, and for slots unknown or given twice."""
    # Those below 1 are large without a sign; sums with those past any length would overflow.
    if np.count_nonzero((counts - ONE).view(np.uint64) >= MOST_TOKENS):
        raise ValueError(
            f"num_new_tokens: expected at least 1 and at most {MOST_TOKENS} each, "
            f"got {counts.tolist()}"
        )
    sequences.check(slots)


def wrong_size(planned: int, ids: Int32) -> ValueError:
    """The error of a commit with more or fewer `ids` than were planned."""
    return ValueError(f"input_ids: expected {planned} tokens as planned, got {len(ids)}")
