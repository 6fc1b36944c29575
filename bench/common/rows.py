"""Rows of a cache that queries see: bytes to read and operations to do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """Rows of one kind. The query at position p sees min((p + 1) // ratio, limit) of them.

    Attributes:
        limit: a sliding window, or a top-k where ``ratio`` is more than 1; None: all rows.
        ratio: tokens of a row.
        num_bytes: bytes of a row.
        channels: products of a (query, row) pair, of all heads.
    """

    limit: int | None
    ratio: int
    num_bytes: int
    channels: int

    def pairs(self, q_lens: np.ndarray, seq_lens: np.ndarray) -> int:
        """Count the (query, row) pairs that attention visits.

        Args:
            q_lens: [num_seqs] new tokens.
            seq_lens: [num_seqs] tokens including them.
        """
        last, first = seq_lens.astype(np.int64), (seq_lens - q_lens).astype(np.int64)
        return int((self._pairs(last) - self._pairs(first)).sum())

    def _pairs(self, length: np.ndarray) -> np.ndarray:
        """Pairs of whole sequences: sum over n = 1 .. length of min(n // ratio, limit)."""
        limit, ratio = self.limit, self.ratio
        ramp = length if limit is None else np.minimum(length, ratio * limit - 1)
        whole, rest = ramp // ratio, ramp % ratio
        pairs = ratio * (whole * (whole - 1) // 2) + whole * (rest + 1)
        return pairs if limit is None else pairs + (length - ramp) * limit

    def read(self, q_len: int, seq_len: int) -> int:
        """Bytes of the rows of a sequence that some of its ``q_len`` new tokens sees, at most."""
        rows = seq_len // self.ratio
        if self.limit is not None:
            window = self.limit - 1 + q_len
            rows = min(rows, window if self.ratio == 1 else q_len * self.limit)
        return rows * self.num_bytes
