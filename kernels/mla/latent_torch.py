"""Norm, RoPE and the write of latent rows for CPU tensors: plain torch, fp32 arithmetic. Source: as ``latent_triton.py``."""

from __future__ import annotations

import torch

from quire.kernels.mla.latent import LatentCall


def write_latent(call: LatentCall) -> None:
    """Write what a checked call gives."""
    rows = norm_and_rotate(call.x, call.positions, call.cos_sin, call.norm_weight, call.eps)
    if call.pages is not None and call.slot_mapping is not None:
        call.pages.write(call.slot_mapping, rows)
    if call.out is not None:
        call.out.copy_(rows if call.pages is None else call.pages.seen(rows))


def norm_and_rotate(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """RMS norm, then interleaved RoPE on the trailing channels, each if given: [num_rows, dim] fp32."""
    rows = x.float()
    if norm_weight is not None:
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        rows = rows * scale * norm_weight.float()
    if positions is None or cos_sin is None:
        return rows
    nope, rope = rows.tensor_split((rows.shape[1] - cos_sin.shape[1],), -1)
    cos, sin = cos_sin[positions].chunk(2, -1)
    even, odd = rope[:, 0::2], rope[:, 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return torch.cat([nope, turned.flatten(-2)], -1)
