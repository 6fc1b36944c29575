"""Oracle of ``mla_attention``: plain torch, one query and one key at a time.

    out_i = sum_j softmax_j(softmax_scale * q_i . row_j) row_j[:head_dim_v]   over the keys j <= p_i

Source: DeepSeek-V2 (arXiv 2405.04434) 2.1.
"""

from __future__ import annotations

import math

import torch


def mla_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    softmax_scale: float,
    head_dim_v: int = 512,
    kv: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    **hints: object,
) -> torch.Tensor:
    """Attend token by token.

    Args:
        q ... kv: as in ``quire.kernels.mla_attention``.
        lse: [num_heads, num_tokens] of any floating dtype, filled in place.
        dtype: arithmetic and result dtype; None takes q's.
        hints: how to launch; not looked at.

    Returns:
        [num_tokens, num_heads, head_dim_v] in ``dtype``.
    """
    dtype = q.dtype if dtype is None else dtype
    num_tokens, num_heads, _ = q.shape
    block_size, width = pages.shape[1], block_table.shape[1]
    out = torch.zeros(num_tokens, num_heads, head_dim_v, dtype=dtype)
    if lse is not None:
        lse.fill_(-math.inf)
    for s, seq_len in enumerate(seq_lens.tolist()):
        first, last = cu_seqlens_q[s].item(), cu_seqlens_q[s + 1].item()
        context = seq_len - (last - first)
        for token in range(first, last):
            rows = []
            for j in range(context + token - first + 1):
                if kv is not None and j >= context:
                    rows.append(kv[first + j - context])
                else:
                    page = block_table[s, min(j // block_size, width - 1)].item()
                    rows.append(pages[page, j % block_size])
            if not rows:
                continue
            keys = torch.stack(rows).to(dtype)
            for h in range(num_heads):
                logits = keys @ q[token, h].to(dtype) * softmax_scale
                if lse is not None:
                    lse[h, token] = torch.logsumexp(logits, 0)
                out[token, h] = torch.softmax(logits, 0) @ keys[:, :head_dim_v]
    return out
