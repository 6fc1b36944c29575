"""Paged attention for CPU tensors: gather the visible pages, then torch's own products.

Sequences with one new token are one padded batch. Every other sequence is a batch of its own, so
that the results of a prefill chunk depend on that chunk alone. Queries go in blocks, which leave out
keys that none of them sees. Lengths and page ids are read on the host and checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..common import e4m3
from ..common.autograd import without_grad
from ..common.checks import expect_ids, expect_lengths, expect_offsets

if TYPE_CHECKING:
    from .api import AttentionCall

# Keys gathered at once for the batch of one-token sequences, so that a long batch does not copy the
# whole pool.
MAX_GATHERED_KEYS = 1 << 17
QUERY_BLOCK = 64


@without_grad
def attention(call: AttentionCall) -> torch.Tensor:
    """Compute one checked attention call; returns ``call.out``."""
    seq_lens, bounds = call.seq_lens.tolist(), call.cu_seqlens_q.tolist()
    expect_lengths("seq_lens", seq_lens)
    expect_offsets("cu_seqlens_q", bounds, call.q.shape[0])
    q_lens = [last - first for first, last in pairwise(bounds)]
    single = [s for s, q_len in enumerate(q_lens) if q_len == 1]
    if len(single) == 1:
        single = []
    reach = min(call.sliding_window or MAX_GATHERED_KEYS, max(seq_lens, default=1))
    batch_size = max(1, MAX_GATHERED_KEYS // max(1, reach))
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
    """Attend for the L new tokens of one sequence."""
    context = seq_len - (tokens.stop - tokens.start)
    if context < 0:  # tokens of a negative position are padding
        padding = slice(tokens.start, min(tokens.stop, tokens.start - context))
        call.out[padding] = 0
        if call.lse is not None:
            call.lse[:, padding] = -torch.inf
        tokens, context = slice(padding.stop, tokens.stop), 0
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
        keys = torch.cat([keys, call.k[tokens].to(keys.dtype)])
        values = torch.cat([values, call.v[tokens].to(values.dtype)])
    for start in range(tokens.start, tokens.stop, QUERY_BLOCK):
        block = slice(start, min(tokens.stop, start + QUERY_BLOCK))
        position = context + start - tokens.start  # of the first query
        seen = slice(_lowest(call, position) - low, position + block.stop - start - low)
        visible = None
        if block.stop - start > 1:  # else the query sees all of these keys
            query = torch.arange(position, position + block.stop - start)[:, None]
            key = torch.arange(low + seen.start, low + min(seen.stop, len(keys)))
            visible = (key <= query)[None]
            if call.sliding_window is not None:
                visible &= query - key < call.sliding_window
        _attend(call, block, keys[None, seen], values[None, seen], visible)


def _attend_batch(call: AttentionCall, batch: Sequence[int], seq_lens: Sequence[int]) -> None:
    """Attend for B sequences of one new token: S keys, of which shorter sequences have fewer."""
    sequence: slice | torch.Tensor = slice(batch[0], batch[-1] + 1)
    tokens = slice(int(call.cu_seqlens_q[batch[0]]), int(call.cu_seqlens_q[batch[-1] + 1]))
    if tokens.stop - tokens.start != len(batch) or batch[-1] + 1 - batch[0] != len(batch):
        sequence = torch.tensor(batch)
        tokens = call.cu_seqlens_q[sequence].long()
    size = call.k_pages.shape[1]
    length = call.seq_lens[sequence].long()[:, None]
    end = length - 1 if call.context_only else length
    first, low = torch.zeros_like(length), 0
    num_blocks = -(-max(seq_lens) // size)
    if call.sliding_window is not None:
        low = (length - call.sliding_window).clamp(min=0)
        first = low // size
        num_blocks = max(-(-n // size) - _lowest(call, n - 1) // size for n in seq_lens)
    block = first + torch.arange(max(1, num_blocks))
    # Other entries of the table may hold anything: page 0 stands in.
    paged_end = length - 1 if call.paged_context else length
    read = (block * size < paged_end) & (low < paged_end)
    page = torch.where(read, call.block_table[sequence].gather(1, _entries(call, block)), 0).long()
    expect_ids("block_table", page, call.k_pages.shape[0])
    keys = _pages(call.k_pages, call.k_scale, page).flatten(1, 2)
    values = _pages(call.v_pages, call.v_scale, page).flatten(1, 2)
    if call.k is not None and call.v is not None:
        place = (length - 1 - first * size).clamp(min=0)[:, 0]
        new = torch.arange(len(batch)), place
        keys[new] = call.k[tokens].to(keys.dtype)
        values[new] = call.v[tokens].to(values.dtype)
    key_position = first * size + torch.arange(keys.shape[1])
    visible = key_position < end
    if call.sliding_window is not None:
        visible &= key_position >= low
    # Rows of other requests must not turn a weight of 0 into NaN.
    unseen = torch.nonzero(~visible).unbind(1)
    keys[unseen] = 0
    values[unseen] = 0
    _attend(call, tokens, keys, values, visible[:, None])


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
    visible: torch.Tensor | None,
) -> None:
    """Attend for L new tokens of each of B sequences.

    Args:
        tokens: the B * L tokens.
        keys, values: [B, S, num_kv_heads, head_dim].
        visible: [B, L, S]; None = all.
    """
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    batch, num_kv_heads, _, head_dim = keys.shape
    queries = call.q[tokens].to(keys.dtype)
    queries = queries.reshape(batch, -1, num_kv_heads, call.group, head_dim).permute(0, 2, 3, 1, 4)
    if call.lse is not None or call.sinks is not None or call.softcap is not None:
        out, lse = _softmax_attention(call, queries, keys, values, visible)
        if call.lse is not None:
            call.lse[:, tokens] = lse.permute(1, 2, 0, 3).reshape(call.lse.shape[0], -1)
    elif queries.shape[3] == 1:  # a group's heads are the rows of one product
        mask = None if visible is None else visible[:, None]
        out = F.scaled_dot_product_attention(
            queries.flatten(2, 3), keys, values, attn_mask=mask, scale=call.softmax_scale
        ).unsqueeze(3)
    elif keys.dtype == torch.bfloat16 and not call.context_only:
        out = _bf16_attention(call, queries, keys, values, visible)
    else:  # one sequence: KV heads are the batch, and the heads of a group share keys
        keys, values = (x[0].unsqueeze(1).expand(-1, call.group, -1, -1) for x in (keys, values))
        out = F.scaled_dot_product_attention(
            queries[0], keys, values, attn_mask=visible[0], scale=call.softmax_scale
        )[None]
    call.out[tokens] = out.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


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


def _bf16_attention(
    call: AttentionCall,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Attend with fp32 scores and bf16 weights, faster than torch's own attention.

    Arguments as in ``_softmax_attention``. Each query sees a key.
    """
    scaled = queries.float().mul_(call.softmax_scale).flatten(2, 3)
    scores = (scaled @ keys.float().transpose(2, 3)).view(*queries.shape[:4], -1)
    scores += torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None, None]
    weights = torch.softmax(scores, -1).to(values.dtype)
    return (weights.flatten(2, 3) @ values).view(queries.shape)


def _softmax_attention(
    call: AttentionCall,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in fp32, with softcap, sinks and lse.

    Args:
        queries: [B, K, G, L, head_dim], K KV heads with G query heads each.
        keys, values: [B, K, S, head_dim].
        visible: [B, L, S]; None = all.

    Returns:
        (out like queries, natural-log lse [B, K, G, L]).
    """
    shape = queries.shape[:4]
    logits = queries.flatten(2, 3).float() @ keys.float().transpose(2, 3)
    logits = logits.view(*shape, keys.shape[2]) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if visible is not None:
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
