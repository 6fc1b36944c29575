"""Gated pooling for CPU tensors: plain torch over all entries of a step at once, fp32 arithmetic.

Source: as ``triton_impl``.
"""

from __future__ import annotations

import torch

from ..common.checks import expect_ids
from ..latent_write.torch_impl import norm_and_rotate
from .call import CompressCall


@torch.no_grad()
def compress(call: CompressCall) -> None:
    """Compress checked arguments."""
    seq_lens, cu_seqlens_q, state, pages = call.seq_lens, call.cu_seqlens_q, call.state, call.pages
    ratio, overlap = call.ratio, call.overlap
    device, dim, ring, num_series = call.kv.device, pages.dim, state.shape[1], 1 + overlap
    q_lens = cu_seqlens_q.diff().long()
    context = seq_lens - q_lens
    seq = torch.repeat_interleave(torch.arange(len(seq_lens), device=device), q_lens)
    token = torch.arange(len(seq), device=device)
    position = token - cu_seqlens_q[seq] + context[seq]
    # The rows of tokens that exist, [rows, ...] from here on; those of a sequence stay neighbours.
    live = (position >= 0) & (call.state_index[seq] >= 0)
    seq, token, position = seq[live], token[live], position[live]
    index = call.state_index[seq].long()
    expect_ids("state_index", index, state.shape[0])
    step_kv = call.kv[token].float()
    step_gate = call.gate[token].float() + call.ape[position % ratio]

    slots = call.slot_mapping[token]
    closing = torch.nonzero(((position + 1) % ratio == 0) & (slots >= 0))  # [entries, 1]
    expect_ids("slot_mapping", slots[closing], pages.data.shape[0] * pages.storage_block_size)
    expect_ids("cos_sin", position[closing] + 1 - ratio, call.cos_sin.shape[0], "positions")
    pooled_slot = torch.arange(ratio * num_series, device=device)
    back = ratio * num_series - 1 - pooled_slot
    at = position[closing] - back  # [entries, pooled slots]
    new = at >= context[seq[closing]].clamp(min=0)
    seen = at >= 0
    series = pooled_slot // ratio if overlap else torch.zeros_like(pooled_slot)

    def pooled(step_rows: torch.Tensor, part: int) -> torch.Tensor:
        """The rows that each entry pools: [entries, pooled slots, dim]; anything where unseen."""
        step = step_rows.unflatten(1, (num_series, dim))
        step = step[torch.where(new, closing - back, 0), series]
        old = state[:, :, part].unflatten(2, (num_series, dim))
        old = old[torch.where(seen, index[closing], 0), torch.where(seen, at, 0) % ring, series]
        return torch.where(new[..., None], step, old)

    gates = pooled(step_gate, 1).masked_fill(~seen[..., None], -torch.inf)
    values = pooled(step_kv, 0).masked_fill(~seen[..., None], 0)
    entries = (torch.softmax(gates, 1) * values).sum(1)
    closing = closing[:, 0]
    start = position[closing] + 1 - ratio
    entries = norm_and_rotate(entries, start, call.cos_sin, call.norm_weight, call.eps)
    pages.write(slots[closing], entries)

    kept = seq_lens[seq] - position <= ring
    rows = torch.stack([step_kv[kept], step_gate[kept]], 1)
    state[index[kept], position[kept] % ring] = rows
