"""Residual sum and RMS norm in one pass, a program a row.

    r'  = (r + x) * s        or (r + norm(x, p)) * s, rounded where it is stored
    out = norm(r', w)        norm(x, w) = x * rsqrt(mean(x^2) + eps) * (w + offset)

in fp32. A row stays in registers from its load to its stores.

Layout: x, residual, out [num_rows, size] of any row strides; weights [size]. Bound by memory: each
of the rows is read once and written once.

Source: RMSNorm (arXiv 1910.07467).
"""

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.launching import Launch, run
from ..common.tile_shapes import next_power_of_2

MAX_SIZE = 16384
# Channels of a row that one warp holds: 16 for each thread.
CHANNELS_PER_WARP = 512
MAX_WARPS = 16


@triton.jit
def _normed(row, weight, eps, offset, size, channel, live):
    """RMS norm of a row [BLOCK] fp32, zero where not ``live``; weight [size] of any dtype."""
    factor = tl.rsqrt(tl.sum(row * row, 0) / size + eps)
    weights = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32) + offset
    return row * factor * weights


@triton.jit
def _residual_norm_kernel(
    x, weight, residual, post_weight, scalar, out, eps, offset,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    live = channel < SIZE
    values = tl.load(x.data + row * x.stride_row + channel, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        if post_weight is not None:
            values = _normed(values, post_weight, eps, offset, SIZE, channel, live)
        cells = residual.data + row * residual.stride_row + channel
        values += tl.load(cells, mask=live, other=0.0).to(tl.float32)
        if scalar is not None:
            values *= tl.load(scalar).to(tl.float32)
        stored = values.to(residual.data.dtype.element_ty)
        tl.store(cells, stored, mask=live)
        values = stored.to(tl.float32)
    if weight is not None:
        values = _normed(values, weight, eps, offset, SIZE, channel, live)
        cells = out.data + row * out.stride_row + channel
        tl.store(cells, values.to(out.data.dtype.element_ty), mask=live)


def residual_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    post_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """Launch checked arguments, shaped as in ``quire.kernels.residual_norm``.

    Returns:
        ``out``, None without a weight.
    """
    if x.shape[1] > MAX_SIZE:
        raise NotImplementedError(
            f"x: rows of at most {MAX_SIZE} channels are supported, got {x.shape[1]}"
        )
    if weight is not None and out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    run([prepare(x, weight, eps, offset, residual, post_weight, scalar, out)], x)
    return out


def prepare(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    post_weight: torch.Tensor | None,
    scalar: torch.Tensor | None,
    out: torch.Tensor | None,
) -> Launch:
    """The launch of checked arguments, shaped as in ``quire.kernels.residual_norm``; with a weight
    there is an ``out``."""
    num_rows, size = x.shape
    block = next_power_of_2(max(1, size))
    return Launch(
        _residual_norm_kernel,
        (num_rows,),
        {
            "x": strided.matrix(x),
            "weight": weight,
            "residual": strided.matrix(residual),
            "post_weight": post_weight,
            "scalar": scalar,
            "out": strided.matrix(out),
            "eps": float(eps),
            "offset": float(offset),
            "SIZE": size,
            "BLOCK": block,
            "num_warps": min(MAX_WARPS, max(1, block // CHANNELS_PER_WARP)),
        },
    )
