"""``norm_rope`` for CPU tensors: plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .call import out_heads


@torch.no_grad()
def norm_rope(
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
) -> torch.Tensor:
    """Norms and RoPE of checked arguments; shapes as in ``quire.kernels.norm_rope``."""
    num_tokens, heads, head_dim = qkv.shape
    if out is None:
        shape = (num_tokens, out_heads(heads, num_kv_heads, has_v, norm_v), head_dim)
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    num_heads = heads - num_kv_heads * (1 + has_v)
    rotated = num_heads + num_kv_heads
    cos, sin = cos[:, None], sin[:, None]
    if q_weight is None:
        _rope(qkv[:, :rotated], cos, sin, out[:, :rotated])
    else:
        q = _norm(qkv[:, :num_heads], q_weight, eps, offset)
        _rope(q, cos, sin, out[:, :num_heads])
        if k_weight is not None:
            k = _norm(qkv[:, num_heads:rotated], k_weight, eps, offset)
            _rope(k, cos, sin, out[:, num_heads:rotated])
    if norm_v:
        out[:, rotated:] = _norm(qkv[:, heads - num_kv_heads :], None, eps, offset)
    return out


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    if weight is not None:
        weight = weight.float() + offset if offset else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    first, second = x.float().chunk(2, dim=-1)
    low, high = out.chunk(2, dim=-1)
    low.copy_((first * cos).addcmul_(second, sin, value=-1))
    high.copy_((second * cos).addcmul_(first, sin))
