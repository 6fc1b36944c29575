"""Unified attention of vLLM, in Triton."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from ..cases.problem import Problem
from .peer import Call, Peer, import_package, unwritten

# As in vLLM: KV splits of a decode, for batches of at most this many sequences times KV heads.
SEGMENTS = 16
GRID_2D = 128


def vllm_triton_peer(folder: Path | None) -> Peer:
    module = import_package(folder, "vllm.v1.attention.ops.triton_unified_attention")

    def prepare(problem: Problem) -> list[Call]:
        case, shape, shared = problem.case, problem.case.shape, problem.shared
        out, rows = unwritten(problem), max(1, GRID_2D // shape.num_kv_heads)
        parts, window = (max(rows, case.batch), shape.num_heads, SEGMENTS), shape.sliding_window
        options = {
            "out": out,
            "cu_seqlens_q": shared["cu_seqlens_q"],
            "max_seqlen_q": max(case.q_lens),
            "seqused_k": shared["seq_lens"],
            "max_seqlen_k": case.context,
            "softmax_scale": shape.softmax_scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "block_table": shared["block_table"],
            "softcap": 0.0,
            **dict.fromkeys(("q_descale", "k_descale", "v_descale")),
            "seq_threshold_3D": rows,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": torch.empty(*parts, shape.head_dim, device=out.device),
            "softmax_segm_max": torch.empty(parts, device=out.device),
            "softmax_segm_expsum": torch.empty(parts, device=out.device),
            "sinks": shared["sinks"],
        }

        def call(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Call:
            def run() -> tuple[Tensor]:
                module.unified_attention(q, k_pages, v_pages, **options)
                return (out,)

            return run

        return [call(**tensors) for tensors in problem.each]

    return Peer("vllm-triton", metadata.version("vllm"), "its own split rule", prepare)
