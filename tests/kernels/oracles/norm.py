"""Oracle of ``residual_norm``: plain torch, one row at a time."""

from __future__ import annotations

import torch


def normed(
    row: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """RMS norm of one row [size] in its dtype; weight None = the row as it is."""
    if weight is None:
        return row
    mean_square = sum(value * value for value in row) / row.shape[0]
    return row / torch.sqrt(mean_square + eps) * (weight.to(row.dtype) + offset)


def new_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    post_weight: torch.Tensor | None = None,
    scalar: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The new ``residual``, [num_rows, size] of ``dtype``, the arithmetic's too.

    Arguments as in ``quire.kernels.residual_norm``.
    """
    rows = []
    for row, old in zip(x.to(dtype), residual.to(dtype), strict=True):
        new = old + normed(row, post_weight, eps, offset)
        rows.append(new if scalar is None else new * scalar.to(dtype))
    return torch.stack(rows) if rows else residual.to(dtype)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The norm of rows x [num_rows, size], of ``dtype``, the arithmetic's too.

    Arguments as in ``quire.kernels.residual_norm``.
    """
    rows = [normed(row, weight, eps, offset) for row in x.to(dtype)]
    return torch.stack(rows) if rows else x.to(dtype)
