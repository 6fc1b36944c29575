"""The checks of one call of ``gated_product``."""

from __future__ import annotations

import torch

from ..common.checks import (
    MODEL_DTYPES,
    expect_apart,
    expect_number,
    expect_positive,
    expect_tensor,
)

ACTIVATIONS = ("silu", "gelu_tanh")


def check_gated_product(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
    out: torch.Tensor | None,
) -> None:
    """Check the arguments of ``quire.kernels.gated_product``, which says what they are and what is
    raised."""
    expect_tensor("gate", gate, (None, None), MODEL_DTYPES, any_stride=True)
    shape, dtype, device = tuple(gate.shape), gate.dtype, gate.device
    expect_tensor("up", up, shape, dtype, device=device, any_stride=True)
    check_options(activation, limit, alpha, up_offset)
    if out is not None:
        expect_tensor("out", out, shape, dtype, device=device)
        expect_apart("out", out)


def check_options(activation: str, limit: float | None, alpha: float, up_offset: float) -> None:
    """Check the host values of a gated product, as ``check_gated_product`` does."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {list(ACTIVATIONS)}, got {activation!r}")
    if limit is not None:
        expect_positive("limit", limit)
    expect_positive("alpha", alpha)
    if activation != "silu" and alpha != 1:
        raise ValueError(f"alpha: expected 1 with {activation!r}, got {alpha!r}")
    expect_number("up_offset", up_offset)
