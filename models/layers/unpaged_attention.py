"""Attention of one whole sequence in plain torch, without any cache: the oracle of paged runs.

Scores and softmax are fp32; nothing of `quire.kernels` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.model import ModelConfig
from .basic import rms_norm
from .rotary import apply_rope

if TYPE_CHECKING:
    from ..deepseek_v4.attention import Attention, AttentionInputs, GatedPooling
    from ..deepseek_v4.config import DeepseekV4Config

Stored = Callable[[Tensor], Tensor]
"""Rows as a cache gives them back: a tensor of the same shape and dtype."""

QUERY_BLOCK = 128  # rows of the score matrix that are held at a time


def attend_to(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softmax_scale: float, sinks: Tensor | None
) -> Tensor:
    """Softmax attention [num_rows, num_heads, head_dim] over the visible keys.

    k, v: [num_keys, num_kv_heads, head_dim]; visible: [num_rows, num_keys] bool.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (rows.float().repeat_interleave(group, dim=1) for rows in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * softmax_scale
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def _blocks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, QUERY_BLOCK):
        yield slice(start, start + QUERY_BLOCK)


class UnpagedAttend:
    """Causal and sliding-window attention of one whole sequence.

    Args:
        rows: as in `Attend`.
        stored: rounds keys and values as a cache of another dtype would; None = as they are.
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
        """As `Attend.__call__`."""
        window, position = self._config.attention(layer).sliding_window, None
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
        out = torch.empty_like(q)
        for rows in _blocks(len(q)):
            distance = position[rows, None] - every
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            out[rows] = attend_to(q[rows], k, v, visible, self._config.softmax_scale, sinks)
        return out


class V4UnpagedAttend:
    """Attention of one whole sequence of DeepSeek-V4; stored: as in `UnpagedAttend`."""

    impl: str | None = "torch"

    def __init__(self, config: DeepseekV4Config, stored: Stored | None = None) -> None:
        self._config = config
        self._stored = stored or (lambda rows: rows)

    def __call__(self, attention: Attention, inputs: AttentionInputs) -> Tensor:
        """As `quire.models.deepseek_v4.attention.LatentAttend.__call__`."""
        window, positions, cos_sin = self._config.sliding_window, inputs.positions, inputs.cos_sin
        kv = rms_norm(inputs.kv, attention.kv_norm.weight, attention.eps)
        raw = self._stored(apply_rope(kv, cos_sin[positions]))
        compressor, entries, index_keys = attention.compressor, raw[:0], None
        if compressor is not None:
            entries = compress_windows(compressor, *inputs.pooled, cos_sin).to(raw.dtype)
            entries = self._stored(entries)
        if inputs.index_pooled is not None:
            index_keys = compress_windows(compressor.indexer, *inputs.index_pooled, cos_sin)
            index_keys = self._stored(index_keys.to(raw.dtype))
        out = torch.empty_like(inputs.q)
        for rows in _blocks(len(out)):
            near = slice(max(0, rows.start - window + 1), rows.stop)
            distance = positions[rows, None] - positions[near]
            visible = (distance >= 0) & (distance < window)
            if compressor is not None:
                num_visible = (positions[rows, None] + 1) // compressor.ratio
                seen = torch.arange(len(entries), device=raw.device) < num_visible
                if index_keys is not None:
                    scores = torch.einsum(
                        "qh,qhk->qk",
                        inputs.index_weights[rows],
                        (inputs.index_q[rows].float() @ index_keys.float().T).relu(),
                    )
                    seen &= _best(scores.masked_fill(~seen, -torch.inf), self._config.index_topk)
                visible = torch.cat([visible, seen], dim=1)
            keys = torch.cat([raw[near], entries])[:, None]
            scale = attention.head_dim**-0.5
            out[rows] = attend_to(inputs.q[rows], keys, keys, visible, scale, attention.sinks)
        return apply_rope(out, cos_sin[positions], inverse=True)


def _best(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` best scores of each row; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def compress_windows(pooling: GatedPooling, kv: Tensor, gate: Tensor, cos_sin: Tensor) -> Tensor:
    """Compressed entries of all whole windows of a sequence: [num_tokens // ratio, width] fp32.

    kv, gate: [num_tokens, width * (1 + overlap)] fp32, from position 0 on.
    """
    ratio, num_tokens = pooling.ratio, len(kv) // pooling.ratio * pooling.ratio
    kv = kv[:num_tokens].unflatten(0, (-1, ratio))
    gate = gate[:num_tokens].unflatten(0, (-1, ratio)) + pooling.position_bias
    if pooling.overlap:
        kv, gate = _with_window_before(kv, 0.0), _with_window_before(gate, -torch.inf)
    entries = (gate.softmax(dim=1) * kv).sum(dim=1)
    entries = rms_norm(entries, pooling.kv_norm.weight, pooling.kv_norm.eps)
    return apply_rope(entries, cos_sin[:num_tokens:ratio])


def _with_window_before(rows: Tensor, absent: float) -> Tensor:
    """[num_windows, 2 * ratio, width]: series a of the window before (``absent`` before window 0),
    then series b of each window; rows: [num_windows, ratio, 2 * width]."""
    a, b = rows.chunk(2, dim=-1)
    return torch.cat([F.pad(a, (0, 0, 0, 0, 1, 0), value=absent)[:-1], b], dim=1)
