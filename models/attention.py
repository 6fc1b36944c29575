"""The attention operator of a layer: over pages, or over one whole sequence without any cache.

Both are functions ``attend(layer, q, k, v) -> out`` with q, out [num_tokens, num_heads, head_dim] and k, v
[num_tokens, num_kv_heads, head_dim], the rows that the layer just computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels import paged_attention, sliding_window_attention, write_kv
from quire.models.batch import AttnMetadata
from quire.models.cache import PagePool
from quire.models.configs import ModelConfig

QUERY_BLOCK = 256  # rows of the score matrix that dense attention holds at a time


def paged_attend(
    config: ModelConfig, attn: AttnMetadata, pool: PagePool, *, impl: str | None = None
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Attention of one ragged step through `quire.kernels`: context from pages, the step's own rows from k and v.

    attn: this step's tables, lengths and slots. pool: pages, read and then written.
    impl: "triton" or "torch"; default: by device.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = pool.layers[layer]
        window = config.attention(layer).sliding_window
        arguments = {
            "max_seqlen_q": attn.max_seqlen_q,
            "k": k,
            "v": v,
            "max_seq_len": attn.max_seq_len,
            "num_decodes": attn.num_decodes,
            "softmax_scale": config.softmax_scale,
            "impl": impl,
        }
        tensors = (
            q,
            cache.k_pages,
            cache.v_pages,
            attn.block_tables[cache.group],
            attn.seq_lens,
            attn.cu_seqlens_q,
        )
        if window is None:
            out = paged_attention(*tensors, **arguments)
        else:
            out = sliding_window_attention(*tensors, sliding_window=window, **arguments)
        # Only now: a table may give the new rows of a window the places of rows that the step's first queries still see.
        write_kv(k, v, cache.k_pages, cache.v_pages, attn.slot_mappings[cache.group], impl=impl)
        return out

    return attend


def dense_attend(config: ModelConfig) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Causal and sliding-window attention of one whole sequence in plain torch, fp32 scores and softmax."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = config.attention(layer)
        group = shape.num_heads // shape.num_kv_heads
        keys = k.float().repeat_interleave(group, dim=1)  # [num_tokens, num_heads, head_dim]
        values = v.float().repeat_interleave(group, dim=1)
        position = torch.arange(len(q), device=q.device)
        out = torch.empty_like(q)
        for start in range(0, len(q), QUERY_BLOCK):
            rows = slice(start, start + QUERY_BLOCK)
            distance = position[rows, None] - position[None, :]  # [rows, num_tokens]
            visible = distance >= 0
            if shape.sliding_window is not None:
                visible &= distance < shape.sliding_window
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * config.softmax_scale
            probabilities = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            out[rows] = torch.einsum("hqk,khd->qhd", probabilities, values).to(q.dtype)
        return out

    return attend
