"""``copy_overlap`` for CPU tensors: plain torch."""

from __future__ import annotations

import torch


@torch.no_grad()
def copy(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    pages: torch.Tensor,
    from_pages: torch.Tensor,
    state_index: torch.Tensor,
    state_rows: torch.Tensor,
    tokens: torch.Tensor,
    to_pages: torch.Tensor,
) -> None:
    """Copies of checked arguments."""
    _, ratio, _, width = pages.shape
    state[..., :width][state_index[:, None], state_rows] = pages[from_pages]
    kv, gate = kv[tokens, :width], gate[tokens, :width]
    gate = (gate.unflatten(0, (-1, ratio)) + ape[:, :width]).flatten(0, 1)
    row = torch.arange(ratio, device=kv.device).repeat(len(tokens) // ratio)
    pages[to_pages, row] = torch.stack([kv, gate], dim=1)
