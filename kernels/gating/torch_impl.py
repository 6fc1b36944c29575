"""``gated_product`` for CPU tensors: plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.no_grad()
def gated_product(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The product of checked arguments; shapes as in ``quire.kernels.gated_product``."""
    dtype = gate.dtype
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "gelu_tanh":
        active = F.gelu(gate, approximate="tanh")
    elif alpha == 1:
        active = F.silu(gate)
    else:
        active = torch.sigmoid(alpha * gate).mul_(gate)
    made = active.mul_(up + up_offset if up_offset else up).to(dtype)
    return made if out is None else out.copy_(made)
