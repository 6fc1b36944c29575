"""Paged attention for CPU tensors: gather the visible pages, then torch's own products.

Sequences with one new token are one padded batch. Every other sequence is a batch of its own, so
that the results of a prefill chunk depend on that chunk alone. Queries go in blocks, which leave out
keys that none of them sees. Lengths and page ids are read on the host and checked.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from ..common import e4m3
from ..common.checks import expect_ids, expect_lengths, expect_offsets
from ..common.in_torch import once_a_step, without_grad

if TYPE_CHECKING:
    from .api import AttentionCall

# Keys gathered at once for the batch of one-token sequences, so that a long batch does not copy the
# whole pool.
MAX_GATHERED_KEYS = 1 << 17
QUERY_BLOCK = 64


class Batch(NamedTuple):
    """Rows of the pages that B sequences of one new token each read: S rows each.

    Attributes:
        tokens: the B tokens.
        page: [B, n] int64, the pages to gather; page 0 stands in where none is to be read.
        new: [B] int64, of all gathered rows those that are the new tokens'.
        unseen: [m] int64, of all gathered rows those that the queries do not see; None = none of
            the rows that are used.
        rows: of the n * block_size gathered rows of a sequence, the S that are used.
        visible: [B, 1, S]; None = all.
    """

    tokens: slice | torch.Tensor
    page: torch.Tensor
    new: torch.Tensor
    unseen: torch.Tensor | None
    rows: slice
    visible: torch.Tensor | None


class Chunk(NamedTuple):
    """Rows of the pages that the L new tokens of one sequence read.

    Attributes:
        padding: tokens of negative positions.
        tokens: the L tokens.
        context: tokens before them.
        low: lowest position that they see.
        page: [1, n] int64, the pages to gather.
        rows: of the n * block_size gathered rows, those from ``low`` on.
    """

    padding: slice
    tokens: slice
    context: int
    low: int
    page: torch.Tensor
    rows: slice


@without_grad
def attend_in_torch(call: AttentionCall) -> torch.Tensor:
    """Compute one checked attention call; returns ``call.out``."""
    num_pages, block_size = call.k_pages.shape[:2]
    batches, chunks = once_a_step(
        _reads, call.block_table, call.seq_lens, call.cu_seqlens_q, call.q.shape[0], num_pages,
        block_size, call.sliding_window, call.paged_context, call.context_only,
    )  # fmt: skip
    for batch in batches:
        _attend_batch(call, batch)
    for chunk in chunks:
        _attend_chunk(call, chunk)
    return call.out


def _reads(
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, num_tokens: int,
    num_pages: int, block_size: int, window: int | None, paged_context: bool, context_only: bool,
) -> tuple[list[Batch], list[Chunk]]:  # fmt: skip
    """Read and check lengths and page ids.

    ValueError as in ``paged_attention``.
    """
    lengths, bounds = seq_lens.tolist(), cu_seqlens_q.tolist()
    expect_lengths("seq_lens", lengths)
    expect_offsets("cu_seqlens_q", bounds, num_tokens)
    q_lens = [last - first for first, last in pairwise(bounds)]
    width = block_table.shape[1]

    def pages(sequences: torch.Tensor, block: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """[B, n] pages of blocks [B, n] of B sequences that begin before ``end`` [B, 1]."""
        # Of a linear table that is too short the last entry stands for all blocks behind it.
        entry = block.clamp(max=width - 1) if window is None else block % width
        # Other entries of the table may hold anything.
        read = block * block_size < end
        page = torch.where(read, block_table[sequences].gather(1, entry), 0).long()
        expect_ids("block_table", page, num_pages)
        return page

    def batch(sequences: list[int]) -> Batch:
        index = torch.tensor(sequences)
        tokens: slice | torch.Tensor = cu_seqlens_q[index].long()
        first_token, last_token = bounds[sequences[0]], bounds[sequences[-1] + 1]
        if last_token - first_token == len(sequences) == sequences[-1] + 1 - sequences[0]:
            tokens = slice(first_token, last_token)
        length = seq_lens[index].long()[:, None]
        low = torch.zeros_like(length) if window is None else (length - window).clamp(min=0)
        first, end = low // block_size, length - int(context_only)
        num_blocks = max(1, int((-(-length // block_size) - first).max()))
        block = first + torch.arange(num_blocks)
        paged_end = length - int(paged_context)
        page = pages(index, block, torch.where(low < paged_end, paged_end, 0))
        begin = first * block_size
        row = torch.arange(len(sequences))[:, None] * num_blocks * block_size
        new = row + (length - 1 - begin).clamp(min=0)
        position = begin + torch.arange(num_blocks * block_size)
        visible = (low <= position) & (position < end)
        start, stop = int((low - begin).min()), int((end - begin).max())
        rows = slice(start, max(start + 1, stop))
        seen = visible[:, None, rows]
        if seen.all():
            return Batch(tokens, page, new[:, 0], None, rows, None)
        unseen = torch.nonzero(~visible.flatten())[:, 0]
        return Batch(tokens, page, new[:, 0], unseen, rows, seen)

    def chunk(s: int) -> Chunk:
        start, stop = bounds[s], bounds[s + 1]
        first = min(stop, max(start, stop - lengths[s]))
        context = max(0, lengths[s] - (stop - start))
        low = _lowest(window, context)
        end = max(low, context if paged_context else lengths[s])
        first_block = low // block_size
        block = torch.arange(first_block, -(-end // block_size) if end > low else first_block)
        page = pages(torch.tensor([s]), block[None], torch.tensor([[end]]))
        rows = slice(low % block_size, low % block_size + end - low)
        return Chunk(slice(start, first), slice(first, stop), context, low, page, rows)

    single = [s for s, q_len in enumerate(q_lens) if q_len == 1]
    most = max(
        1, MAX_GATHERED_KEYS // max(1, min(window or MAX_GATHERED_KEYS, max(lengths, default=1)))
    )
    batches = [batch(single[start : start + most]) for start in range(0, len(single), most)]
    return batches, [chunk(s) for s, q_len in enumerate(q_lens) if q_len > 1]


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


def _attend_chunk(call: AttentionCall, chunk: Chunk) -> None:
    """Attend for the L new tokens of one sequence."""
    if chunk.padding.stop > chunk.padding.start:
        call.out[chunk.padding] = 0
        if call.lse is not None:
            call.lse[:, chunk.padding] = -torch.inf
    tokens, low = chunk.tokens, chunk.low
    keys = _chunk_rows(call.k_pages, call.k_scale, call.k, chunk)
    values = _chunk_rows(call.v_pages, call.v_scale, call.v, chunk)
    queries = _queries(call, tokens, keys)
    for start in range(0, tokens.stop - tokens.start, QUERY_BLOCK):
        block = slice(start, min(tokens.stop - tokens.start, start + QUERY_BLOCK))
        first, stop = chunk.context + start, chunk.context + block.stop  # positions
        lowest = _lowest(call.sliding_window, first)
        seen = slice(lowest - low, stop - low)
        given = queries[:, :, :, block], keys[:, :, seen], values[:, :, seen]
        rows = slice(tokens.start + start, tokens.start + block.stop)
        if call.is_plain and not call.context_only:
            _attend_plainly(call, rows, *given, lowest, first)
            continue
        query = torch.arange(first, stop)[:, None]
        key = torch.arange(lowest, lowest + given[1].shape[2])
        visible = key <= query
        if call.sliding_window is not None:
            visible &= query - key < call.sliding_window
        _attend(call, rows, *given, visible[None])


def _chunk_rows(
    pages: torch.Tensor,
    scale: float | torch.Tensor | None,
    new: torch.Tensor | None,
    chunk: Chunk,
) -> torch.Tensor:
    """Keys or values of a chunk, [1, num_kv_heads, S, head_dim]."""
    if new is not None and not chunk.page.numel():
        rows = new[chunk.tokens] if scale is None else new[chunk.tokens].float()
    else:
        rows = _pages(pages, scale, chunk.page).flatten(0, 2)[chunk.rows]
        if new is not None:
            rows = torch.cat([rows, new[chunk.tokens].to(rows.dtype)])
    return rows.transpose(0, 1)[None]


def _attend_batch(call: AttentionCall, batch: Batch) -> None:
    """Attend for B sequences of one new token."""
    keys = _batch_rows(call.k_pages, call.k_scale, call.k, batch)
    values = _batch_rows(call.v_pages, call.v_scale, call.v, batch)
    queries = _queries(call, batch.tokens, keys)
    if not call.is_plain:
        return _attend(call, batch.tokens, queries, keys, values, batch.visible)
    mask = None if batch.visible is None else batch.visible[:, None]
    out = F.scaled_dot_product_attention(  # a group's heads are the rows of one product
        queries[:, :, :, 0], keys, values, attn_mask=mask, scale=call.softmax_scale
    )
    call.out[batch.tokens] = out.flatten(1, 2)
    return None


def _batch_rows(
    pages: torch.Tensor,
    scale: float | torch.Tensor | None,
    new: torch.Tensor | None,
    batch: Batch,
) -> torch.Tensor:
    """Keys or values of a batch, [B, num_kv_heads, S, head_dim]."""
    rows = _pages(pages, scale, batch.page).flatten(0, 2)
    if new is not None:
        rows.index_copy_(0, batch.new, new[batch.tokens].to(rows.dtype))
    if batch.unseen is not None:  # rows of others must not turn a weight of 0 into NaN
        rows.index_fill_(0, batch.unseen, 0)
    rows = rows.view(batch.page.shape[0], -1, *rows.shape[1:])
    return rows[:, batch.rows].transpose(1, 2)


def _lowest(window: int | None, context: int) -> int:
    """Lowest position that a query behind ``context`` tokens sees."""
    return 0 if window is None else max(0, context - window + 1)


def _queries(call: AttentionCall, tokens: slice | torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Queries of L new tokens of each of B sequences: [B, num_kv_heads, group, L, head_dim].

    keys: [B, num_kv_heads, S, head_dim].
    """
    batch, num_kv_heads, _, head_dim = keys.shape
    queries = call.q[tokens].to(keys.dtype)
    queries = queries.view(batch, -1, num_kv_heads, call.group, head_dim)
    return queries.permute(0, 2, 3, 1, 4)


