"""Norms by head and RoPE in one pass over the merged projection.

    y  = x * rsqrt(mean(x^2) + eps) * (w + offset)      (optional; values: w + offset = 1)
    y1 cos - y2 sin | y2 cos + y1 sin                   (queries and keys; y1 | y2 halves of a head)

in fp32, rounded once. One program takes a token and some of its heads, each as two halves.

Layout: qkv, out [num_tokens, heads, head_dim] of any strides; cos, sin [num_tokens, head_dim / 2].
Bound by memory: each head is read once (twice where keys are values too) and written once.

Source: RoFormer (arXiv 2104.09864).
"""

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.checks import expect_head_dim
from ..common.launching import Launch, run
from ..common.tile_shapes import next_power_of_2
from .call import out_heads

ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _weights(weight, dim, offset):
    return (tl.load(weight + dim).to(tl.float32) + offset)[None, :]


@triton.jit
def _norm_rope_kernel(
    qkv, cos, sin, q_weight, k_weight, out, eps, offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, VALUES: tl.constexpr,
    OUT_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    live = (head < OUT_HEADS)[:, None]
    dim = tl.arange(0, HALF)
    # VALUES: the first head that is one of values, which may be keys too.
    source = tl.where(head < ROTATED, head, head - ROTATED + VALUES).to(tl.int64)
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
    head = head.to(tl.int64)[:, None]
    cells = out.data + token * out.stride_token + head * out.stride_head + dim[None, :]
    dtype = out.data.dtype.element_ty
    tl.store(cells, low.to(dtype), mask=live)
    tl.store(cells + HALF, high.to(dtype), mask=live)


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
    """Launch checked arguments, shaped as in ``quire.kernels.norm_rope``; returns ``out``."""
    num_tokens, heads, head_dim = qkv.shape
    expect_head_dim("qkv", head_dim)
    if out is None:
        shape = (num_tokens, out_heads(heads, num_kv_heads, has_v, norm_v), head_dim)
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    launch = prepare(
        qkv, cos, sin, num_kv_heads, has_v, q_weight, k_weight, norm_v, eps, offset, out
    )
    run([launch], qkv)
    return out


def prepare(
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
    out: torch.Tensor,
) -> Launch:
    """The launch of checked arguments, shaped as in ``quire.kernels.norm_rope``."""
    num_tokens, heads, head_dim = qkv.shape
    count = out.shape[1]
    block = min(next_power_of_2(max(1, count)), max(1, ELEMENTS_PER_PROGRAM // head_dim))
    return Launch(
        _norm_rope_kernel,
        (num_tokens, triton.cdiv(count, block)),
        {
            "qkv": strided.rows(qkv),
            "cos": strided.matrix(cos),
            "sin": strided.matrix(sin),
            "q_weight": q_weight,
            "k_weight": k_weight,
            "out": strided.rows(out),
            "eps": float(eps),
            "offset": float(offset),
            "NUM_HEADS": heads - num_kv_heads * (1 + has_v),
            "NUM_KV_HEADS": num_kv_heads,
            "VALUES": heads - num_kv_heads,
            "OUT_HEADS": count,
            "HEAD_DIM": head_dim,
            "BLOCK_HEADS": block,
            "num_warps": 4,
        },
    )
