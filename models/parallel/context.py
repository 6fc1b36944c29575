"""A context that is split over ranks: each holds every ``size``-th token, or entry, of a sequence.

Row w of a sequence is rank ``w % size``'s, where it is row ``w // size``. A block of the allocator
has ``size`` times the tokens of a page, and one page id on every rank, so tables, plans and hits
are the same on all of them::

    tokens of a block, 2 ranks    0  1  2  3  4  5  6  7
    page on rank 0                0     2     4     6
    page on rank 1                   1     3     5     7

Windows and states are whole on every rank: they are short. A layer attends in three steps. Each
rank computes for its own heads what they see of the step's own rows and of windows; for the heads
of all ranks what these see of its part of the context; and then it merges the parts of its own
heads by their lse (`quire.kernels.merge_partials`), where sinks join once.

Source: decode context parallel of vLLM; Helix (arXiv 2507.07120); FlashDecoding for the merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import merge_partials

from .group import Group


class SplitContext:
    """What this rank holds of a context, and how its attention becomes that of all.

    Args:
        group: the ranks that share it.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size

    def slots(self, slots: Tensor, page_rows: int) -> Tensor:
        """Where rows lie on this rank.

        Args:
            slots: [n] int64, block * (size * page_rows) + row, -1 = nowhere.
            page_rows: rows of a page on each rank.

        Returns:
            [n] int64, page * page_rows + row; -1 = nowhere, or another rank has it.
        """
        block, row = slots // (page_rows * self.size), slots % (page_rows * self.size)
        mine = (slots >= 0) & (row % self.size == self.rank)
        return torch.where(mine, block * page_rows + row // self.size, -1)

    def count(self, rows: Tensor) -> Tensor:
        """How many of the first ``rows`` rows of a sequence this rank has; 0 for less than none."""
        return (rows.clamp(min=0) + (self.size - 1 - self.rank)) // self.size

    def shift(self, ratio: int) -> int:
        """Tokens by which sequences seem longer to a rank that sees entries of ratio * size tokens.

        A query at position p sees the entries w < (p + 1) // ratio. Of these the rank has as many
        as a query at p + shift sees of entries of ratio * size tokens.
        """
        return (self.size - 1 - self.rank) * ratio

    def own_heads(self, num_heads: int, num_kv_heads: int) -> slice:
        """The KV heads that this rank's heads see.

        Args:
            num_heads: of a rank. num_kv_heads: of all.
        """
        group = self.size * num_heads // num_kv_heads
        first = self.rank * num_heads // group
        return slice(first, first + max(1, num_heads // group))

    def all_heads(self, q: Tensor) -> Tensor:
        """The queries of all ranks.

        Args:
            q: [num_tokens, num_heads, head_dim] of this rank's heads.

        Returns:
            [num_tokens, size * num_heads, head_dim], those of rank 0 first.
        """
        return self.group.gather(q.flatten(1), "queries").unflatten(1, (-1, q.shape[2]))

    def merge(
        self, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor] | None,
        sinks: Tensor | None, impl: str | None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's heads to all that they see.

        Args:
            context: (out [num_tokens, size * num_heads, head_dim], lse [size * num_heads,
                num_tokens]) of all ranks' heads over this rank's part of the context.
            own: the same of this rank's heads over what every rank has; None = nothing.
            sinks: [num_heads] fp32.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        out, lse = context
        parts = out.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        outs = self.group.exchange(parts)
        lses = self.group.exchange(lse.unflatten(0, (self.size, -1)))
        if own is not None:
            outs, lses = torch.cat([outs, own[0][None]]), torch.cat([lses, own[1][None]])
        return merge_partials(outs, lses, sinks=sinks, impl=impl)

    def topk(self, entries: Tensor, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Of the best entries of each rank the best of all, as far as this rank has them.

        Exact: among equal scores the lowest entries are taken, and NaN counts as the highest.

        Args:
            entries: [num_tokens, n] int32 by their number on this rank, ascending, then -1.
            scores: [num_tokens, n] fp32, of these.
            topk: entries that a query sees at most.

        Returns:
            (entries [num_tokens, n] int32 by their number on this rank, ascending, then -1; how
            many they are [num_tokens] int32).
        """
        beyond = torch.iinfo(torch.int32).max
        found = torch.where(entries < 0, beyond, entries * self.size + self.rank)
        order = torch.where(entries < 0, -torch.inf, scores.nan_to_num(torch.inf, torch.inf))
        found, by_id = self.group.gather(found, "topk").sort(1)
        order = self.group.gather(order, "topk").gather(1, by_id)
        best = order.sort(dim=1, descending=True, stable=True).indices[:, :topk]
        best = found.gather(1, best)
        mine = (best < beyond) & (best % self.size == self.rank)
        chosen = torch.where(mine, best // self.size, beyond).sort(1).values[:, : entries.shape[1]]
        return torch.where(chosen < beyond, chosen, -1).int(), mine.sum(1, dtype=torch.int32)


def split_context(group: Group | None) -> SplitContext | None:
    """The context of ranks that share it; None where each has it all."""
    if group is None or not group.split_context or group.size == 1:
        return None
    return SplitContext(group)
