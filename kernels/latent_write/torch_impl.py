"""Norm, RoPE and the write of latent rows for CPU tensors: plain torch, fp32 arithmetic.

Source: as ``triton_impl``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..common.checks import expect_ids
from .call import LatentCall


@torch.no_grad()
def write_latent(call: LatentCall) -> None:
    """Write what a checked call gives."""
    positions = call.positions
    if positions is not None and len(positions) < len(call.x):
        positions = positions.repeat_interleave(len(call.x) // len(positions))
    if call.pages is not None and call.slot_mapping is not None:
        written = call.slot_mapping >= 0
        room = call.pages.data.shape[0] * call.pages.storage_block_size
        expect_ids("slot_mapping", call.slot_mapping[written], room)
        if call.out is None and positions is not None:
            # Rows that go nowhere may stand anywhere.
            positions = torch.where(written, positions, -1)
    rows = norm_and_rotate(call.x, positions, call.cos_sin, call.norm_weight, call.eps)
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
    """RMS norm, then interleaved RoPE on the trailing channels (not of positions below 0), each if
    given: [num_rows, dim] fp32."""
    rows = x.float()
    if norm_weight is not None:
        rows = F.rms_norm(rows, rows.shape[-1:], norm_weight.float(), eps)
    if positions is None or cos_sin is None:
        return rows
    nope, rope = rows.tensor_split((rows.shape[1] - cos_sin.shape[1],), -1)
    if positions.numel() == 0:
        return rows
    lowest, highest = (int(bound) for bound in positions.aminmax())
    if highest >= cos_sin.shape[0]:
        expect_ids("positions", positions[positions >= 0], cos_sin.shape[0], "positions")
    if highest < 0:
        return rows
    cos, sin = cos_sin[positions if lowest >= 0 else positions.clamp(min=0)].chunk(2, -1)
    if lowest < 0:
        stands = (positions >= 0)[:, None]
        cos, sin = torch.where(stands, cos, 1.0), torch.where(stands, sin, 0.0)
    even, odd = rope[:, 0::2], rope[:, 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return torch.cat([nope, turned.flatten(-2)], -1)
