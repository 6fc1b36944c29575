"""The checks of one call of ``residual_norm``."""

from __future__ import annotations

import torch

from ..common.checks import (
    MODEL_DTYPES,
    expect_apart,
    expect_int,
    expect_number,
    expect_positive,
    expect_tensor,
)


def check_residual_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    post_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check the arguments of ``quire.kernels.residual_norm``, which says what they are and what is
    raised."""
    expect_tensor("x", x, (None, None), MODEL_DTYPES)
    expect_int("x: size", x.shape[1], 1)
    expect_positive("eps", eps, least=-100)
    expect_number("offset", offset)
    for name, vector, size in (
        ("weight", weight, x.shape[1]),
        ("post_weight", post_weight, x.shape[1]),
        ("scalar", scalar, 1),
    ):
        if vector is not None:
            expect_tensor(name, vector, (size,), MODEL_DTYPES, device=x.device)
    for name, rows, dtypes in (
        ("residual", residual, (x.dtype,)),
        ("out", out, tuple(dict.fromkeys((x.dtype, torch.float32)))),
    ):
        if rows is not None:
            expect_tensor(name, rows, tuple(x.shape), dtypes, device=x.device)
            expect_apart(name, rows)
    if residual is None:
        needed = [
            "without a weight" if weight is None else "",
            "with a post_weight" if post_weight is not None else "",
            "with a scalar" if scalar is not None else "",
        ]
        if why := next(filter(None, needed), ""):
            raise ValueError(f"residual: expected a tensor {why}, got None")
    if weight is None and out is not None:
        raise ValueError("out: expected None without a weight, got a tensor")
