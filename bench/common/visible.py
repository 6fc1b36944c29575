"""(query, key) pairs of causal attention."""

from __future__ import annotations

import numpy as np


def visible_pairs(
    q_lens: np.ndarray, seq_lens: np.ndarray, limit: int | None, ratio: int = 1
) -> int:
    """Pairs of new tokens and what they see: the query at position p sees min((p + 1) // ratio,
    limit) keys.

    Args:
        q_lens, seq_lens: [num_seqs] new tokens, and tokens including them.
        limit: a sliding window, or a top-k; None = all.
        ratio: tokens of a compressed entry; 1 = the rows of tokens.
    """
    last, first = seq_lens.astype(np.int64), (seq_lens - q_lens).astype(np.int64)
    return int((_seen(last, limit, ratio) - _seen(first, limit, ratio)).sum())


def _seen(length: np.ndarray, limit: int | None, ratio: int) -> np.ndarray:
    """Pairs of a whole sequence: sum over n = 1 .. length of min(n // ratio, limit)."""
    ramp = length if limit is None else np.minimum(length, ratio * limit - 1)
    whole, rest = ramp // ratio, ramp % ratio
    pairs = ratio * (whole * (whole - 1) // 2) + whole * (rest + 1)
    return pairs if limit is None else pairs + (length - ramp) * limit
