"""Attention of one whole sequence in plain torch, without any cache.

What a paged run must agree with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config.model import ModelConfig

Stored = Callable[[Tensor], Tensor]
"""What reading a cache gives of rows that were written to it.

A tensor of the same shape and dtype.
"""

QUERY_BLOCK = 256  # rows of the score matrix that are held at a time


class UnpagedAttend:
    """Causal and sliding-window attention of one whole sequence in plain torch.

    Scores and softmax are fp32.

    Args:
        rows: as in `Attend`.
        stored: what attention sees of keys and of values [num_tokens, num_kv_heads, head_dim], as a
            cache of another dtype would round them; None = as they are.
    """

    impl: str | None = "torch"

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: Tensor | None = None,
        stored: Stored | None = None,
    ) -> None:
        self.rows = rows
        self._config = config
        self._stored = stored
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        shape, position = self._config.attention(layer), None
        if k is None or v is None:
            k, v = self._kept[self._config.kv_donor(layer)]
            position = self.rows
        else:
            if self._stored is not None:
                k, v = self._stored(k), self._stored(v)
            if layer in self._config.kv_donors:
                self._kept[layer] = k, v
        every = torch.arange(len(k), device=q.device)
        position = every if position is None else position
        group = q.shape[1] // k.shape[1]
        keys = k.float().repeat_interleave(group, dim=1)  # [num_tokens, num_heads, head_dim]
        values = v.float().repeat_interleave(group, dim=1)
        out = torch.empty_like(q)
        for start in range(0, len(q), QUERY_BLOCK):
            rows = slice(start, start + QUERY_BLOCK)
            distance = position[rows, None] - every[None, :]  # [rows, num_tokens]
            visible = distance >= 0
            if shape.sliding_window is not None:
                visible &= distance < shape.sliding_window
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys)
            scores = (scores * self._config.softmax_scale).masked_fill(~visible, float("-inf"))
            if sinks is not None:
                column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, column), dim=-1)
            probabilities = scores.softmax(dim=-1)[..., : len(k)]
            out[rows] = torch.einsum("hqk,khd->qhd", probabilities, values).to(q.dtype)
        return out

    def finish(self) -> None:
        """Nothing is left to do."""
