"""Latent attention for CPU tensors: plain torch over tokens and heads, fp32."""

from __future__ import annotations

import torch

from .call import LatentCall, listed

# Rows named by lists that are gathered at once.
MAX_GATHERED = 1 << 14
# Tokens at once, or a window of them: each scores all raw rows that any of them sees.
QUERY_BLOCK = 128


@torch.no_grad()
def attend_in_torch(call: LatentCall) -> torch.Tensor:
    """Compute one checked call; returns ``call.out``."""
    if call.seq_lens is None or call.cu_seqlens_q is None:
        _attend_lists(call)
        return call.out
    bounds = call.cu_seqlens_q.tolist()
    chunk = max(QUERY_BLOCK, call.sliding_window or 0)
    if call.topk_indices is not None:
        chunk = min(chunk, max(1, MAX_GATHERED // max(1, call.topk_indices.shape[1])))
    for s, seq_len in enumerate(call.seq_lens.tolist()):
        for first in range(bounds[s], bounds[s + 1], chunk):
            last = min(first + chunk, bounds[s + 1])
            _attend_tokens(call, s, first, last, bounds[s], bounds[s + 1], seq_len)
    return call.out


def _attend_tokens(
    call: LatentCall, s: int, first: int, last: int, start: int, stop: int, seq_len: int
) -> None:
    """Attend for the tokens [first, last) of sequence s, whose new tokens are [start, stop)."""
    device, context = call.q.device, seq_len - (stop - start)
    position = torch.arange(first, last, device=device) - stop + seq_len  # [L]
    low, high = call.raw_range(first - stop, last - stop, seq_len, stop - start)
    key = torch.arange(low, high, device=device)  # [S]
    rows = call.pages.storage_block_size
    page = call.table[s, call.blocks(key // rows)].long()
    keys = call.pages.read(page * rows + key % rows)
    if call.kv is not None:
        oldest = 0 if call.sliding_window is None else int(position[0]) - call.sliding_window + 1
        new = torch.arange(max(0, context, oldest), max(0, context + last - start), device=device)
        key = torch.cat([key, new])
        keys = torch.cat([keys, call.kv[start + new - context].float()])
    sees = key <= position[:, None]
    if call.sliding_window is not None:
        sees &= key > position[:, None] - call.sliding_window
    sources = [(keys, sees)]
    if call.entries is not None:
        sources.append(_entry_rows(call, s, first, last, position))
    out = _softmax(call, first, last, sources)
    if call.cos_sin is not None:
        out = _inverse_rope(out, call.cos_sin, position)
    call.out[first:last] = out.to(call.out.dtype)


def _entry_rows(
    call: LatentCall, s: int, first: int, last: int, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of some tokens [E, head_dim], and their visibility [L, E]; with top-k indices
    [L, topk, head_dim] and [L, topk]."""
    assert call.entries is not None and call.entry_table is not None and call.ratio is not None
    rows = call.entries.storage_block_size
    visible = ((position + 1).clamp(min=0) // call.ratio).clamp(max=call.entry_room)  # [L]
    if call.topk_indices is None:
        entry = torch.arange(int(visible[-1]), device=call.q.device)  # [E]
        live = entry < visible[:, None]
    else:
        entry = call.topk_indices[first:last]  # [L, topk]
        lens = None if call.topk_lens is None else call.topk_lens[first:last]
        live = listed(entry, lens) & (entry < visible[:, None])
        entry = torch.where(live, entry, 0)
    slot = call.entry_table[s, entry // rows].long() * rows + entry % rows
    if call.topk_indices is not None:
        slot = torch.where(live, slot, -1)
    return call.entries.read(slot), live


def _attend_lists(call: LatentCall) -> None:
    """Attend to lists of flat indices, some tokens at a time."""
    chunk = max(1, MAX_GATHERED // call.most_entries)
    for first in range(0, call.q.shape[0], chunk):
        last = min(first + chunk, call.q.shape[0])
        sources = []
        for pages, slots, lens in call.lists_of_rows():
            live = listed(slots, lens, call.tokens_per_len)[first:last]
            rows = pages.read(torch.where(live, slots[first:last].long(), -1))
            sources.append((rows, live))
        call.out[first:last] = _softmax(call, first, last, sources).to(call.out.dtype)
    if call.lse is not None:
        call.lse.masked_fill_(call.lse.isneginf(), torch.inf)


def _softmax(
    call: LatentCall, first: int, last: int, sources: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Attend for the tokens [first, last) to sources, (rows [S, head_dim] or [L, S, head_dim],
    visibility [L, S]) each: fp32 rows [L, H, head_dim_v]."""
    q = call.q[first:last].float()  # [L, H, head_dim]
    scores, widths = [], []
    for rows, sees in sources:
        products = q @ rows.mT * call.softmax_scale
        scores.append(products.masked_fill(~sees[:, None], -torch.inf))
        widths.append(sees.shape[-1])
    logits = torch.cat(scores, -1)
    if call.lse is not None:
        call.lse[:, first:last] = torch.logsumexp(logits, -1).T  # [L, H]
    zeros = torch.zeros_like(q[..., : call.head_dim_v])
    if not logits.shape[-1]:
        return zeros
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
    parts = weights.split(widths, -1)
    for part, (rows, _) in zip(parts, sources, strict=True):
        zeros = zeros + part @ rows[..., : call.head_dim_v]
    return zeros


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
