"""Oracle of ``residual_norm``: plain torch, one row at a time."""

import torch


def normed(row, weight, eps, offset=0.0):
    """RMS norm of one row [size] in its dtype; weight None = the row as it is."""
    if weight is None:
        return row
    mean_square = sum(value * value for value in row) / row.shape[0]
    return row / torch.sqrt(mean_square + eps) * (weight.to(row.dtype) + offset)


def new_residual(x, residual, *, eps, offset=0.0, post_weight=None, scalar=None):
    """The new ``residual``, [num_rows, size] float64; arguments as in ``quire.kernels.residual_norm``."""
    rows = []
    for row, old in zip(x.double(), residual.double(), strict=True):
        new = old + normed(row, post_weight, eps, offset)
        rows.append(new if scalar is None else new * scalar.double())
    return torch.stack(rows) if rows else residual.double()


def norm(x, weight, *, eps, offset=0.0):
    """The norm of rows x [num_rows, size], float64; arguments as in ``quire.kernels.residual_norm``."""
    rows = [normed(row, weight, eps, offset) for row in x.double()]
    return torch.stack(rows) if rows else x.double()
