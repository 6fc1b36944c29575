"""``gated_product``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_gated_product


def gated_product(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """What an MLP hands to its second matrix::

        activation(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)

        silu(x)      = x / (1 + exp(-alpha x))
        gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

    in fp32, rounded once.

    Args:
        gate, up: [num_rows, width] bf16, fp16 or fp32, of any strides: the two halves of a merged
            product's rows, or their even and odd columns.
        activation: "silu" or "gelu_tanh".
        limit: > 0, in 2**-30 .. 2**30; None = no clamp. gpt-oss has 7.
        alpha: of silu, in 2**-30 .. 2**30. gpt-oss has 1.702.
        up_offset: gpt-oss has 1.
        out: [num_rows, width] of gate's dtype, last stride 1; None = new memory.
        impl: "triton" (default for CUDA tensors) or "torch" (default for CPU tensors).

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.

    Source: GLU variants (arXiv 2002.05202); transformers ``modeling_gpt_oss`` for the clamp.
    """
    chosen = implementation(impl, gate)
    check_gated_product(gate, up, activation, limit, alpha, up_offset, out)
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    return module.gated_product(
        gate,
        up,
        activation=activation,
        limit=limit,
        alpha=alpha,
        up_offset=up_offset,
        out=out,
    )
