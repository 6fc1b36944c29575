"""``residual_norm`` for CPU tensors: plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.no_grad()
def residual_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    post_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """Sum and norm of checked arguments; shapes as in ``quire.kernels.residual_norm``.

    Returns:
        ``out``, None without a weight.
    """
    rows = x.float()
    if residual is not None:
        if post_weight is not None:
            rows = _norm(rows, post_weight, eps, offset)
        if residual.dtype == torch.float32:
            rows = residual.add_(rows)
            if scalar is not None:
                rows.mul_(scalar)
        else:
            rows = residual.float() + rows
            residual.copy_(rows if scalar is None else rows * scalar.float())
            rows = residual.float()
    if weight is None:
        return None
    rows = _norm(rows, weight, eps, offset)
    return rows.to(x.dtype) if out is None else out.copy_(rows)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    # The sum is taken in fp32: 1 + w in bf16 would round away small weights.
    weight = weight.float() + offset if offset else weight.float()
    return F.rms_norm(x, x.shape[-1:], weight, eps)
