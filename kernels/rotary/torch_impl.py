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
    if q_weight is None:
        _rope(qkv[:, :rotated], cos, sin, out[:, :rotated])
        if norm_v:
            out[:, rotated:] = _norm(qkv[:, heads - num_kv_heads :], eps)
        return out
    rows = _norm(qkv if norm_v else qkv[:, :rotated], eps)
    if norm_v:
        out[:, rotated:] = rows[:, heads - num_kv_heads :]
    # No *=, which would copy the rows once more.
    rows[:, :num_heads].mul_(_weight(q_weight, offset))
    if k_weight is not None:
        rows[:, num_heads:rotated].mul_(_weight(k_weight, offset))
    _rope(rows[:, :rotated], cos, sin, out[:, :rotated])
    return out


def _norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], None, eps)


def _weight(weight: torch.Tensor, offset: float) -> torch.Tensor:
    return weight.float() + offset if offset else weight.float()


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    low, high = out.chunk(2, dim=-1)
    if out.dtype == torch.float32:
        torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=high).addcmul_(first, sin)
    else:
        low.copy_((first * cos).addcmul_(second, sin, value=-1))
        high.copy_((second * cos).addcmul_(first, sin))
