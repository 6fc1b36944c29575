"""Norms by head and rotary position embedding in one pass over the merged projection.

One program takes a token and some of its heads, each as two halves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..common import checks, launching, strided
from ..common.tile_shapes import next_power_of_2

ELEMENTS_PER_PROGRAM = 2048


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
    impl: str | None = None,
) -> torch.Tensor:
    """Norm and rotate the heads of a merged projection of queries, keys and values::

        q <- rope(norm(q, q_weight)),  k <- rope(norm(k, k_weight)),  v <- norm(v, 1)

        norm(x, w) = x / sqrt(mean(x^2) + eps) * (w + offset)          x without a weight
        rope(x)    = x1 cos - x2 sin | x2 cos + x1 sin                 x1 | x2: the halves of a head

    in fp32, rounded once. Values without a norm are left where they are.

    Args:
        qkv: [num_tokens, heads, head_dim] bf16, fp16 or fp32, last stride 1: query heads, then
            ``num_kv_heads`` key heads, then ``num_kv_heads`` value heads.
        cos, sin: [num_tokens, head_dim // 2] fp32, last stride 1; cosines and sines of each token's
            angles.
        num_kv_heads: 0 = queries alone.
        has_v: True if qkv has values; else keys are values too, before their norm and RoPE.
        q_weight, k_weight: [head_dim] bf16, fp16 or fp32; None = no norm. Both or neither, where
            there are keys.
        norm_v: True = norm the values too, without weight and ``offset``.
        eps: in 2**-100 .. 2**30.
        offset: added to both weights in fp32; 1 where they are stored around 0 (Gemma-3).
        impl: see ``quire.kernels``, also for errors.

    Returns:
        [num_tokens, out_heads, head_dim] of qkv's dtype, contiguous: queries, keys, and, with
        ``norm_v``, values.

    Raises:
        NotImplementedError: with Triton, head_dim is not a power of two in 16..512.

    Source: RoFormer (arXiv 2104.09864); transformers ``modeling_llama``, ``modeling_gemma3``,
        ``modeling_gemma4``.
    """
    chosen = checks.accept(
        impl, _check, qkv, cos, sin, num_kv_heads, has_v, q_weight, k_weight, norm_v, eps, offset
    )
    num_tokens, heads, head_dim = qkv.shape
    num_heads = heads - num_kv_heads * (1 + has_v)
    out_heads = num_heads + num_kv_heads * (1 + norm_v)
    out = torch.empty(num_tokens, out_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if chosen == "torch":
        _torch(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, norm_v, eps, offset, out)
        return out
    checks.expect_head_dim("qkv", head_dim)
    block = min(next_power_of_2(max(1, out_heads)), max(1, ELEMENTS_PER_PROGRAM // head_dim))
    with torch.cuda.device_of(qkv):
        launching.launch(
            _norm_rope_kernel, (num_tokens, triton.cdiv(out_heads, block)),
            qkv=strided.rows(qkv), cos=strided.matrix(cos), sin=strided.matrix(sin),
            q_weight=q_weight, k_weight=k_weight, out=out, eps=float(eps), offset=float(offset),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, FIRST_VALUE=heads - num_kv_heads,
            OUT_HEADS=out_heads, HEAD_DIM=head_dim, BLOCK_HEADS=block, num_warps=4,
        )  # fmt: skip
    return out


def _check(qkv, cos, sin, num_kv_heads, has_v, q_weight, k_weight, norm_v, eps, offset) -> None:
    checks.expect_tensor("qkv", qkv, (None, None, None), checks.MODEL_DTYPES)
    num_tokens, heads, head_dim = qkv.shape
    for name, flag in (("has_v", has_v), ("norm_v", norm_v)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: expected a bool, got {flag!r}")
    checks.expect_int("num_kv_heads", num_kv_heads, 0, heads // (1 + has_v))
    checks.expect_int("qkv: head_dim", head_dim, 2)
    if head_dim % 2:
        raise ValueError(f"qkv: expected an even head_dim, got {head_dim}")
    for name, angles in (("cos", cos), ("sin", sin)):
        shape = (num_tokens, head_dim // 2)
        checks.expect_tensor(name, angles, shape, torch.float32, device=qkv.device)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        checks.expect_tensor(
            name, weight, (head_dim,), checks.MODEL_DTYPES, device=qkv.device, optional=True
        )
    if (k_weight is None) != (q_weight is None or num_kv_heads == 0):
        wanted = "None without q_weight or keys" if k_weight is not None else "one beside q_weight"
        raise ValueError(f"k_weight: expected {wanted}")
    if norm_v and num_kv_heads == 0:
        raise ValueError("norm_v: expected False without keys, got True")
    checks.expect_positive("eps", eps, least=-100)
    checks.expect_number("offset", offset)


@torch.no_grad()
def _torch(
    qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, norm_v, eps, offset, out
) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, eps)

    # In place where it can be: these rows are the largest that a layer moves.
    rotated = num_heads + num_kv_heads
    rows = qkv[:, :rotated].float() if q_weight is None else norm(qkv[:, :rotated])
    if q_weight is not None:
        rows[:, :num_heads].mul_(q_weight.float() + offset)
    if k_weight is not None:
        rows[:, num_heads:].mul_(k_weight.float() + offset)
    first, second = rows.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    low, high = out[:, :rotated].chunk(2, -1)
    low.copy_((first * cos).addcmul_(second, sin, value=-1))
    high.copy_((second * cos).addcmul_(first, sin))
    if norm_v:
        out[:, rotated:] = norm(qkv[:, qkv.shape[1] - num_kv_heads :])


@triton.jit
def _weights(weight, dim, offset):
    return (tl.load(weight + dim).to(tl.float32) + offset)[None, :]


@triton.jit
def _norm_rope_kernel(
    qkv, cos, sin, q_weight, k_weight, out, eps, offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, FIRST_VALUE: tl.constexpr,
    OUT_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    live = (head < OUT_HEADS)[:, None]
    dim = tl.arange(0, HALF)
    # Values may be the keys themselves.
    source = tl.where(head < ROTATED, head, head - ROTATED + FIRST_VALUE).to(tl.int64)
    cells = qkv.data + token * qkv.stride_token + source[:, None] * qkv.stride_head + dim[None, :]
    first = tl.load(cells, mask=live, other=0.0).to(tl.float32)
    second = tl.load(cells + HALF, mask=live, other=0.0).to(tl.float32)
    is_k = (head >= NUM_HEADS)[:, None]
    is_v = (head >= ROTATED)[:, None]
    if q_weight is not None or OUT_HEADS > ROTATED:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        if q_weight is None:
            factor = tl.where(is_v, factor, 1.0)
        first *= factor
        second *= factor
    if q_weight is not None:
        w1 = _weights(q_weight, dim, offset)
        w2 = _weights(q_weight, dim + HALF, offset)
        if k_weight is not None:
            w1 = tl.where(is_k, _weights(k_weight, dim, offset), w1)
            w2 = tl.where(is_k, _weights(k_weight, dim + HALF, offset), w2)
        first = tl.where(is_v, first, first * w1)
        second = tl.where(is_v, second, second * w2)
    c = tl.load(cos.data + token * cos.stride_row + dim)[None, :]
    s = tl.load(sin.data + token * sin.stride_row + dim)[None, :]
    low = tl.where(is_v, first, first * c - second * s)
    high = tl.where(is_v, second, second * c + first * s)
    cells = out + (token * OUT_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(cells, low.to(out.dtype.element_ty), mask=live)
    tl.store(cells + HALF, high.to(out.dtype.element_ty), mask=live)
