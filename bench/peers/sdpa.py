"""Torch's scaled_dot_product_attention, over contiguous copies of K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cases.problem import Problem, stored
from .peer import Call, Unsupported

MAX_CONTIGUOUS_BYTES = 12 * 2**30


def sdpa(problem: Problem) -> list[Call]:
    """One call for each copy. The causal mask needs KV heads that are repeated beforehand."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    case, shape = problem.case, problem.case.shape
    q_len = case.q_lens[0]
    if case.phase == "mixed":
        raise Unsupported("unequal lengths in a batch")
    if problem.shared["sinks"] is not None:
        raise Unsupported("sinks")
    if problem.copies * case.cache_bytes > MAX_CONTIGUOUS_BYTES:
        raise Unsupported("a contiguous copy of K and V would not fit")
    if shape.sliding_window is not None and q_len > 1:
        raise Unsupported("a window and several queries: needs a dense mask")

    def call(copy: int) -> Call:
        seen = range(shape.lowest(case.new[0].start), case.context)
        rows = [stored(problem, seq, copy, seen) for seq in range(case.batch)]
        k, v = (torch.stack(part).transpose(1, 2) for part in zip(*rows, strict=True))
        q = problem.each[copy]["q"].unflatten(0, (case.batch, -1)).transpose(1, 2)
        options = {"scale": shape.softmax_scale, "enable_gqa": q_len == 1}
        if q_len > 1:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            options["attn_mask"] = causal_lower_right(q_len, k.shape[2])

        def run() -> tuple[Tensor]:
            out = scaled_dot_product_attention(q, k, v, **options)
            return (out.transpose(1, 2).flatten(0, 1),)

        return run

    return [call(copy) for copy in range(problem.copies)]
