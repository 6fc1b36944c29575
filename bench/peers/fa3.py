"""FlashAttention-3 as vLLM builds it: an operator registered with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..cases.problem import Problem
from .folder import expect_nvidia, file_in
from .peer import Call, Peer, Unsupported


def fa3_peer(folder: Path | None) -> Peer:
    """FlashAttention-3.

    Raises:
        FileNotFoundError, OSError where its library cannot be loaded.
        NotImplementedError: under ROCm.
    """
    expect_nvidia("FlashAttention-3")
    library = file_in(folder, "_vllm_fa3_C.abi3.so")
    torch.ops.load_library(str(library))
    forward = torch.ops._vllm_fa3_C.fwd

    def prepare(problem: Problem) -> list[Call]:
        case, shape = problem.case, problem.case.shape
        if shape.head_dim > 256:
            raise Unsupported("head_dim above 256")
        left = -1 if shape.sliding_window is None else shape.sliding_window - 1
        right = -1 if shape.sliding_window is None else 0
        sinks = None if problem.sinks is None else problem.sinks.to(problem.q.dtype)
        out = torch.full_like(problem.q[0], float("nan"))
        named = {
            "out": out,
            "cu_seqlens_q": problem.cu_seqlens_q,
            "seqused_k": problem.seq_lens,
            "max_seqlen_q": max(case.q_lens),
            "max_seqlen_k": max(case.seq_lens),
            "page_table": problem.block_table,
            "softmax_scale": problem.softmax_scale,
            "is_causal": True,
            "window_size_left": left,
            "window_size_right": right,
            "s_aux": sinks,
        }
        positions = _positions(forward.default._schema, named)

        def call(copy: int) -> Call:
            first = (problem.q[copy], problem.k_pages(copy), problem.v_pages(copy))
            return lambda: (forward(*first, *positions)[0],)

        return [call(copy) for copy in range(problem.copies)]

    return Peer("fa3", "vLLM 0.33.0 build", "num_splits chosen by it", prepare)


# Values of the FA3 operator's arguments that are neither tensors of the problem nor None, by the
# names of its schema.
FA3_DEFAULTS = {"softcap": 0.0, "is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}  # fmt: skip


def _positions(schema: Any, named: dict[str, Any]) -> list[Any]:
    """Arguments after q, k, v in the order of an operator's schema.

    Raises:
        Unsupported when the schema lacks a name.
    """
    names = [argument.name for argument in schema.arguments]
    lacking = sorted(set(named) - set(names))
    if lacking:
        raise Unsupported(f"the operator has no argument {lacking}")
    values = FA3_DEFAULTS | named
    return [values.get(name) for name in names[3:]]
