"""The gated product of an MLP in one pass; a program takes a piece of a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..common import checks, launching, strided

ACTIVATIONS = ("silu", "gelu_tanh")
BLOCK = 1024
# Elements of a block of rows that torch computes at once: its fp32 copies stay in the CPU's cache.
CACHED_ELEMENTS = 1 << 18
# 2 * sqrt(2 / pi)
GELU_FACTOR = tl.constexpr(1.5957691216057308)


def gated_product(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    impl: str | None = None,
) -> torch.Tensor:
    """Gated product of an MLP, the input of its second matrix::

        activation(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)

        silu(x)      = x / (1 + exp(-alpha x))
        gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

    in fp32, rounded once.

    Args:
        gate, up: [num_rows, width] bf16, fp16 or fp32, any strides: halves of a merged product's
            rows, or its even and odd columns.
        activation: "silu" or "gelu_tanh".
        limit: in 2**-30 .. 2**30; None = no clamp. gpt-oss has 7.
        alpha: factor in silu, in 2**-30 .. 2**30. gpt-oss has 1.702.
        up_offset: added to up. gpt-oss has 1.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        [num_rows, width] of gate's dtype, contiguous.

    Source: GLU variants (arXiv 2002.05202); transformers ``modeling_gpt_oss`` for the clamp.
    """
    chosen = checks.accept(impl, _check, gate, up, activation, limit, alpha, up_offset)
    if chosen == "torch":
        return gated_torch(gate, up, activation, limit, alpha, up_offset)
    num_rows, width = gate.shape
    out = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    with torch.cuda.device_of(gate):
        launching.launch(
            _gated_product_kernel, (num_rows, triton.cdiv(width, BLOCK)),
            gate=strided.matrix(gate, any_column=True), up=strided.matrix(up, any_column=True),
            out=out,
            limit=None if limit is None else float(limit), alpha=float(alpha),
            up_offset=float(up_offset), width=width, GELU=activation == "gelu_tanh",
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def _check(gate, up, activation, limit, alpha, up_offset) -> None:
    checks.expect_tensor("gate", gate, (None, None), checks.MODEL_DTYPES, any_stride=True)
    shape = tuple(gate.shape)
    checks.expect_tensor("up", up, shape, gate.dtype, device=gate.device, any_stride=True)
    check_options(activation, limit, alpha, up_offset)


def check_options(activation: str, limit: float | None, alpha: float, up_offset: float) -> None:
    """Check the host values of a gated product."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {list(ACTIVATIONS)}, got {activation!r}")
    if limit is not None:
        checks.expect_positive("limit", limit)
    checks.expect_positive("alpha", alpha)
    if activation != "silu" and alpha != 1:
        raise ValueError(f"alpha: expected 1 with {activation!r}, got {alpha!r}")
    checks.expect_number("up_offset", up_offset)


@torch.no_grad()
def gated_torch(gate, up, activation, limit, alpha, up_offset) -> torch.Tensor:
    """``gated_product`` of checked arguments, a block of rows at a time."""
    made = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    num_rows = max(1, CACHED_ELEMENTS // max(1, gate.shape[1]))
    blocks = made.split(num_rows), gate.split(num_rows), up.split(num_rows)
    for out, g, u in zip(*blocks, strict=True):
        g = g.float()
        if limit is not None:
            g, u = g.clamp(max=limit), u.float().clamp(-limit, limit)
        if activation == "gelu_tanh":
            active = F.gelu(g, approximate="tanh")
        elif alpha == 1:
            active = F.silu(g)
        else:
            active = torch.sigmoid(alpha * g).mul_(g)
        out.copy_(active.mul_(u.float() + up_offset if up_offset else u))
    return made


@triton.jit
def gated_values(g, u, limit, alpha, up_offset, GELU: tl.constexpr):
    """The product of a gate ``g`` and ``u``, both fp32; limit: None for no clamp.

    gelu_tanh(x) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which has no cancellation as
    1 + tanh has.
    """
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
    made = gated_values(g, u, limit, alpha, up_offset, GELU)
    tl.store(out + row * width + column, made.to(out.dtype.element_ty), mask=live)
