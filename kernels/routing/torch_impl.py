"""Routing for CPU tensors: plain torch.

Source: as ``triton_impl``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.no_grad()
def route(
    logits: torch.Tensor,
    top_k: int,
    score: str,
    scale: float,
    logits_factor: float,
    logits_bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    token_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route_tokens`` of checked arguments."""
    if score == "softmax":
        z = logits if logits_factor == 1 else logits * logits_factor
        z = z if logits_bias is None else z + logits_bias.float()
        top, ids = z.topk(top_k, dim=-1)
        weights = top.softmax(dim=-1)
        if expert_scale is not None:
            weights = weights * expert_scale.float()[ids]
        return ids, weights if scale == 1 else weights * scale
    scores = F.softplus(logits).sqrt()
    if table is not None:
        ids = table[token_ids]
    else:
        ids = (scores if bias is None else scores + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scale


@torch.no_grad()
def combine(rows: torch.Tensor, weights: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
    """``combine_experts`` of checked arguments."""
    y = rows.unflatten(0, weights.shape)
    out = y[:, 0].float() * weights[:, :1].float()
    # not sum(dim=1): its order of additions is torch's business
    for i in range(1, weights.shape[1]):
        out += y[:, i].float() * weights[:, i : i + 1].float()
    out = out.to(rows.dtype)
    return out if addend is None else out + addend
