"""Paged attention in plain torch: gather the visible pages, then torch's own products.

Sequences with one new token are one padded batch. Every other sequence is a batch of its own, so
that the results of a prefill chunk depend on that chunk alone. Queries go in blocks, which leave
out keys that none of them sees. Lengths and page ids are read on the host and checked.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from ..common import e4m3
from ..common.checks import expect_ids, expect_ring, once_a_step, read_batch

if TYPE_CHECKING:
    from .api import AttentionCall

# Keys gathered at once for the batch of one-token sequences, so that a long batch does not copy the
# whole pool.
MAX_GATHERED_KEYS = 1 << 17
QUERY_BLOCK = 64
Tokens = slice | torch.Tensor


class QueryBlock(NamedTuple):
    """L new tokens of each of B sequences.

    Attributes:
        tokens: the B * L tokens.
        keys: of the keys that the sequences read, those that these tokens see.
        hidden: for n of these keys each, [B, 1, 1, L, n] fp32: -inf where a token does not see
            them, else 0. The tokens see all other keys.
        empty: [B] sequences that see no key; None: there are none.
    """

    tokens: Tokens
    keys: slice
    hidden: list[tuple[slice, torch.Tensor]]
    empty: torch.Tensor | None


class Batch(NamedTuple):
    """Keys that B sequences read, S each.

    Attributes:
        padding: tokens of negative positions.
        tokens: all other tokens.
        page: [B, n] int64, the pages to gather; page 0 stands in where none is to be read. n is 0
            for a chunk that has all its keys in new rows.
        new: [num_tokens] int64, of all gathered rows those that are the new tokens'.
        unseen: [m] int64, of all gathered rows those that the queries do not see; None = none of
            the rows that are used.
        rows: of the n * block_size gathered rows of a sequence, the S that are used.
    """

    padding: slice
    tokens: Tokens
    page: torch.Tensor
    new: torch.Tensor
    unseen: torch.Tensor | None
    rows: slice
    blocks: list[QueryBlock]


@torch.no_grad()
def attend_in_torch(call: AttentionCall) -> torch.Tensor:
    """Compute one checked attention call; returns ``call.out``."""
    num_pages, block_size = call.k_pages.shape[:2]
    batches = once_a_step(
        _reads, call.block_table, call.seq_lens, call.cu_seqlens_q, call.q.shape[0], num_pages,
        block_size, call.sliding_window, call.paged_context, call.context_only,
    )  # fmt: skip
    for batch in batches:
        if batch.padding.stop > batch.padding.start:
            call.out[batch.padding] = 0
            if call.lse is not None:
                call.lse[:, batch.padding] = -torch.inf
        keys = _rows(call.k_pages, call.k_scale, call.k, batch)
        values = _rows(call.v_pages, call.v_scale, call.v, batch)
        if keys.dtype == torch.float16:  # on a CPU torch multiplies it many times as slowly as fp32
            keys, values = keys.float(), values.float()
        for block in batch.blocks:
            _attend(call, block, keys[:, :, block.keys], values[:, :, block.keys])
    return call.out


def _reads(
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, num_tokens: int,
    num_pages: int, block_size: int, window: int | None, paged_context: bool, context_only: bool,
) -> list[Batch]:  # fmt: skip
    """Read and check lengths and page ids."""
    lengths, bounds = read_batch(seq_lens, cu_seqlens_q, num_tokens)
    width, device = block_table.shape[1], seq_lens.device
    if window is not None:
        expect_ring(width, block_size, window, lengths, bounds, paged_context)

    def pages(sequences: torch.Tensor, block: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """[B, n] pages of blocks [B, n] of B sequences that begin before ``end`` [B, 1]."""
        # Of a linear table that is too short the last entry stands for all blocks behind it.
        entry = block.clamp(max=width - 1) if window is None else block % width
        # Other entries of the table may hold anything.
        read = block * block_size < end
        page = torch.where(read, block_table[sequences].gather(1, entry), 0).long()
        expect_ids("block_table", page, num_pages)
        return page

    def one_token_each(sequences: list[int]) -> Batch:
        index = torch.tensor(sequences, device=device)
        tokens: Tokens = cu_seqlens_q[index].long()
        first_token, last_token = bounds[sequences[0]], bounds[sequences[-1] + 1]
        if last_token - first_token == len(sequences) == sequences[-1] + 1 - sequences[0]:
            tokens = slice(first_token, last_token)
        length = seq_lens[index].long()[:, None]
        low = torch.zeros_like(length) if window is None else (length - window).clamp(min=0)
        first, end = low // block_size, length - int(context_only)
        num_blocks = max(1, int((-(-length // block_size) - first).max()))
        block = first + torch.arange(num_blocks, device=device)
        paged_end = length - int(paged_context)
        page = pages(index, block, torch.where(low < paged_end, paged_end, 0))
        begin = first * block_size
        row = torch.arange(len(sequences), device=device)[:, None] * num_blocks * block_size
        new = row + (length - 1 - begin).clamp(min=0)
        position = begin + torch.arange(num_blocks * block_size, device=device)
        visible = (low <= position) & (position < end)
        start, stop = int((low - begin).min()), int((end - begin).max())
        rows = slice(start, max(start + 1, stop))
        seen = visible[:, None, rows]
        masks, unseen, empty = [], None, None
        if not seen.all():
            masks = [(slice(None), _hidden(~seen))]
            unseen = torch.nonzero(~visible.flatten())[:, 0]
            empty = ~seen.any(2)[:, 0]
        queries = QueryBlock(tokens, slice(None), masks, empty)
        return Batch(slice(0, 0), tokens, page, new[:, 0], unseen, rows, [queries])

    def chunk(s: int) -> Batch:
        start, stop = bounds[s], bounds[s + 1]
        first = min(stop, max(start, stop - lengths[s]))
        context = max(0, lengths[s] - (stop - start))
        low = _lowest(window, context)
        end = context if context_only else max(0, lengths[s])
        first_block = low // block_size
        begin = first_block * block_size
        paged_end = context if paged_context else end
        stop_block = -(-end // block_size) if low < paged_end else first_block
        block = torch.arange(first_block, stop_block, device=device)
        sequence = torch.tensor([s], device=device)
        page = pages(sequence, block[None], torch.tensor([[paged_end]], device=device))
        new = torch.arange(context - begin, context - begin + stop - first, device=device)
        blocks = [
            query_block(token, min(stop, token + QUERY_BLOCK), context - first, low)
            for token in range(first, stop, QUERY_BLOCK)
        ]
        rows = slice(low - begin, max(low, end) - begin)
        return Batch(slice(start, first), slice(first, stop), page, new, None, rows, blocks)

    def query_block(start: int, stop: int, offset: int, low: int) -> QueryBlock:
        """Tokens [start, stop) of a sequence, at positions ``offset`` later; its keys start at
        ``low``."""
        first, end = start + offset, stop + offset  # positions
        lowest = _lowest(window, first)
        query = torch.arange(first, end, device=device)[:, None]
        masks = []
        if not context_only and stop - start > 1:
            key = torch.arange(first, end, device=device)
            masks.append((slice(first - lowest, end - lowest), _hidden(key > query)))
        if window is not None and end - lowest > window:
            # Of the first keys, later tokens of the block do not see all.
            key = torch.arange(lowest, end - window, device=device)
            masks.append((slice(0, end - window - lowest), _hidden(query - key >= window)))
        return QueryBlock(slice(start, stop), slice(lowest - low, end - low), masks, None)

    single, longer = [], []
    for s, (first, last) in enumerate(pairwise(bounds)):
        if last - first == 1:
            single.append(s)
        elif last > first:
            longer.append(s)
    most = max(
        1, MAX_GATHERED_KEYS // max(1, min(window or MAX_GATHERED_KEYS, max(lengths, default=1)))
    )
    batches = []
    for start in range(0, len(single), most):
        batches.append(one_token_each(single[start : start + most]))
    return batches + list(map(chunk, longer))


@torch.no_grad()
def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Shapes as in ``quire.kernels.merge_partials``."""
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


