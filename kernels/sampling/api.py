"""``sample_tokens``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_sample


def sample_tokens(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """One token for each row: of temperature 0 that of the largest logit, else a draw::

        x = (logit - largest logit) / temperature       in fp32
        keep the top_k highest x                        of equal ones those with the lowest ids
        of these the highest whose exp(x) first reach the share top_p of their sum
        of these those with exp(x) >= min_p
        the first id at which the sum of exp(x), in the order of ids, exceeds u times the whole sum

    Of equal largest logits the lowest id is taken. Triton sums exp(x) in integers of 2**-42,
    rounded down: a smaller one counts as 0, and no result depends on the order of summation. Torch
    sums in fp32 for top_p and in fp64 for the draw. So the two may differ where a share, or u, is
    within rounding of a border.

    Args:
        logits: [num_rows, vocab_size] bf16, fp16 or fp32, last stride 1; -inf for a token that is
            not to come.
        temperature: [num_rows] fp32, >= 0; None = 0 for all. The four others come with it.
        top_k: [num_rows] int32; 0 = all.
        top_p: [num_rows] fp32, > 0; 1 = all.
        min_p: [num_rows] fp32 in [0, 1]; 0 = all.
        u: [num_rows] fp64 in [0, 1), of which Triton takes 32 bits.
        probs: [num_rows, vocab_size] fp32, last stride 1, filled in place with what rows are drawn
            from; 1 at the token of a row of temperature 0. Only with temperature.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        [num_rows] int64; -1 for a row that gives no token: one with NaN or +inf in it, or with -inf
        alone. Such a row's probs mean nothing.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.
        NotImplementedError: Triton with more than 2**20 tokens.

    Source: transformers ``generation/logits_process`` for the filters and their order.
    """
    chosen = implementation(impl, logits)
    check_sample(logits, temperature, top_k, top_p, min_p, u, probs)
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    return module.sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        u=u,
        probs=probs,
    )
