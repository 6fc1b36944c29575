"""Residual sum and RMS norm in one pass; a program keeps a row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common import checks, launching, strided
from ..common.tile_shapes import next_power_of_2

# Channels of a row that one warp holds, 16 for each thread; most warps.
CHANNELS_PER_WARP, MAX_WARPS = 512, 16


def residual_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    post_weight: torch.Tensor | None = None,
    scalar: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Add a branch of a layer to the residual stream, and norm the sum for the next branch::

        residual <- (residual + post(x)) * scalar      post(x) = norm(x, post_weight), or x
        out       = norm(residual, weight)             norm(x, weight), where there is no residual

        norm(x, w) = x / sqrt(mean(x^2) + eps) * (w + offset)

    in fp32, rounded where it is stored. The second norm reads the rounded residual.

    Args:
        x: [num_rows, size] bf16, fp16 or fp32, last stride 1.
        weight: [size] bf16, fp16 or fp32; None = only the sum, with ``residual`` as the result.
        eps: in 2**-100 .. 2**30.
        offset: added to both weights in fp32; 1 where they are stored around 0 (Gemma-3).
        residual: [num_rows, size] of x's dtype, last stride 1, updated in place; None = no sum.
        post_weight: [size], the norm of x before it is added; None = none.
        scalar: [1], a factor of the sum; None = none.
        out: [num_rows, size] of x's dtype or fp32, last stride 1; it may be x. None = new memory,
            of x's dtype.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        ``out``, or ``residual`` without a weight.

    Source: RMSNorm (arXiv 1910.07467); transformers ``modeling_llama``, ``modeling_gemma3``,
        ``modeling_gemma4``.
    """
    chosen = checks.accept(impl, _check, x, weight, eps, offset, residual, post_weight, scalar, out)
    if chosen == "torch":
        out = _torch(x, weight, eps, offset, residual, post_weight, scalar, out)
    else:
        if weight is not None and out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_rows, size = x.shape
        block = next_power_of_2(size)
        with torch.cuda.device_of(x):
            launching.launch(
                _residual_norm_kernel, (num_rows,),
                x=strided.matrix(x), weight=weight, residual=strided.matrix(residual),
                post_weight=post_weight, scalar=scalar, out=strided.matrix(out),
                eps=float(eps), offset=float(offset), SIZE=size, BLOCK=block,
                num_warps=min(MAX_WARPS, max(1, block // CHANNELS_PER_WARP)),
            )  # fmt: skip
    return residual if out is None else out


def _check(x, weight, eps, offset, residual, post_weight, scalar, out) -> None:
    checks.expect_tensor("x", x, (None, None), checks.MODEL_DTYPES)
    num_rows, size = x.shape
    checks.expect_int("x: size", size, 1)
    checks.expect_positive("eps", eps, least=-100)
    checks.expect_number("offset", offset)
    for name, tensor, n in (
        ("weight", weight, size), ("post_weight", post_weight, size), ("scalar", scalar, 1)
    ):  # fmt: skip
        dtypes = checks.MODEL_DTYPES
        checks.expect_tensor(name, tensor, (n,), dtypes, device=x.device, optional=True)
    if weight is None and out is not None:
        raise ValueError("out: expected None without a weight, got a tensor")
    checks.expect_output("residual", residual, (num_rows, size), x.dtype, x.device)
    if residual is None and (weight is None or post_weight is not None or scalar is not None):
        why = "without a weight" if weight is None else "with a post_weight or a scalar"
        raise ValueError(f"residual: expected a tensor {why}, got None")
    dtypes = (x.dtype,) if x.dtype == torch.float32 else (x.dtype, torch.float32)
    checks.expect_output("out", out, (num_rows, size), dtypes, x.device)


@torch.no_grad()
def _torch(x, weight, eps, offset, residual, post_weight, scalar, out):
    rows = x
    if residual is not None:
        if post_weight is None and scalar is None:
            residual.add_(x)
        else:
            rows = x.float() if post_weight is None else _norm(x, post_weight, offset, eps)
            rows = residual.float().add_(rows)  # of fp32, the residual itself
            residual.copy_(rows if scalar is None else rows.mul_(scalar))
        rows = residual
    if weight is None:
        return None
    made = _norm(rows, weight, offset, eps)
    return made.to(x.dtype) if out is None else out.copy_(made)


def _norm(rows, weight, offset, eps):
    """The norm in fp32; torch's own makes a tensor of the squares first."""
    rows, weight = rows.float(), weight.float()
    length = torch.linalg.vector_norm(rows, 2, -1, True)
    factor = (length * length).mul_(1 / rows.shape[1]).add_(eps).rsqrt_()
    # 1 + w in bf16 would round away small weights.
    return (rows * factor).mul_(weight + offset if offset else weight)


@triton.jit
def normed(row, weight, eps, offset, size, channel, live):
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
            values = normed(values, post_weight, eps, offset, SIZE, channel, live)
        cells = residual.data + row * residual.stride_row + channel
        values += tl.load(cells, mask=live, other=0.0).to(tl.float32)
        if scalar is not None:
            values *= tl.load(scalar).to(tl.float32)
        stored = values.to(residual.data.dtype.element_ty)
        tl.store(cells, stored, mask=live)
        values = stored.to(tl.float32)
    if weight is not None:
        values = normed(values, weight, eps, offset, SIZE, channel, live)
        cells = out.data + row * out.stride_row + channel
        tl.store(cells, values.to(out.data.dtype.element_ty), mask=live)
