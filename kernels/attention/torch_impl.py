"""Paged attention for CPU tensors: gather the visible pages, then torch's own attention.

Sequences with one new token are one padded batch. Every other sequence is a batch of its own, so
that the results of a prefill chunk depend on that chunk alone. A window layer gathers the pages of
its window, at any context length. Lengths and page ids are read on the host and checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from ..common import e4m3
from ..common.checks import expect_ids, expect_lengths, expect_offsets
from .call import AttentionCall

# Keys gathered at once for the batch of one-token sequences, so that a long batch does not copy the
# whole pool.
MAX_GATHERED_KEYS = 1 << 17


@torch.no_grad()
def attention(call: AttentionCall) -> torch.Tensor:
    """Compute one checked attention call; returns ``call.out``."""
    seq_lens, bounds = call.seq_lens.tolist(), call.cu_seqlens_q.tolist()
    expect_lengths("seq_lens", seq_lens)
    expect_offsets("cu_seqlens_q", bounds, call.q.shape[0])
    q_lens = [last - first for first, last in pairwise(bounds)]
    reach = call.sliding_window or max(seq_lens, default=1)
    batch_size = max(1, MAX_GATHERED_KEYS // max(1, min(reach, max(seq_lens, default=1))))
    single = [s for s, q_len in enumerate(q_lens) if q_len == 1]
    if len(single) == 1:
        single = []
    for start in range(0, len(single), batch_size):
        batch = single[start : start + batch_size]
        _attend_batch(call, batch, [seq_lens[s] for s in batch])
    for s, q_len in enumerate(q_lens):
        if q_len > 1 or (q_len == 1 and not single):
            _attend_sequence(call, s, seq_lens[s], slice(bounds[s], bounds[s + 1]))
    return call.out


@torch.no_grad()
def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Merge partial results by their lse; shapes as in ``quire.kernels.merge_partials``."""
    if lse is not None:
        lse.copy_(torch.logsumexp(partial_lse, 0))
    logits = partial_lse
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None].expand(partial_lse.shape[1:])[None]])
    # Over the last dimension: torch's result over the first is off by twice as much.
    weight = torch.softmax(logits.transpose(0, 2).contiguous(), 2).transpose(0, 2)
    weight = weight[: partial_lse.shape[0]]
    # An empty part has lse -inf; its rows may hold anything, so both factors are replaced, not
    # multiplied by zero.
    empty = torch.isneginf(partial_lse)
    if sinks is not None:  # an infinite sink takes all
        weight = weight.masked_fill(torch.isposinf(sinks)[:, None], 0.0)
    weight = torch.where(empty, 0.0, weight).transpose(1, 2).unsqueeze(-1)
    rows = torch.where(empty.transpose(1, 2).unsqueeze(-1), 0.0, partial_out.float())
    return out.copy_((weight * rows).sum(0))


