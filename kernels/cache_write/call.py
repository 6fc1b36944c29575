"""The checks of one call of ``write_kv``."""

from __future__ import annotations

import torch

from ..common.checks import MODEL_DTYPES, check_pages, check_scales, expect_tensor


def check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
) -> None:
    """Check the arguments of ``quire.kernels.write_kv``, which says what they are and what is
    raised."""
    expect_tensor("k", k, (None, None, None), MODEL_DTYPES)
    expect_tensor("v", v, tuple(k.shape), k.dtype, device=k.device)
    check_pages(k_pages, v_pages, k.dtype, k.device)
    check_scales(k_scale, v_scale, k_pages)
    if k.shape[1:] != k_pages.shape[2:]:
        raise ValueError(
            f"k: expected [*, {k_pages.shape[2]}, {k_pages.shape[3]}], got {list(k.shape)}"
        )
    expect_tensor("slot_mapping", slot_mapping, (k.shape[0],), torch.int64, device=k.device)