def _lowest(window: int | None, context: int) -> int:
    """Lowest position that a query behind ``context`` tokens sees."""
    return 0 if window is None else max(0, context - window + 1)


def _hidden(mask: torch.Tensor) -> torch.Tensor:
    """[B, 1, 1, L, n]: -inf where a mask [L, n] or [B, L, n] is true, else 0. On a CPU an addition
    of it takes a fraction of the time of a fill by the mask."""
    mask = mask.view(-1, 1, 1, *mask.shape[-2:])
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(mask, -torch.inf)


def _rows(
    pages: torch.Tensor,
    scale: float | torch.Tensor | None,
    new: torch.Tensor | None,
    batch: Batch,
) -> torch.Tensor:
    """Keys or values of a batch, [B, num_kv_heads, S, head_dim]; those of e4m3 pages as fp32."""
    if new is not None and not batch.page.numel():
        rows = new[batch.tokens].to(new.dtype if scale is None else torch.float32)
        return rows.transpose(0, 1)[None]
    page = batch.page.flatten()
    if scale is None:
        rows = pages.index_select(0, page)  # several times as fast as an index on a CPU
    else:
        values = pages.view(torch.uint8).index_select(0, page).view(pages.dtype)
        is_of_rows = isinstance(scale, torch.Tensor) and scale.dim() == 3
        rows = e4m3.dequantize(values, scale[page] if is_of_rows else scale)
    rows = rows.unflatten(0, batch.page.shape)
    flat = rows.flatten(0, 2)
    if new is not None:
        flat.index_copy_(0, batch.new, new[batch.tokens].to(rows.dtype))
    if batch.unseen is not None:  # rows of others must not turn a weight of 0 into NaN
        flat.index_fill_(0, batch.unseen, 0)
    return rows.flatten(1, 2)[:, batch.rows].transpose(1, 2)


