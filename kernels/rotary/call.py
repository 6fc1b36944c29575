"""The checks of one call of ``norm_rope``, and which heads its result has."""

from __future__ import annotations

import torch

from ..common.checks import (
    MODEL_DTYPES,
    expect_apart,
    expect_int,
    expect_number,
    expect_positive,
    expect_tensor,
)


def check_norm_rope(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_kv_heads: int,
    has_v: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    norm_v: bool,
    eps: float,
    offset: float,
    out: torch.Tensor | None,
) -> None:
    """Check the arguments of ``quire.kernels.norm_rope``, which says what they are and what is
    raised."""
    expect_tensor("qkv", qkv, (None, None, None), MODEL_DTYPES)
    num_tokens, heads, head_dim = qkv.shape
    for name, flag in (("has_v", has_v), ("norm_v", norm_v)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: expected a bool, got {flag!r}")
    expect_int("num_kv_heads", num_kv_heads, 0, heads // (1 + has_v))
    expect_int("qkv: head_dim", head_dim, 2)
    if head_dim % 2:
        raise ValueError(f"qkv: expected an even head_dim, got {head_dim}")
    for name, angles in (("cos", cos), ("sin", sin)):
        shape = (num_tokens, head_dim // 2)
        expect_tensor(name, angles, shape, torch.float32, device=qkv.device)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            expect_tensor(name, weight, (head_dim,), MODEL_DTYPES, device=qkv.device)
    if (k_weight is None) != (q_weight is None or num_kv_heads == 0):
        wanted = "None without q_weight or keys" if k_weight is not None else "one beside q_weight"
        raise ValueError(f"k_weight: expected {wanted}")
    if norm_v and num_kv_heads == 0:
        raise ValueError("norm_v: expected False without keys, got True")
    expect_positive("eps", eps, least=-100)
    expect_number("offset", offset)
    if out is not None:
        shape = (num_tokens, out_heads(heads, num_kv_heads, has_v, norm_v), head_dim)
        expect_tensor("out", out, shape, qkv.dtype, device=qkv.device)
        expect_apart("out", out)


def out_heads(heads: int, num_kv_heads: int, has_v: bool, norm_v: bool) -> int:
    """Heads of the result of a call whose ``qkv`` has ``heads``."""
    return heads + num_kv_heads * (norm_v - has_v)
