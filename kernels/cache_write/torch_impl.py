"""``write_kv`` for CPU tensors: plain torch."""

from __future__ import annotations

import torch

from ..common import e4m3
from ..common.checks import expect_ids


@torch.no_grad()
def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
) -> None:
    """Write rows to pages by slot; shapes as in ``quire.kernels.write_kv``."""
    rows = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slots = slot_mapping[rows]
    block_size = k_pages.shape[1]
    expect_ids("slot_mapping", slots, k_pages.shape[0] * block_size)
    page, row = slots // block_size, slots % block_size
    for new, pages, scale in ((k[rows], k_pages, k_scale), (v[rows], v_pages, v_scale)):
        if scale is None:
            pages[page, row] = new
        elif isinstance(scale, torch.Tensor) and scale.dim() == 3:
            values, row_scales = e4m3.quantize(new)
            # Torch does not index e4m3 tensors everywhere; their bytes it does.
            pages.view(torch.uint8)[page, row] = values.view(torch.uint8)
            scale[page, row] = row_scales
        else:
            values, _ = e4m3.quantize(new, scale)
            pages.view(torch.uint8)[page, row] = values.view(torch.uint8)
