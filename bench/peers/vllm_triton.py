"""Unified attention of vLLM, in Triton.

Its sources alone do: for what they import of the rest of vLLM, where that is not installed, there
are stand-ins.
"""

from __future__ import annotations

import enum
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from ..cases.problem import Problem
from .peer import Call, Peer, import_package, unwritten

# As in vLLM: KV splits of a decode, for batches of at most this many sequences times KV heads.
SEGMENTS = 16
GRID_2D = 128
MODULE = "vllm.v1.attention.ops.triton_unified_attention"


class KVQuantMode(enum.IntEnum):
    """As in ``vllm.v1.kv_cache_interface``; the kernel takes the number."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def load(folder: Path | None) -> tuple[Any, str]:
    """The module and its version: of the whole package, or of sources in a folder."""
    try:
        return import_package(folder, MODULE), metadata.version("vllm")
    except ImportError:
        if folder is None or not (folder / MODULE.replace(".", "/")).with_suffix(".py").is_file():
            raise
    for name, values in stand_ins().items():
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(values)
    return import_package(folder, MODULE), "sources of its wheel"


def stand_ins() -> dict[str, dict[str, Any]]:
    """{module that the sources import: what they use of it}."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=lambda family: capability[0] == family // 10,
    )
    logger = SimpleNamespace(debug_once=lambda *message: None)
    return {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
    }


def vllm_triton_peer(folder: Path | None) -> Peer:
    module, version = load(folder)

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

    return Peer("vllm-triton", version, "its own split rule", prepare)
