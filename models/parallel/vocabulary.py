"""The vocabulary on several ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .group import Group


class Vocabulary:
    """Rows of embedding and output projection by rank: as many on each, one rank after another.

    The last rank's rows may go past the vocabulary; these are zeros, and give no logits.

    Args:
        size: number of ids.
        group: None = one rank has all rows.

    Attributes:
        num_rows: rows of this rank.
    """

    def __init__(self, size: int, group: Group | None) -> None:
        self._size, self._group = size, group
        self.num_rows = size if group is None else -(-size // group.size)

    def look_up(self, input_ids: Tensor, table: Tensor) -> Tensor:
        """Rows by id: each comes from the rank that has it.

        Args:
            input_ids: [num_tokens] int64.
            table: [num_rows, n], of this rank.

        Returns:
            [num_tokens, n].
        """
        group = self._group
        if group is None:
            return F.embedding(input_ids, table)
        own = input_ids - group.rank * self.num_rows
        foreign = (own < 0) | (own >= self.num_rows)
        rows = F.embedding(own.masked_fill(foreign, 0), table)
        return group.sum(rows.masked_fill_(foreign[:, None], 0.0))

    def gather(self, logits: Tensor) -> Tensor:
        """Logits of all ids.

        Args:
            logits: [num_rows, ids of this rank].

        Returns:
            [num_rows, vocab_size].
        """
        if self._group is None:
            return logits
        return self._group.gather(logits)[:, : self._size].contiguous()
