"""FlashAttention-3 as vLLM builds it: an operator registered with torch."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..cases.problem import Problem
from .peer import Call, Peer, Unsupported, load_operators, unwritten

# Arguments of the operator that are neither tensors nor None, by the names of its schema.
DEFAULTS = {
    "softcap": 0.0, "is_causal": True, "is_rotary_interleaved": True, "num_splits": 0,
    "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip


def fa3_peer(folder: Path | None) -> Peer:
    forward = load_operators(folder, "_vllm_fa3_C").fwd

    def prepare(problem: Problem) -> list[Call]:
        case, shape, shared = problem.case, problem.case.shape, problem.shared
        if shape.head_dim > 256:
            raise Unsupported("head_dim above 256")
        window, sinks, out = shape.sliding_window, shared["sinks"], unwritten(problem)
        values = DEFAULTS | {
            "out": out,
            "cu_seqlens_q": shared["cu_seqlens_q"],
            "seqused_k": shared["seq_lens"],
            "max_seqlen_q": max(case.q_lens),
            "max_seqlen_k": case.context,
            "page_table": shared["block_table"],
            "softmax_scale": shape.softmax_scale,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": -1 if window is None else 0,
            "s_aux": None if sinks is None else sinks.to(out.dtype),
        }
        names = [argument.name for argument in forward.default._schema.arguments][3:]
        if lacking := sorted(set(values) - set(DEFAULTS) - set(names)):
            raise Unsupported(f"the operator has no argument {lacking}")
        rest = [values.get(name) for name in names]

        def call(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Call:
            return lambda: (forward(q, k_pages, v_pages, *rest)[0],)

        return [call(**tensors) for tensors in problem.each]

    return Peer("fa3", "as vLLM builds it", "num_splits chosen by it", prepare)
