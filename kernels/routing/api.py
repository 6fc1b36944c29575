"""``route_tokens`` and ``combine_experts``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_combine, check_route


def route_tokens(
    logits: torch.Tensor,
    *,
    top_k: int,
    score: str = "sqrt_softplus",
    scale: float = 1.0,
    logits_factor: float = 1.0,
    logits_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and their weights::

        score  = sqrt(softplus(logit))
        ids    = the top_k experts of score + bias, best first; or table[token_id]
        weight = score[id] / (sum of the scores of ids + 1e-20) * scale

    or, with ``score`` "softmax"::

        z      = logit * logits_factor + logits_bias
        ids    = the top_k experts of z, best first
        weight = exp(z[id]) / (sum of the exp(z) of ids) * scale * expert_scale[id]

    in fp32; the same as a softmax over all experts whose top_k are divided by their sum. ``bias``
    takes part in the choice only. Of equal scores Triton takes the lowest expert first; torch does
    not say which.

    Args:
        logits: [num_tokens, num_experts] fp32, last stride 1.
        top_k: experts of a token, 1..num_experts.
        score: "sqrt_softplus" or "softmax".
        scale: factor of the weights, in 2**-30 .. 2**30.
        logits_factor: in 2**-30 .. 2**30; 1 unless with "softmax".
        logits_bias, expert_scale: [num_experts] bf16, fp16 or fp32, with "softmax" only; None = 0,
            and 1.
        bias: [num_experts] fp32, not with "softmax"; None = 0.
        table: [num_ids, top_k] int64, experts by token id, not with "softmax"; None = by score.
        token_ids: [num_tokens] int64, rows of the table, with which they come.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        (ids [num_tokens, top_k] int64, weights [num_tokens, top_k] fp32).

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: Triton with more than 4096 experts.

    Source: DeepSeek-V4 report 2; transformers ``modeling_deepseek_v4``, ``modeling_gpt_oss``,
        ``modeling_gemma4``.
    """
    chosen = implementation(impl, logits)
    check_route(
        logits,
        top_k,
        score,
        scale,
        logits_factor,
        logits_bias,
        expert_scale,
        bias,
        table,
        token_ids,
    )
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    return module.route(
        logits,
        top_k=top_k,
        score=score,
        scale=scale,
        logits_factor=logits_factor,
        logits_bias=logits_bias,
        expert_scale=expert_scale,
        bias=bias,
        table=table,
        token_ids=token_ids,
    )


def combine_experts(
    rows: torch.Tensor,
    weights: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Sum over a token's experts of weight * row, in fp32 and in their order, then ``addend``.

    The sum is rounded to the dtype of the rows, and once more with ``addend``.

    Args:
        rows: [num_tokens * k, size] bf16, fp16 or fp32, last stride 1, those of a token one after
            another.
        weights: [num_tokens, k] bf16, fp16 or fp32.
        addend: [num_tokens, size] in the dtype of rows, what the shared expert gives; None = none.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        [num_tokens, size] in the dtype of rows.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.

    Source: transformers ``modeling_deepseek_v4``.
    """
    chosen = implementation(impl, rows)
    check_combine(rows, weights, addend)
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    return module.combine(rows, weights, addend)
