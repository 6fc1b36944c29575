"""``residual_norm``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_residual_norm


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

    In fp32, rounded where it is stored: the second norm is that of the rounded residual.

    Args:
        x: [num_rows, size] bf16, fp16 or fp32, last stride 1.
        weight: [size] bf16, fp16 or fp32; None = only the sum, with ``residual`` as the result.
        eps: in 2**-100 .. 2**30.
        offset: added to both weights in fp32; 1 where they are stored around 0 (Gemma-3).
        residual: [num_rows, size] of x's dtype, last stride 1, updated in place; None = no sum.
        post_weight: [size], the norm of x before it is added; None = none.
        scalar: [1], a factor of the sum; None = none.
        out: [num_rows, size] of x's dtype or fp32, last stride 1; it may be x. None = new memory, of
            x's dtype.
        impl: "triton" (default for CUDA tensors) or "torch" (default for CPU tensors).

    Returns:
        ``out``, or ``residual`` without a weight.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: with Triton, rows of more than 16384 channels.

    Source: RMSNorm (arXiv 1910.07467); transformers ``modeling_llama``, ``modeling_gemma3``,
        ``modeling_gemma4``.
    """
    chosen = implementation(impl, x)
    check_residual_norm(x, weight, eps, offset, residual, post_weight, scalar, out)
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    made = module.residual_norm(
        x,
        weight,
        eps=eps,
        offset=offset,
        residual=residual,
        post_weight=post_weight,
        scalar=scalar,
        out=out,
    )
    return residual if made is None else made
