"""Attention of torch itself: SDPA and FlexAttention, over contiguous copies of K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cases.attention import gathered, lowest_visible
from ..cases.problem import Problem
from .peer import Call, Unsupported

MAX_CONTIGUOUS_BYTES = 12 * 2**30


def contiguous(problem: Problem) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q [batch, num_heads, q_len, head_dim] and visible K, V [batch, num_kv_heads, keys, head_dim]
    of every copy.

    Raises:
        Unsupported: unequal lengths in the batch, sinks, or keys that would not fit.
    """
    case = problem.case
    if case.phase == "mixed":
        raise Unsupported("unequal lengths in a batch")
    if problem.shared["sinks"] is not None:
        raise Unsupported("sinks")
    if problem.copies * case.cache_bytes > MAX_CONTIGUOUS_BYTES:
        raise Unsupported("a contiguous copy of K and V would not fit")
    found = []
    for copy in range(problem.copies):
        rows = [gathered(problem, s, copy, lowest_visible(case, s)) for s in range(case.batch)]
        k, v = (torch.stack(part).transpose(1, 2) for part in zip(*rows, strict=True))
        q = problem.each[copy]["q"].unflatten(0, (case.batch, -1)).transpose(1, 2)
        found.append((q, k, v))
    return found


def sdpa(problem: Problem) -> list[Call]:
    """Torch's scaled_dot_product_attention. Its causal mask needs KV heads that are repeated
    beforehand.
    """
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    shape, q_len = problem.case.shape, problem.case.q_lens[0]
    if shape.sliding_window is not None and q_len > 1:
        raise Unsupported("a window and several queries: needs a dense mask")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        options = {"scale": shape.softmax_scale, "enable_gqa": q_len == 1}
        if q_len > 1:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            options["attn_mask"] = causal_lower_right(q_len, k.shape[2])
        return lambda: (
            scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(0, 1),
        )

    return [call(*tensors) for tensors in contiguous(problem)]


def flex(problem: Problem) -> list[Call]:
    """Torch's FlexAttention with a block mask, compiled on a GPU, eager on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tensors, shape = contiguous(problem), problem.case.shape
    q, k, _ = tensors[0]
    offset, window = k.shape[2] - q.shape[2], shape.sliding_window

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        return (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device)
    attend = torch.compile(flex_attention) if q.is_cuda else flex_attention
    options = {"block_mask": mask, "scale": shape.softmax_scale, "enable_gqa": True}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: (attend(q, k, v, **options).transpose(1, 2).flatten(0, 1),)

    return [call(*each) for each in tensors]
