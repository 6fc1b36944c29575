"""``write_latent`` in plain torch, fp32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..common.latent_pages import LatentPages


@torch.no_grad()
def write_latent(
    x: torch.Tensor,
    pages: LatentPages | None,
    slot_mapping: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
) -> None:
    """``write_latent`` of checked arguments."""
    if positions is not None and len(positions) < len(x):
        positions = positions.repeat_interleave(len(x) // len(positions))
    if slot_mapping is not None and positions is not None and out is None:
        positions = torch.where(slot_mapping >= 0, positions, -1)
    rows = norm_and_rotate(x, positions, cos_sin, norm_weight, eps)
    if pages is not None and slot_mapping is not None:
        pages.write(slot_mapping, rows)
    if out is not None:
        out.copy_(rows if pages is None else pages.seen(rows))


def norm_and_rotate(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """RMS norm, then interleaved RoPE of the trailing channels where positions are >= 0.

    Returns:
        [num_rows, dim] fp32.
    """
    rows = x.float()
    if norm_weight is not None:
        rows = F.rms_norm(rows, rows.shape[-1:], norm_weight.float(), eps)
    if positions is None or cos_sin is None or not (positions >= 0).any():
        return rows
    nope, rope = rows.tensor_split((rows.shape[1] - cos_sin.shape[1],), -1)
    cos, sin = cos_sin[positions.clamp(min=0)].chunk(2, -1)
    even, odd = rope[:, 0::2], rope[:, 1::2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    rotated = torch.where((positions >= 0)[:, None], rotated, rope)
    return torch.cat([nope, rotated], -1)
