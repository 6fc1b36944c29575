"""``norm_rope``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_norm_rope


def norm_rope(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_kv_heads: int,
    has_v: bool = True,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    norm_v: bool = False,
    eps: float = 1e-6,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """What attention takes of the merged projection of queries, keys and values::

        q <- rope(norm(q, q_weight)),  k <- rope(norm(k, k_weight)),  v <- norm(v, 1)

        norm(x, w) = x / sqrt(mean(x^2) + eps) * (w + offset)          x without a weight
        rope(x)    = x1 cos - x2 sin | x2 cos + x1 sin                 x1 | x2: the halves of a head

    in fp32, rounded once. Values without a norm are left where they are.

    Args:
        qkv: [num_tokens, heads, head_dim] bf16, fp16 or fp32, last stride 1: the heads of the
            queries, then ``num_kv_heads`` of keys, then as many of values.
        cos, sin: [num_tokens, head_dim // 2] fp32, last stride 1; of each token's angles.
        num_kv_heads: 0 = queries alone.
        has_v: qkv has values; without them keys are values too, before their norm and RoPE.
        q_weight, k_weight: [head_dim] bf16, fp16 or fp32; None = no norm. Both or neither, where
            there are keys.
        norm_v: norm the values as well, without a weight and ``offset``, to ``out``.
        eps: in 2**-100 .. 2**30.
        offset: added to both weights in fp32; 1 where they are stored around 0 (Gemma-3).
        out: [num_tokens, out_heads, head_dim] of qkv's dtype, last stride 1; None = new memory. It
            shares no memory with qkv.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        ``out``: queries, keys, and, with ``norm_v``, values.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: with Triton, head_dim is not a power of two in 16..512.

    Source: RoFormer (arXiv 2104.09864); transformers ``modeling_llama``, ``modeling_gemma3``,
        ``modeling_gemma4``.
    """
    chosen = implementation(impl, qkv)
    check_norm_rope(
        qkv, cos, sin, num_kv_heads, has_v, q_weight, k_weight, norm_v, eps, offset, out
    )
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    return module.norm_rope(
        qkv,
        cos,
        sin,
        num_kv_heads=num_kv_heads,
        has_v=has_v,
        q_weight=q_weight,
        k_weight=k_weight,
        norm_v=norm_v,
        eps=eps,
        offset=offset,
        out=out,
    )
