"""The attention operator of a DeepSeek-V4 layer over one whole sequence.

Plain torch, no cache, nothing of `quire.kernels`.

`models.deepseek_v4.paged_attention` has the one over pages; both are called as ``attend(attention,
inputs)`` of `models.deepseek_v4.layer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.basic import rms_norm
from .config import DeepseekV4Config
from .layer import Attention, AttentionInputs, GatedPooling, IndexerInputs
from .rope import apply_rope

if TYPE_CHECKING:
    from ..layers.unpaged_attention import Stored

QUERY_BLOCK = 128  # rows of the score matrix that are held at a time


class UnpagedAttend:
    """Attention of one whole sequence in plain torch, with fp32 scores and softmax.

    Args:
        stored: what is seen of latents and entries [num_rows, head_dim] and of index keys
            [num_entries, index_head_dim], as a cache of another dtype would round them; None = as
            they are.
    """

    impl: str | None = "torch"

    def __init__(self, config: DeepseekV4Config, stored: Stored | None = None) -> None:
        self.config, self.stored = config, stored

    def __call__(self, attention: Attention, inputs: AttentionInputs) -> Tensor:
        """See `models.deepseek_v4.layer.Attend`."""
        config, stored = self.config, self.stored
        kv = rms_norm(inputs.kv, attention.kv_norm.weight, attention.eps)
        raw = apply_rope(kv, inputs.cos_sin[inputs.positions])
        compressor, entries, index_keys = attention.compressor, raw[:0], None
        if compressor is not None:
            assert inputs.compressor is not None
            entries = compress_windows(compressor, *inputs.compressor, inputs.cos_sin).to(raw.dtype)
        if inputs.indexer is not None:
            assert compressor is not None
            index_keys = compress_windows(
                compressor.indexer, inputs.indexer.kv, inputs.indexer.gate, inputs.cos_sin
            )
            index_keys = index_keys.to(raw.dtype)
        if stored is not None:
            raw, entries = stored(raw), stored(entries)
            index_keys = None if index_keys is None else stored(index_keys)
        out = torch.empty_like(inputs.q)
        for start in range(0, len(out), QUERY_BLOCK):
            block = slice(start, start + QUERY_BLOCK)
            positions = inputs.positions[block, None]
            near = slice(
                max(0, start - config.sliding_window + 1), block.stop
            )  # all that a window reaches
            distance = positions - inputs.positions[near]
            visible = (distance >= 0) & (distance < config.sliding_window)
            if compressor is not None:
                entry = torch.arange(len(entries), device=raw.device)
                seen = entry < num_visible(positions, compressor.ratio)
                if index_keys is not None:
                    seen &= selected(inputs.indexer, block, index_keys, seen, config.index_topk)
                visible = torch.cat([visible, seen], dim=1)
            keys = torch.cat([raw[near], entries])
            out[block] = softmax_with_sinks(inputs.q[block], keys, visible, attention.sinks)
        return apply_rope(out, inputs.cos_sin[inputs.positions], inverse=True)


def num_visible(positions: Tensor, ratio: int) -> Tensor:
    """Entries that a query sees.

    Those of windows that end at or before it, its own position included.
    """
    return (positions + 1) // ratio


def compress_windows(compressor: GatedPooling, kv: Tensor, gate: Tensor, cos_sin: Tensor) -> Tensor:
    """Compressed entries of all whole windows of a sequence.

    Args:
        kv, gate: [num_tokens, width * (1 + overlap)] fp32, from position 0 on.
        cos_sin: [max_positions, rope_dim].

    Returns:
        [num_tokens // ratio, width] fp32, normed, and rotated by the position at which each window
        starts.
    """
    ratio, num_windows = compressor.ratio, len(kv) // compressor.ratio
    kv = kv[: num_windows * ratio].unflatten(0, (num_windows, ratio))
    gate = gate[: num_windows * ratio].unflatten(0, (num_windows, ratio)) + compressor.position_bias
    if compressor.overlap:
        kv, gate = with_window_before(kv, 0.0), with_window_before(gate, float("-inf"))
    entries = rms_norm(
        (gate.softmax(dim=1) * kv).sum(dim=1), compressor.kv_norm.weight, compressor.kv_norm.eps
    )
    return apply_rope(entries, cos_sin[: num_windows * ratio : ratio])


def with_window_before(rows: Tensor, absent: float) -> Tensor:
    """Series a of the window before, then series b of the window itself.

    ``absent`` before window 0.

    Args:
        rows: [num_windows, ratio, 2 * width], series a first.

    Returns:
        [num_windows, 2 * ratio, width].
    """
    a, b = rows.chunk(2, dim=-1)
    return torch.cat([F.pad(a, (0, 0, 0, 0, 1, 0), value=absent)[:-1], b], dim=1)


def selected(
    index: IndexerInputs, block: slice, index_keys: Tensor, visible: Tensor, topk: int
) -> Tensor:
    """Which entries are among a query's ``topk`` best visible ones.

    Of equal scores the lowest entry goes first.

    Args:
        visible: [rows, num_entries] bool, for the queries of ``block``.

    Returns:
        The same shape.
    """
    dots = torch.einsum("qhd,kd->qhk", index.q[block].float(), index_keys.float()).relu()
    scores = torch.einsum("qh,qhk->qk", index.weights[block], dots)
    scores = scores.masked_fill(~visible, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return torch.zeros_like(visible).scatter_(1, best, True)


def softmax_with_sinks(q: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor) -> Tensor:
    """One softmax over raw rows and entries together; a head's sink joins the denominator only.

    Args:
        q: [rows, num_heads, head_dim].
        keys: [num_keys, head_dim], also the values.
        visible: [rows, num_keys] bool.
    """
    keys = keys.float()
    scores = torch.einsum("qhd,kd->qhk", q.float(), keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    sink = sinks.view(1, -1, 1).expand(len(q), -1, 1)
    probabilities = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("qhk,kd->qhd", probabilities, keys).to(q.dtype)