def _pages(
    pages: torch.Tensor, scale: float | torch.Tensor | None, page: torch.Tensor
) -> torch.Tensor:
    """Pages [..., block_size, num_kv_heads, head_dim] by id [...]; those of e4m3 as fp32."""
    # Several times as fast as an index on a CPU.
    if scale is None:
        return pages.index_select(0, page.flatten()).view(*page.shape, *pages.shape[1:])
    values = pages.view(torch.uint8).index_select(0, page.flatten()).unflatten(0, page.shape)
    if isinstance(scale, torch.Tensor) and scale.dim() == 3:
        scale = scale[page]
    return e4m3.dequantize(values.view(pages.dtype), scale)


def _attend_plainly(
    call: AttentionCall,
    tokens: slice,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lowest: int,
    first: int,
) -> None:
    """Attend with fp32 scores and weights in the dtype of the values: on a CPU faster than torch's
    own attention of a chunk.

    Args:
        tokens: the L tokens of one sequence.
        queries, keys, values: as in ``_attend``; the last L keys are those of the tokens.
        lowest, first: positions of the first key, and of the first token.
    """
    (num_kv_heads, group, num_tokens, _), window = queries.shape[1:], call.sliding_window
    scaled = queries[0].flatten(1, 2).float() * call.softmax_scale
    scores = torch.bmm(scaled, keys[0].float().mT).view(num_kv_heads, group, num_tokens, -1)
    # Sums: on a CPU torch fills by a mask that is broadcast several times slower.
    scores[..., -num_tokens:] += torch.full((num_tokens, num_tokens), -torch.inf).triu_(1)
    if window is not None and first + num_tokens - lowest > window:
        # Of the first keys, later tokens of the chunk do not see all.
        key = lowest + torch.arange(min(num_tokens, scores.shape[-1]))
        gone = key <= first - window + torch.arange(num_tokens)[:, None]
        scores[..., : len(key)] += torch.zeros(gone.shape).masked_fill_(gone, -torch.inf)
    weights = torch.softmax(scores, -1).to(values.dtype)
    out = torch.bmm(weights.flatten(1, 2), values[0]).view(num_kv_heads * group, num_tokens, -1)
    call.out[tokens] = out.transpose(0, 1)


