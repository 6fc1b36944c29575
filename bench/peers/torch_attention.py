"""Attention of torch itself: SDPA and FlexAttention, over contiguous copies of K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cases.problem import Problem
from .peer import Call, Unsupported

# Implementations that read no pages get contiguous copies of K and V up to this size.
MAX_CONTIGUOUS_BYTES = 12 * 2**30


def contiguous(problem: Problem) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q [batch, num_heads, q_len, head_dim] and K, V [batch, num_kv_heads, keys, head_dim] of every
    copy, only keys that are seen.

    Raises:
        Unsupported for batches of unequal lengths, sinks, and keys that would not fit.
    """
    case = problem.case
    if case.phase == "mixed":
        raise Unsupported("unequal lengths in a batch")
    if problem.sinks is not None:
        raise Unsupported("sinks")
    if problem.copies * case.cache_bytes > MAX_CONTIGUOUS_BYTES:
        raise Unsupported("a contiguous copy of K and V would not fit")
    found = []
    for copy in range(problem.copies):
        rows = [problem.gathered(s, copy, problem.lowest_visible(s)) for s in range(case.batch)]
        k, v = (torch.stack(part).transpose(1, 2) for part in zip(*rows, strict=True))
        q = problem.q[copy].unflatten(0, (case.batch, -1)).transpose(1, 2)
        found.append((q, k, v))
    return found


def sdpa(problem: Problem) -> list[Call]:
    """torch's scaled_dot_product_attention; keys of grouped heads are repeated beforehand where its
    causal mask needs that.
    """
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    q_len = problem.case.q_lens[0]
    if problem.case.shape.sliding_window is not None and q_len > 1:
        raise Unsupported("a window and several queries: needs a dense mask")
    calls = []
    for q, k, v in contiguous(problem):
        if q_len > 1:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        options = {"scale": problem.softmax_scale, "enable_gqa": q_len == 1}
        if q_len > 1:
            options["attn_mask"] = causal_lower_right(q_len, k.shape[2])

        def call(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, options: dict = options
        ) -> tuple[Tensor]:
            out = scaled_dot_product_attention(q, k, v, **options)
            return (out.transpose(1, 2).flatten(0, 1),)

        calls.append(call)
    return calls


def flex(problem: Problem) -> list[Call]:
    """torch's FlexAttention with a block mask, compiled on a GPU, eager on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tensors = contiguous(problem)
    q, k, _ = tensors[0]
    offset, window = k.shape[2] - q.shape[2], problem.case.shape.sliding_window

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        return (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device)
    attend = torch.compile(flex_attention) if q.is_cuda else flex_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        options = {"block_mask": mask, "scale": problem.softmax_scale, "enable_gqa": True}
        return lambda: (attend(q, k, v, **options).transpose(1, 2).flatten(0, 1),)

    return [call(*three) for three in tensors]
