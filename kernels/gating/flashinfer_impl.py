"""``gated_product`` through FlashInfer: silu_and_mul and gelu_tanh_and_mul.

Source: FlashInfer's ``activation``.
"""

from __future__ import annotations

import torch

from ..common.flashinfer import expect_rows, import_flashinfer, refuse


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
    package = import_flashinfer()
    for name, value, only in (
        ("limit", limit, None),
        ("alpha", alpha, 1),
        ("up_offset", up_offset, 0),
    ):
        if value != only:
            refuse(f"{name}={only}", repr(value))
    num_rows, width = gate.shape
    apart = up.data_ptr() - gate.data_ptr()
    strides = {gate.stride(), up.stride()}
    if num_rows and (apart != width * gate.element_size() or strides != {(2 * width, 1)}):
        refuse(
            "gate and up that are the halves of contiguous rows",
            f"strides {gate.stride()} and {up.stride()}, {apart} bytes apart",
        )
    expect_rows(gate.dtype, gate=gate, up=up, out=out)
    if out is None:
        out = gate.new_empty(num_rows, width)
    elif not out.is_contiguous():
        refuse("a contiguous out", f"strides {out.stride()}")
    if num_rows:
        merged = gate.as_strided((num_rows, 2 * width), (2 * width, 1))
        getattr(package, f"{activation}_and_mul")(merged, out)
    return out