def _attend(
    call: AttentionCall, block: QueryBlock, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Attend for a block of queries with fp32 scores, and weights in the dtype of the values.

    keys, values: [B, num_kv_heads, S, head_dim].
    """
    batch, num_kv_heads, _, head_dim = keys.shape
    queries = call.q[block.tokens].to(keys.dtype)
    group = call.q.shape[1] // num_kv_heads
    queries = queries.view(batch, -1, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    shape = queries.shape[:4]
    plain = call.softcap is None and call.sinks is None and call.lse is None
    if plain and shape[3] == 1:  # a group's heads are the rows of one product
        mask = block.hidden[0][1][:, :, 0].to(queries.dtype) if block.hidden else None
        out = F.scaled_dot_product_attention(
            queries[:, :, :, 0], keys, values, attn_mask=mask, scale=call.softmax_scale
        )
        call.out[block.tokens] = out.flatten(1, 2).to(call.out.dtype)
        return
    # Products and sums of a chunk: on a CPU faster than torch's own attention.
    scaled = queries.flatten(2, 3).float() * call.softmax_scale
    logits = (scaled @ keys.float().mT).view(*shape, -1)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    for columns, hidden in block.hidden:
        logits[..., columns] += hidden
    if call.lse is not None:
        lse = torch.logsumexp(logits, -1).permute(1, 2, 0, 3)
        call.lse[:, block.tokens] = lse.reshape(call.lse.shape[0], -1)
    if call.sinks is None:
        weights = torch.softmax(logits, -1)
    else:
        sinks = call.sinks.view(1, num_kv_heads, group, 1, 1)
        weights = torch.softmax(torch.cat([logits, sinks.expand(*shape, 1)], -1), -1)[..., :-1]
        weights = weights.masked_fill(torch.isposinf(sinks), 0.0)  # else NaN
    if block.empty is not None:  # else NaN
        weights = weights.masked_fill(block.empty.view(-1, 1, 1, 1, 1), 0.0)
    out = (weights.to(values.dtype).flatten(2, 3) @ values).view(queries.shape)
    out = out.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    call.out[block.tokens] = out.to(call.out.dtype)
