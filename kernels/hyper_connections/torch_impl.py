"""Hyper-connections for CPU tensors: plain torch.

Source: as ``triton_impl``.
"""

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
    return out, post, sinkhorn(logits, iterations, eps)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Matrices with rows and columns that sum to about 1.

    A softmax of the rows, then columns and rows normalized in turn.

    Tokens are the last dimension while it works, as they are many and n is 4. The matrices have one
    more row and column of eps, so that the sums they are divided by include it.

    Args:
        logits: [num_tokens, n, n] fp32.
        iterations: column normalizations; there is one row normalization less, and columns come
            last.

    Returns:
        [num_tokens, n, n].
    """
    num_tokens, n, _ = logits.shape
    padded = logits.new_full((n + 1, n + 1, num_tokens), eps)
    matrix, rows, columns = padded[:n, :n], padded[:n], padded[:, :n]
    torch.add(logits.softmax(dim=-1).permute(1, 2, 0), eps, out=matrix)
    matrix.div_(columns.sum(dim=0))
    for _ in range(iterations - 1):
        matrix.div_(rows.sum(dim=1, keepdim=True))
        matrix.div_(columns.sum(dim=0))
    return matrix.permute(2, 0, 1).contiguous()  # else a batched product takes it matrix by matrix


@torch.no_grad()
def expand(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """``expand_streams`` of checked arguments; what is written, and both of its terms, are rounded to
    the dtype of y."""
    if rows is not None and weights is not None:
        parts = rows.unflatten(0, weights.shape)
        total = y.float()
        # not sum(dim=1): its order of additions is torch's business
        for i in range(weights.shape[1]):
            total = total + parts[:, i] * weights[:, i : i + 1]
        y = total.to(y.dtype)
    post, comb = post.to(y.dtype), comb.to(y.dtype)
    return post[..., None] * y[:, None] + comb.transpose(1, 2) @ streams