def _attend_sequence(call: AttentionCall, s: int, seq_len: int, tokens: slice) -> None:
    """Attend for one sequence: L new tokens, S visible keys."""
    context = seq_len - (tokens.stop - tokens.start)
    low = _lowest(call, context)
    end = max(low, context if call.paged_context else seq_len)
    size = call.k_pages.shape[1]
    first = low // size
    block = torch.arange(first, -(-end // size) if end > low else first)
    page = call.block_table[s, _entries(call, block)].long()
    expect_ids("block_table", page, call.k_pages.shape[0])
    rows = slice(low - first * size, end - first * size)
    keys = _pages(call.k_pages, call.k_scale, page).flatten(0, 1)[rows]
    values = _pages(call.v_pages, call.v_scale, page).flatten(0, 1)[rows]
    if call.k is not None and call.v is not None:
        # Tokens of a negative position are padding.
        new = slice(tokens.start + max(0, -context), tokens.stop)
        keys = torch.cat([keys, call.k[new].to(keys.dtype)])
        values = torch.cat([values, call.v[new].to(values.dtype)])
    position = torch.arange(context, seq_len)[:, None]
    key_position = torch.arange(low, low + keys.shape[0])
    visible = key_position <= position
    if call.sliding_window is not None:
        visible &= position - key_position < call.sliding_window
    causal = context == 0 and call.sliding_window is None and not call.context_only
    call.out[tokens] = _attend(call, tokens, keys[None], values[None], visible[None], causal)


def _attend_batch(call: AttentionCall, batch: Sequence[int], seq_lens: Sequence[int]) -> None:
    """Attend for B sequences of one new token: S keys, of which shorter sequences have fewer."""
    sequence, length = torch.tensor(batch), torch.tensor(seq_lens)[:, None]
    tokens = call.cu_seqlens_q[sequence].long()
    low = torch.tensor([_lowest(call, n - 1) for n in seq_lens])[:, None]
    size = call.k_pages.shape[1]
    first = low // size
    end = length - 1 if call.context_only else length
    block = first + torch.arange(int(((end + size - 1) // size - first).max()))
    # Other entries of the table may hold anything: page 0 stands in.
    paged_end = length - 1 if call.paged_context else length
    read = (block * size < paged_end) & (low < paged_end)
    page = torch.where(read, call.block_table[sequence[:, None], _entries(call, block)].long(), 0)
    expect_ids("block_table", page, call.k_pages.shape[0])
    keys = _pages(call.k_pages, call.k_scale, page).flatten(1, 2)
    values = _pages(call.v_pages, call.v_scale, page).flatten(1, 2)
    key_position = first * size + torch.arange(keys.shape[1])
    visible = (key_position >= low) & (key_position < end)
    # Rows of other requests must not turn a weight of 0 into NaN.
    unseen = torch.nonzero(~visible).unbind(1)
    keys[unseen] = 0
    values[unseen] = 0
    if call.k is not None and call.v is not None:
        new = torch.nonzero(key_position == length - 1).unbind(1)  # none in an empty sequence
        keys[new] = call.k[tokens[new[0]]].to(keys.dtype)
        values[new] = call.v[tokens[new[0]]].to(values.dtype)
    call.out[tokens] = _attend(call, tokens, keys, values, visible[:, None], causal=False)


def _lowest(call: AttentionCall, context: int) -> int:
    """Lowest position that a query behind ``context`` tokens sees."""
    return 0 if call.sliding_window is None else max(0, context - call.sliding_window + 1)


def _entries(call: AttentionCall, block: torch.Tensor) -> torch.Tensor:
    """Entries of the block table for some blocks: of a window layer's ring, or of a linear table.

    Of a linear table that is too short the last entry stands for all blocks behind it, as in the
    kernels.
    """
    width = call.block_table.shape[1]
    return block.clamp(max=width - 1) if call.sliding_window is None else block % width


def _attend(
    call: AttentionCall,
    tokens: slice | torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    """Attend for B sequences of L new tokens each.

    Args:
        tokens: the B * L tokens.
        keys, values: [B, S, num_kv_heads, head_dim].
        visible: [B, L, S].
        causal: whether the S keys are those of the L tokens, so that torch needs no mask.

    Returns:
        [B * L, num_heads, head_dim]; fills ``call.lse``.
    """
    batch, q_len = visible.shape[:2]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    queries = call.q[tokens].to(keys.dtype)
    queries = queries.view(batch, q_len, keys.shape[1], call.group, -1).permute(0, 2, 3, 1, 4)
    if call.lse is None and call.sinks is None and call.softcap is None:
        out = _torch_attention(queries, keys, values, visible, call.softmax_scale, causal)
    else:
        out, lse = _softmax_attention(call, queries, keys, values, visible)
        if call.lse is not None:
            call.lse[:, tokens] = lse.permute(1, 2, 0, 3).reshape(call.lse.shape[0], -1)
    return out.permute(0, 3, 1, 2, 4).reshape(batch * q_len, -1, out.shape[-1]).to(call.out.dtype)


def _pages(
    pages: torch.Tensor, scale: float | torch.Tensor | None, page: torch.Tensor
) -> torch.Tensor:
    """Pages [..., block_size, num_kv_heads, head_dim] by id [...]; those of e4m3 as fp32."""
    # Several times as fast as an index on a CPU.
    if scale is None:
        return pages.index_select(0, page.flatten()).unflatten(0, page.shape)
    values = pages.view(torch.uint8).index_select(0, page.flatten()).unflatten(0, page.shape)
    if isinstance(scale, torch.Tensor) and scale.dim() == 3:
        scale = scale[page]
    return e4m3.dequantize(values.view(pages.dtype), scale)


def _torch_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Attend by ``scaled_dot_product_attention``; shapes as in ``_softmax_attention``."""
    group, q_len = queries.shape[2:4]
    if q_len == 1:  # a group's heads are the rows of one product
        rows = F.scaled_dot_product_attention(
            queries.flatten(2, 3), keys, values, attn_mask=visible[:, None], scale=scale
        )
        return rows.unsqueeze(3)
    # One sequence. KV heads are the batch; the heads of a group share keys.
    keys, values = (x[0].unsqueeze(1).expand(-1, group, -1, -1) for x in (keys, values))
    mask = None if causal else visible[0]
    return F.scaled_dot_product_attention(
        queries[0], keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )[None]


def _softmax_attention(
    call: AttentionCall,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in fp32, with softcap, sinks and lse.

    Args:
        queries: [B, K, G, L, head_dim], K KV heads with G query heads each.
        keys, values: [B, K, S, head_dim].
        visible: [B, L, S].

    Returns:
        (out like queries, natural-log lse [B, K, G, L]).
    """
    shape = queries.shape[:4]
    logits = queries.flatten(2, 3).float() @ keys.float().transpose(2, 3)
    logits = logits.view(*shape, keys.shape[2]) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    joint = logits
    if call.sinks is not None:
        sinks = call.sinks.view(1, shape[1], call.group, 1, 1)
        joint = torch.cat([logits, sinks.expand(*shape, 1)], -1)
    weights = torch.softmax(joint, -1)[..., : logits.shape[-1]]
    # A row that sees nothing, or has an infinite sink, is NaN after the softmax; its weights are 0.
    weights = torch.where(torch.isneginf(logits), 0.0, weights)
    if call.sinks is not None:
        weights = weights.masked_fill(torch.isposinf(sinks), 0.0)
    out = weights.flatten(2, 3) @ values.float()
    return out.view(queries.shape), lse
