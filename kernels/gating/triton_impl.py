"""The gated product in one pass, element by element.

    silu(x) = x * sigmoid(alpha x),  gelu_tanh(x) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))

which is x (1 + tanh(..)) / 2 without the cancellation of 1 + tanh. One program takes a piece of a
row.

Layout: gate, up [num_rows, width] of any strides; out of any row stride. Bound by memory: each
element is read once and written once.

Source: GLU variants (arXiv 2002.05202).
"""

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.launching import Launch, run

BLOCK = 1024

# 2 * sqrt(2 / pi)
GELU_FACTOR = tl.constexpr(1.5957691216057308)


@triton.jit
def gated(g, u, limit, alpha, up_offset, GELU: tl.constexpr):
    """The product of a gate ``g`` and ``u``, both fp32; limit: None for no clamp."""
    if limit is not None:
        g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
    if GELU:
        inner = GELU_FACTOR * (g + 0.044715 * g * g * g)
    else:
        inner = g * alpha
    return g / (1.0 + tl.exp(-inner)) * (u + up_offset)


@triton.jit
def _gated_product_kernel(
    gate, up, out, limit, alpha, up_offset, width,
    GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    column = column.to(tl.int64)
    gate_cells = gate.data + row * gate.stride_row + column * gate.stride_column
    up_cells = up.data + row * up.stride_row + column * up.stride_column
    g = tl.load(gate_cells, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up_cells, mask=live, other=0.0).to(tl.float32)
    cells = out.data + row * out.stride_row + column
    made = gated(g, u, limit, alpha, up_offset, GELU)
    tl.store(cells, made.to(out.data.dtype.element_ty), mask=live)


def gated_product(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Launch checked arguments, shaped as in ``quire.kernels.gated_product``; returns ``out``."""
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    run([prepare(gate, up, activation, limit, alpha, up_offset, out)], gate)
    return out


def prepare(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
    out: torch.Tensor,
) -> Launch:
    """The launch of checked arguments, shaped as in ``quire.kernels.gated_product``."""
    num_rows, width = gate.shape
    return Launch(
        _gated_product_kernel,
        (num_rows, triton.cdiv(width, BLOCK)),
        {
            "gate": strided.cells(gate),
            "up": strided.cells(up),
            "out": strided.matrix(out),
            "limit": None if limit is None else float(limit),
            "alpha": float(alpha),
            "up_offset": float(up_offset),
            "width": width,
            "GELU": activation == "gelu_tanh",
            "BLOCK": BLOCK,
            "num_warps": 4,
        },
    )
