"""``sample_tokens`` for CPU tensors: plain torch, with a sort where a row is filtered.

Source: as ``triton_impl``.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
    probs: torch.Tensor | None,
) -> torch.Tensor:
    """``sample_tokens`` of checked arguments. It reads which rows are drawn."""
    logits = logits.float()
    top, ids = logits.max(dim=-1)
    if temperature is not None:
        if probs is not None:
            probs.zero_().scatter_(1, ids[:, None], 1.0)
        rows = (temperature > 0).nonzero().squeeze(1)
        some = (logits, temperature, top_k, top_p, min_p, u)
        if len(rows) < len(ids):
            some = tuple(column[rows] for column in some)
        if len(rows):
            *some, u = some
            mass = probabilities(*some)
            ids = ids.index_copy(0, rows, draw(mass, u))
            if probs is not None:
                probs.index_copy_(0, rows, mass)
    # The largest is NaN where any logit is, +inf where any is, and -inf where all are.
    return ids.masked_fill_(top - top != 0, -1)


def probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """What the rows are drawn from: temperature, then top_k, top_p and min_p.

    Args:
        logits: [num_rows, vocab_size] fp32.
        temperature, top_k, top_p, min_p: [num_rows].

    Returns:
        [num_rows, vocab_size] fp32, rows that add up to 1.
    """
    top_k, top_p, min_p = top_k[:, None], top_p[:, None], min_p[:, None]
    # Largest logit 0 first: then no temperature overflows.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    if ((top_k > 0) | (top_p < 1)).any():
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        behind = (top_k > 0) & (rank >= top_k)
        ordered = ordered.masked_fill(behind, -torch.inf)
        mass = ordered.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        # The likeliest token always stays, and rounding of the sum must not cut a row that keeps
        # all.
        behind = (before >= top_p) & (rank > 0) & (top_p < 1)
        ordered = ordered.masked_fill(behind, -torch.inf)
        # Back to the order of ids: a draw must not depend on whether some other row needed a sort.
        logits = torch.empty_like(ordered).scatter_(1, order, ordered)
    kept = logits.softmax(dim=-1)
    if (min_p > 0).any():
        kept = kept.masked_fill(kept < min_p * kept.amax(dim=-1, keepdim=True), 0.0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
    return kept


def draw(mass: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draws one index a row by inversion.

    Args:
        mass: [num_rows, n] >= 0, each row with a positive sum (not necessarily 1).
        u: [num_rows] float64 in [0, 1).

    Returns:
        [num_rows] int64; never an index of mass 0. Of a row of NaN the last one.
    """
    total = mass.cumsum(dim=-1, dtype=torch.float64)
    last = total[:, -1:]
    # Rounding may make the product the whole sum, behind which there is nothing.
    goal = torch.minimum(u[:, None] * last, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(total, goal, right=True).squeeze(1).clamp_(max=mass.shape[1] - 1)
