"""Oracle of ``gated_product``: the formula, spelled out."""

import math

import torch


def gated_product(gate, up, *, activation, limit=None, alpha=1.0, up_offset=0.0):
    """[num_rows, width] float64; arguments as in ``quire.kernels.gated_product``."""
    gate, up = gate.double(), up.double()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if activation == "silu":
        active = gate * torch.sigmoid(gate * alpha)
    else:
        inner = (gate + gate * gate * gate * 0.044715) * math.sqrt(2 / math.pi)
        active = gate * (torch.tanh(inner) + 1.0) * 0.5
    return active * (up + up_offset)
