"""Oracle of ``gated_product``: the formula, spelled out."""

from __future__ import annotations

import math

import torch


def gated_product(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """[num_rows, width] of ``dtype``, the arithmetic's too.

    Arguments as in ``quire.kernels.gated_product``.
    """
    gate, up = gate.to(dtype), up.to(dtype)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if activation == "silu":
        active = gate * torch.sigmoid(gate * alpha)
    else:
        inner = (gate + gate * gate * gate * 0.044715) * math.sqrt(2 / math.pi)
        active = gate * (torch.tanh(inner) + 1.0) * 0.5
    return active * (up + up_offset)
