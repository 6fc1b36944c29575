"""``collapse_streams`` and ``expand_streams`` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.no_grad()
def collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``collapse_streams`` of checked arguments."""
    n = streams.shape[1]
    flat = streams.flatten(1).float()
    mixes = F.linear(F.rms_norm(flat, flat.shape[-1:], None, norm_eps), fn)
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    out = (pre[..., None] * streams).sum(dim=1).to(streams.dtype)
    if norm_weight is not None:
        weight = norm_weight.float()
        out = F.rms_norm(out.float(), out.shape[-1:], weight, norm_eps).to(out.dtype)
    if len(fn) == n:
        return out, None, None
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return out, post, comb


@torch.no_grad()
def expand(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """``expand_streams`` of checked arguments; z and both terms are rounded to the dtype of y."""
    if rows is not None and weights is not None:
        parts = rows.unflatten(0, weights.shape)
        total = y.float()
        # In the order of rows, which sum(dim=1) does not promise.
        for i in range(weights.shape[1]):
            total = total + parts[:, i] * weights[:, i : i + 1]
        y = total.to(y.dtype)
    post, comb = post.to(y.dtype), comb.to(y.dtype)
    return post[..., None] * y[:, None] + comb.transpose(1, 2) @ streams
