"""``compressed_attention`` for CPU tensors: plain torch over tokens and heads, fp32.

Reads lengths on the host, so under a GPU it synchronises; there it is asked for by name only.
Raises ValueError for ids of pages that there are not.

Source: as ``reference``.
"""

from __future__ import annotations

import torch

from ..common.checks import expect_ids
from .call import CompressedCall

# Rows named by ``topk_indices`` that are gathered at once.
MAX_GATHERED = 1 << 14
# Tokens at once, or a window of them: each scores all raw rows that any of them sees.
QUERY_BLOCK = 128


@torch.no_grad()
def attention(call: CompressedCall) -> torch.Tensor:
    """Compute one checked call; returns ``call.out``."""
    if call.slots:
        _attend_slots(call)
        return call.out
    assert call.cu_seqlens_q is not None and call.seq_lens is not None
    bounds = call.cu_seqlens_q.tolist()
    if call.cos_sin is not None:
        last = call.seq_lens[call.cu_seqlens_q.diff() > 0] - 1
        expect_ids("cos_sin", last[last >= 0], call.cos_sin.shape[0], "positions")
    chunk = max(QUERY_BLOCK, call.sliding_window)
    if call.topk_indices is not None:
        chunk = min(chunk, max(1, MAX_GATHERED // max(1, call.topk_indices.shape[1])))
    for s, seq_len in enumerate(call.seq_lens.tolist()):
        context = seq_len - (bounds[s + 1] - bounds[s])
        for first in range(bounds[s], bounds[s + 1], chunk):
            _attend_tokens(call, s, first, min(first + chunk, bounds[s + 1]), bounds[s], context)
    return call.out


def _attend_tokens(
    call: CompressedCall, s: int, first: int, last: int, start: int, context: int
) -> None:
    """Attend for the tokens [first, last) of sequence s.

    The first new token of the sequence is ``start``, at position ``context``.
    """
    device = call.q.device
    position = torch.arange(first, last, device=device) - start + context  # [L]
    assert call.cu_seqlens_q is not None
    written = context if call.kv is not None else context + int(call.cu_seqlens_q[s + 1]) - start
    low = max(0, context + first - start - call.sliding_window + 1, written - call.window_room)
    key = torch.arange(low, max(low, context + last - start), device=device)  # [S]
    rows = _raw_rows(call, s, key, start, context)
    age = position[:, None] - key
    keys, visible = [rows], [(age >= 0) & (age < call.sliding_window)]
    if call.compressed_pages is not None:
        rows, sees = _entry_rows(call, s, first, last, position)
        keys.append(rows)
        visible.append(sees)
    out = _softmax(call, first, last, keys, visible)
    if call.cos_sin is not None:
        out = _inverse_rope(out, call.cos_sin, position)
    call.out[first:last] = out.to(call.out.dtype)


def _raw_rows(
    call: CompressedCall, s: int, key: torch.Tensor, start: int, context: int
) -> torch.Tensor:
    """Raw rows of the positions ``key`` [S]: [S, head_dim] fp32."""
    size, width = call.window_pages.storage_block_size, max(1, call.window_table.shape[1])
    paged = key if call.kv is None else key[key < context]
    page = call.window_table[s, paged // size % width].long()
    expect_ids("window_table", page, call.window_pages.data.shape[0])
    rows = call.window_pages.read(page * size + paged % size)
    if call.kv is not None:
        new = key[key >= context]
        rows = torch.cat([rows, call.kv[start + new - context].float()])
    return rows


def _entry_rows(
    call: CompressedCall, s: int, first: int, last: int, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of some tokens, and who sees them.

    Returns:
        ([E, head_dim] rows, [L, E] bool); with top-k indices [L, topk, head_dim] and [L, topk].
    """
    assert call.compressed_pages is not None and call.compressed_table is not None
    assert call.compress_ratio is not None
    size = call.compressed_pages.storage_block_size
    visible = (position + 1).clamp(min=0) // call.compress_ratio  # [L]
    visible = visible.clamp(max=call.entry_room)
    if call.topk_indices is None:
        entry = torch.arange(int(visible[-1]), device=call.q.device)  # [E]
        live = entry < visible[:, None]
        known = torch.ones_like(entry, dtype=torch.bool)
    else:
        entry = call.topk_indices[first:last].long()  # [L, topk]
        live = (entry >= 0) & (entry < visible[:, None])
        if call.topk_lens is not None:
            rank = torch.arange(entry.shape[1], device=call.q.device)
            live = live & (rank < call.topk_lens[first:last, None])
        known = live
    entry = torch.where(known, entry, 0)
    page = torch.where(known, call.compressed_table[s, entry // size].long(), 0)
    expect_ids("compressed_table", page, call.compressed_pages.data.shape[0])
    return call.compressed_pages.read(torch.where(known, page * size + entry % size, -1)), live


def _attend_slots(call: CompressedCall) -> None:
    """Attend to lists of physical rows, some tokens at a time."""
    lists = [(call.window_pages, call.window_table, call.window_lens)]
    if call.compressed_pages is not None and call.topk_indices is not None:
        lists.append((call.compressed_pages, call.topk_indices, call.topk_lens))
    chunk = max(1, MAX_GATHERED // sum(slots.shape[1] for _, slots, _ in lists))
    for first in range(0, call.q.shape[0], chunk):
        last = min(first + chunk, call.q.shape[0])
        seq = torch.arange(first, last, device=call.q.device) // call.tokens_per_len
        keys, visible = [], []
        for pages, slots, lens in lists:
            slot = slots[first:last].long()
            live = slot >= 0
            if lens is not None:
                rank = torch.arange(slot.shape[1], device=slot.device)
                live = live & (rank < lens[seq, None])
            room = pages.data.shape[0] * pages.storage_block_size
            expect_ids("indices", torch.where(live, slot, 0), room, "rows")
            keys.append(pages.read(torch.where(live, slot, -1)))
            visible.append(live)
        out = _softmax(call, first, last, keys, visible)
        call.out[first:last] = out.to(call.out.dtype)
    if call.lse is not None:
        call.lse.masked_fill_(call.lse.isneginf(), torch.inf)


def _softmax(
    call: CompressedCall,
    first: int,
    last: int,
    keys: list[torch.Tensor],
    visible: list[torch.Tensor],
) -> torch.Tensor:
    """Attend for the tokens [first, last): fp32 rows [L, H, head_dim].

    Args:
        keys: [S, head_dim] or [L, S, head_dim] each; visible: [L, S] which of them are seen.
    """
    q = call.q[first:last].float()  # [L, H, head_dim]
    scores = [
        (q @ rows.mT * call.softmax_scale).masked_fill(~sees[:, None], -torch.inf)
        for rows, sees in zip(keys, visible, strict=True)
    ]
    logits = torch.cat(scores, -1)
    if call.lse is not None:
        call.lse[:, first:last] = torch.logsumexp(logits, -1).T  # [L, H]
    if not logits.shape[-1]:
        return torch.zeros_like(q)
    joint = logits
    if call.sinks is not None:
        joint = torch.cat([logits, call.sinks[None, :, None].expand(*logits.shape[:2], 1)], -1)
    # Not the exponential of a difference from the lse, whose own rounding would be in all weights;
    # nor torch.softmax, which adds a long row up term by term.
    weights = torch.exp(joint - joint.amax(-1, keepdim=True))
    weights = (weights / weights.sum(-1, keepdim=True))[..., : logits.shape[-1]]
    # A row that sees nothing is NaN after the softmax, and so is one with an infinite sink; their
    # weights are 0.
    weights = torch.where(logits.isneginf(), 0.0, weights)
    if call.sinks is not None:
        weights = weights.masked_fill(call.sinks.isposinf()[:, None], 0.0)
    parts = weights.split([sees.shape[-1] for sees in visible], -1)
    return sum((part @ rows for part, rows in zip(parts, keys, strict=True)), torch.zeros_like(q))


def _inverse_rope(out: torch.Tensor, cos_sin: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotate the trailing pairs (2i, 2i + 1) of rows [L, H, head_dim] fp32 by minus the angles of
    ``position`` [L]."""
    rope_dim = cos_sin.shape[1]
    # A padding row (fewer keys than new tokens) has no position; what it sees is nothing.
    known = (position >= 0)[:, None, None]
    if cos_sin.shape[0] == 0:
        return out
    cos, sin = cos_sin[position.clamp(min=0)].unsqueeze(1).chunk(2, -1)
    cos, sin = torch.where(known, cos, 1.0), torch.where(known, sin, 0.0)
    rope = out[..., -rope_dim:]
    even, odd = rope[..., 0::2], rope[..., 1::2]
    rotated = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
    return torch.cat([out[..., :-rope_dim], rotated], -1)
