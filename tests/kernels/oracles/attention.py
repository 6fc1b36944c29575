"""Oracles of the public functions: plain torch, one token at a time.

    out_i = sum_j softmax_j(cap(softmax_scale * q_i . k_j)) v_j   over the keys j that query i sees,

where cap(x) = softcap * tanh(x / softcap), and a sink is one more logit of the denominator. Every
index is visible to a reviewer, and nothing is shared with the implementations but the list of
arguments, so no index error can hide in both. Arithmetic and results are float64; in tests
`bounding` carries the error that a right program may make.

Source: Attention Is All You Need 3.2.1; PagedAttention (arXiv 2309.06180) 4.1 for the pages;
gpt-oss model card for sinks.
"""

import math

import torch


def _kept(pages, scale, page, row):
    """One row of a page [num_kv_heads, head_dim], as it is or as quantized values times scale."""
    if scale is None:
        return pages[page, row].double()
    factor = torch.as_tensor(scale, dtype=torch.float32)
    if factor.dim() == 3:
        factor = factor[page, row, :, None]
    return pages[page, row].float().double() * factor.double()


def one_query(q, keys, values, scale, sink=None, softcap=None):
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
        logits = torch.cat([logits, sink.double()[None]])
    return torch.softmax(logits, 0)[: len(keys)] @ values, lse


def attention(call):
    """Attend token by token, to the last ``sliding_window`` keys if the call has a window.

    Args:
        call: as given, unchecked; ``lse`` may be of any floating dtype here, ``out`` is not filled.
            The launch hints of the kernels do not count: max_seqlen_q, max_seq_len, num_decodes,
            workspace.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    num_heads, head_dim = call.q.shape[1:]
    group = num_heads // call.k_pages.shape[2]
    block_size, width = call.k_pages.shape[1], call.block_table.shape[1]
    scale = head_dim**-0.5 if call.softmax_scale is None else call.softmax_scale
    out = torch.empty(call.q.shape, dtype=torch.float64, device=call.q.device)
    for s, seq_len in enumerate(call.seq_lens.tolist()):
        first, last = call.cu_seqlens_q[s].item(), call.cu_seqlens_q[s + 1].item()
        context = seq_len - (last - first)

        def lowest(position):
            return 0 if call.sliding_window is None else max(0, position - call.sliding_window + 1)

        oldest, keys, values = lowest(context), [], []
        end = context if call.context_only else seq_len
        for j in range(oldest, end if last > first else oldest):
            if call.k is not None and j >= context:
                keys.append(call.k[first + j - context].double())
                values.append(call.v[first + j - context].double())
            else:
                block = j // block_size
                entry = min(block, width - 1) if call.sliding_window is None else block % width
                page, row = call.block_table[s, entry].item(), j % block_size
                keys.append(_kept(call.k_pages, call.k_scale, page, row))
                values.append(_kept(call.v_pages, call.v_scale, page, row))
        none = call.q.new_empty(0, call.k_pages.shape[2], head_dim)
        keys = torch.stack(keys) if keys else none
        values = torch.stack(values) if values else none
        for token in range(first, last):
            position = context + token - first
            seen = slice(lowest(position) - oldest, max(0, min(position + 1, end) - oldest))
            for h in range(num_heads):
                rows = keys[seen, h // group], values[seen, h // group]
                sink = None if call.sinks is None else call.sinks[h]
                found = one_query(call.q[token, h].double(), *rows, scale, sink, call.softcap)
                out[token, h] = found[0]
                if call.lse is not None:
                    call.lse[h, token] = found[1]
    return out


def merge_partials(partial_out, partial_lse, *, sinks=None, lse=None):
    """Merge token by token; shapes as in ``quire.kernels.merge_partials``."""
    num_parts, num_tokens, num_heads, _ = partial_out.shape
    out = torch.empty(partial_out.shape[1:], dtype=torch.float64, device=partial_out.device)
    for token in range(num_tokens):
        for h in range(num_heads):
            live = [p for p in range(num_parts) if partial_lse[p, h, token] != -math.inf]
            logits = partial_lse[live, h, token].double()
            if lse is not None:
                lse[h, token] = torch.logsumexp(logits, 0) if live else -math.inf
            out[token, h] = 0
            if sinks is not None and sinks[h] == math.inf:
                continue
            if sinks is not None:
                logits = torch.cat([logits, sinks[h : h + 1].double()])
            weights = torch.softmax(logits, 0)
            for weight, p in zip(weights, live, strict=False):
                out[token, h] += weight * partial_out[p, token, h].double()
    return out
