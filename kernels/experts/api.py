"""``expert_mlp``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_expert_mlp


def expert_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """What each expert of each token gives, for ``combine_experts`` or ``expand_streams`` to add up::

        gate, up = gate_up[e] x + gate_up_bias[e]
        row      = down[e] gated_product(gate, up) + down_bias[e]

    with fp32 sums; the gated product is rounded to the dtype of x, and so is the row.

    Weights are in the dtype of x, or quantized: e4m3 with a scale for each block of 128 x 128, or
    e2m1 (fp4, MXFP4), two values a byte, the earlier one in the low bits, with an E8M0 scale byte
    for each 32 columns. A quantized weight times its scale is rounded to the dtype of x before it
    is multiplied. Of a quantized weight no value and no scale may be NaN.

    A row depends on its token, on its expert and on the tile shape, which goes by the number of
    tokens; never on what other tokens hold or choose.

    Args:
        x: [num_tokens, hidden_size] bf16, fp16 or fp32, last stride 1.
        ids: [num_tokens, k] int64 in 0..num_experts - 1, last stride 1.
        gate_up: [num_experts, 2, width, hidden_size], the gate first, of any strides: gate and up
            rows may lie in turns, and matrices transposed. e4m3: last stride 1. uint8 (e2m1):
            [num_experts, 2, width, hidden_size / 2], last stride 1.
        down: [num_experts, hidden_size, width], or as above.
        activation, limit, alpha, up_offset: as in ``gated_product``.
        gate_up_scale: of e4m3 [num_experts, 2, ceil(width / 128), ceil(hidden_size / 128)] fp32, of
            e2m1 [num_experts, 2, width, hidden_size / 32] uint8; None for plain weights.
        down_scale: the same of [hidden_size, width].
        gate_up_bias: [num_experts, 2, width] bf16, fp16 or fp32, of any strides; None = 0.
        down_bias: [num_experts, hidden_size] of these dtypes; None = 0.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors). "torch" is
            ``torch.nn.functional.grouped_mm`` over sorted rows where torch has a kernel for it (bf16
            on sm_90 and sm_100), else a loop over experts; it reads the choices on the host.

    Returns:
        [num_tokens * k, hidden_size] in the dtype of x, the rows of a token one after another.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: Triton with a matrix of 2**31 elements or more.

    Source: transformers ``modeling_deepseek_v4``, ``modeling_gpt_oss``, ``modeling_gemma4``; OCP
        Microscaling Formats 1.0.
    """
    chosen = implementation(impl, x)
    check_expert_mlp(
        x,
        ids,
        gate_up,
        down,
        activation,
        limit,
        alpha,
        up_offset,
        gate_up_scale,
        down_scale,
        gate_up_bias,
        down_bias,
    )
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    return module.expert_mlp(
        x,
        ids,
        gate_up,
        down,
        activation=activation,
        limit=limit,
        alpha=alpha,
        up_offset=up_offset,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
