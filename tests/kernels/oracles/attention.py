"""Oracles of the public functions: plain torch, one token and one key at a time.

    out_i = sum_j softmax_j(cap(softmax_scale * q_i . k_j)) v_j   over the keys j that query i sees,

where cap(x) = softcap * tanh(x / softcap), and a sink is one more logit of the denominator. Every
index is visible to a reviewer, and nothing is shared with the implementations but the list of
arguments, so no index error can hide in both. ``dtype`` chooses the arithmetic: float64 in tests,
where `bounding` carries the error that a right program may make.

Source: Attention Is All You Need 3.2.1; PagedAttention (arXiv 2309.06180) 4.1 for the pages;
gpt-oss model card for sinks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from quire.kernels.attention.api import AttentionCall


def _kept(
    pages: torch.Tensor,
    scale: float | torch.Tensor | None,
    page: int,
    row: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One row of a page [num_kv_heads, head_dim], as it is or as quantized values times scale.

    They are multiplied in float64 for float64 and else in fp32.
    """
    if scale is None:
        return pages[page, row]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factor = torch.as_tensor(scale, dtype=torch.float32)
    if factor.dim() == 3:
        factor = factor[page, row, :, None]
    return (pages[page, row].float().to(wide) * factor.to(wide)).to(dtype)


def one_query(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """Output [dim] and lse of one query [dim] over keys and values [n, dim]; 0 and -inf if n = 0."""
    if not len(keys):
        return 0.0, -math.inf
    logits = keys @ q * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    lse = torch.logsumexp(logits, 0)
    if sink is not None and sink == math.inf:
        return 0.0, lse
    if sink is not None:
        logits = torch.cat([logits, sink.to(logits.dtype)[None]])
    return torch.softmax(logits, 0)[: len(keys)] @ values, lse


def attention(call: AttentionCall, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Attend token by token, to the last ``sliding_window`` keys if the call has a window.

    Args:
        call: as given, unchecked; ``lse`` may be of any floating dtype here. The launch hints of
            the kernels do not count: max_seqlen_q, max_seq_len, num_decodes, workspace.
        dtype: arithmetic and result dtype; None takes q's.

    Returns:
        [num_tokens, num_heads, head_dim] in ``dtype`` (``out`` if given).
    """
    dtype = call.q.dtype if dtype is None else dtype
    num_heads, head_dim = call.q.shape[1:]
    group = num_heads // call.k_pages.shape[2]
    block_size, width = call.k_pages.shape[1], call.block_table.shape[1]
    scale = head_dim**-0.5 if call.softmax_scale is None else call.softmax_scale
    out, lse, k, v = call.out, call.lse, call.k, call.v
    if out is None:
        out = torch.empty(call.q.shape, dtype=dtype, device=call.q.device)
    for s, seq_len in enumerate(call.seq_lens.tolist()):
        first, last = call.cu_seqlens_q[s].item(), call.cu_seqlens_q[s + 1].item()
        context = seq_len - (last - first)

        def lowest(position: int) -> int:
            return 0 if call.sliding_window is None else max(0, position - call.sliding_window + 1)

        oldest, keys, values = lowest(context), [], []
        end = context if call.context_only else seq_len
        for j in range(oldest, end if last > first else oldest):
            if k is not None and v is not None and j >= context:
                keys.append(k[first + j - context].to(dtype))
                values.append(v[first + j - context].to(dtype))
            else:
                block = j // block_size
                entry = min(block, width - 1) if call.sliding_window is None else block % width
                page = call.block_table[s, entry].item()
                for rows, pages, row_scale in (
                    (keys, call.k_pages, call.k_scale),
                    (values, call.v_pages, call.v_scale),
                ):
                    rows.append(_kept(pages, row_scale, page, j % block_size, dtype).to(dtype))
        shape = (-1, *call.k_pages.shape[2:])
        rows = [
            torch.stack(x) if x else call.q.new_empty(0, dtype=dtype).view(shape)
            for x in (keys, values)
        ]
        for token in range(first, last):
            position = context + token - first
            seen = slice(lowest(position) - oldest, max(0, min(position + 1, end) - oldest))
            for h in range(num_heads):
                sink = None if call.sinks is None else call.sinks[h]
                out[token, h], found = one_query(
                    call.q[token, h].to(dtype),
                    *(x[seen, h // group] for x in rows),
                    scale,
                    sink,
                    call.softcap,
                )
                if lse is not None:
                    lse[h, token] = found
    return out


def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Merge token by token.

    Shapes as in ``quire.kernels.merge_partials``, ``dtype`` as in ``attention`` of this
    module.
    """
    dtype = partial_out.dtype if dtype is None else dtype
    num_parts, num_tokens, num_heads, _ = partial_out.shape
    if out is None:
        out = torch.empty(partial_out.shape[1:], dtype=dtype, device=partial_out.device)
    for token in range(num_tokens):
        for h in range(num_heads):
            live = [p for p in range(num_parts) if partial_lse[p, h, token] != -math.inf]
            logits = partial_lse[live, h, token].to(dtype)
            total = torch.logsumexp(logits, 0) if live else torch.tensor(-math.inf)
            if lse is not None:
                lse[h, token] = total
            out[token, h] = 0
            if sinks is not None and sinks[h] == math.inf:
                continue
            if sinks is not None:
                logits = torch.cat([logits, sinks[h : h + 1].to(dtype)])
            weights = torch.softmax(logits, 0)
            for weight, p in zip(weights, live, strict=False):
                out[token, h] += (weight * partial_out[p, token, h].to(dtype)).to(out.dtype)
    return out
