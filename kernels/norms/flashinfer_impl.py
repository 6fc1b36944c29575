"""``residual_norm`` through FlashInfer: rmsnorm, fused_add_rmsnorm, and both as Gemma has them.

Source: FlashInfer's ``norm``.
"""

from __future__ import annotations

import torch

from ..common.flashinfer import expect_rows, import_flashinfer, refuse

# How functions begin that add an offset to the weight.
PREFIXES = {0.0: "", 1.0: "gemma_"}


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
) -> torch.Tensor:
    """Sum and norm of checked arguments; shapes as in ``quire.kernels.residual_norm``."""
    package = import_flashinfer()
    for name, value in (("post_weight", post_weight), ("scalar", scalar)):
        if value is not None:
            refuse(f"{name}=None", "a tensor")
    if weight is None:
        refuse("a weight", "None")
    if offset not in PREFIXES:
        refuse(f"an offset in {list(PREFIXES)}", repr(offset))
    expect_rows(x.dtype, x=x, weight=weight, residual=residual, out=out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not len(x):
        return out
    if residual is None:
        getattr(package, f"{PREFIXES[offset]}rmsnorm")(x, weight, eps, out=out)
        return out
    if out is not x:
        out.copy_(x)  # the sum's second term is what it overwrites
    getattr(package, f"{PREFIXES[offset]}fused_add_rmsnorm")(out, residual, weight, eps)
    return out
