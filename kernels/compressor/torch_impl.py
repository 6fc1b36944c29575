"""``compress`` in plain torch, over all entries of a step at once, fp32 arithmetic."""

from __future__ import annotations

import torch

from ..common.latent_pages import IndexPages, LatentPages
from ..latent_write.torch_impl import norm_and_rotate


@torch.no_grad()
def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    state_index: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    ratio: int,
    overlap: bool,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    pages: LatentPages | IndexPages,
    slot_mapping: torch.Tensor,
    max_seqlen_q: int,
) -> None:
    """``compress`` of checked arguments."""
    dim, ring, num_series = pages.dim, state.shape[1], 1 + overlap
    seq, token, position = live_tokens(state_index, seq_lens, cu_seqlens_q)
    index = state_index[seq].long()
    step_kv = kv[token].float()
    step_gate = gate[token].float() + ape[position % ratio]

    slots = slot_mapping[token]
    closing = torch.nonzero(((position + 1) % ratio == 0) & (slots >= 0))  # [entries, 1]
    pooled_slot = torch.arange(ratio * num_series, device=kv.device)
    back = ratio * num_series - 1 - pooled_slot
    at = position[closing] - back  # [entries, pooled slots]
    context = (seq_lens - cu_seqlens_q.diff()).clamp(min=0)
    new = at >= context[seq[closing]]
    seen = at >= 0
    series = pooled_slot // ratio if overlap else torch.zeros_like(pooled_slot)

    def pooled(step_rows: torch.Tensor, part: int) -> torch.Tensor:
        """Rows that each entry pools, [entries, pooled slots, dim]; anything where not ``seen``."""
        step = step_rows.unflatten(1, (num_series, dim))
        step = step[torch.where(new, closing - back, 0), series]
        old = state[:, :, part].unflatten(2, (num_series, dim))
        old = old[torch.where(seen, index[closing], 0), torch.where(seen, at, 0) % ring, series]
        return torch.where(new[..., None], step, old)

    gates = pooled(step_gate, 1).masked_fill(~seen[..., None], -torch.inf)
    values = pooled(step_kv, 0).masked_fill(~seen[..., None], 0)
    entries = (torch.softmax(gates, 1) * values).sum(1)
    closing = closing[:, 0]
    entries = norm_and_rotate(entries, position[closing] + 1 - ratio, cos_sin, norm_weight, eps)
    pages.write(slots[closing], entries)

    kept = seq_lens[seq] - position <= ring
    rows = torch.stack([step_kv[kept], step_gate[kept]], 1)
    state[index[kept], position[kept] % ring] = rows


def live_tokens(
    state_index: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sequence, row, position) of each new token that is not padding, in the order of rows."""
    device, q_lens = seq_lens.device, cu_seqlens_q.diff().long()
    seq = torch.repeat_interleave(torch.arange(len(seq_lens), device=device), q_lens)
    token = torch.arange(len(seq), device=device)
    position = token - cu_seqlens_q[seq] + (seq_lens - q_lens)[seq]
    live = (position >= 0) & (state_index[seq] >= 0)
    return seq[live], token[live], position[live]