def _attend(
    call: AttentionCall,
    tokens: slice | torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
) -> None:
    """Attend in fp32, with softcap, sinks and lse.

    Args:
        tokens: the B * L tokens.
        queries: [B, K, G, L, head_dim], K KV heads with G query heads each.
        keys, values: [B, K, S, head_dim].
        visible: [B, L, S]; None = all.
    """
    shape = queries.shape[:4]
    logits = queries.flatten(2, 3).float() @ keys.float().transpose(2, 3)
    logits = logits.view(*shape, keys.shape[2]) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    if call.lse is not None:
        lse = torch.logsumexp(logits, -1).permute(1, 2, 0, 3)
        call.lse[:, tokens] = lse.reshape(call.lse.shape[0], -1)
    joint = logits
    if call.sinks is not None:
        sinks = call.sinks.view(1, shape[1], call.group, 1, 1)
        joint = torch.cat([logits, sinks.expand(*shape, 1)], -1)
    weights = torch.softmax(joint, -1)[..., : logits.shape[-1]]
    # A row that sees nothing, or has an infinite sink, is NaN after the softmax; its weights are 0.
    weights = torch.where(torch.isneginf(logits), 0.0, weights)
    if call.sinks is not None:
        weights = weights.masked_fill(torch.isposinf(sinks), 0.0)
    out = (weights.flatten(2, 3) @ values.float()).view(queries.shape)
    call.out[tokens] = out.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
