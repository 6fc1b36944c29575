"""``gated_product``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.call_keys import check_once
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
    arguments = locals()  # all of them, by name
    if implementation(arguments.pop("impl"), gate) == "triton":
        from . import triton_impl

        return triton_impl.gated_product(arguments)
    from . import torch_impl

    check_once(check_gated_product, arguments)
    return torch_impl.gated_product(**arguments)
