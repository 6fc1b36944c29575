"""vLLM's Triton kernel of unified attention, without the rest of vLLM where it is not installed."""

from __future__ import annotations

import enum
import importlib
import logging
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cases.problem import Problem
from .folder import file_in, installed
from .peer import Call, Peer

# As in vLLM: KV splits of a decode, for batches of at most this many sequences times KV heads.
SEGMENTS = 16
GRID_2D = 128


def vllm_triton_peer(folder: Path | None) -> Peer:
    """vLLM's Triton unified attention.

    Raises:
        FileNotFoundError, ImportError.
    """
    version = installed("vllm")
    if version is None:
        path = file_in(folder, "vllm/v1/attention/ops/triton_unified_attention.py")
        if "vllm" not in sys.modules:
            _stub_vllm(path.parent)
        version = "0.33.0"
    module = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")

    def prepare(problem: Problem) -> list[Call]:
        case, shape, shared = problem.case, problem.case.shape, problem.shared
        device = shared["seq_lens"].device
        rows = max(1, GRID_2D // shape.num_kv_heads)
        parts = (max(rows, case.batch), shape.num_heads, SEGMENTS)
        out = torch.full_like(problem.results["out"], float("nan"))
        window = (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)
        options = {
            "out": out,
            "cu_seqlens_q": shared["cu_seqlens_q"],
            "max_seqlen_q": max(case.q_lens),
            "seqused_k": shared["seq_lens"],
            "max_seqlen_k": case.context,
            "softmax_scale": shape.softmax_scale,
            "causal": True,
            "window_size": window,
            "block_table": shared["block_table"],
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            "seq_threshold_3D": rows,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": torch.empty(*parts, shape.head_dim, device=device),
            "softmax_segm_max": torch.empty(parts, device=device),
            "softmax_segm_expsum": torch.empty(parts, device=device),
            "sinks": shared["sinks"],
        }

        def call(copy: int) -> Call:
            tensors = [problem.each[copy][name] for name in ("q", "k_pages", "v_pages")]

            def run() -> tuple[Tensor]:
                module.unified_attention(*tensors, **options)
                return (out,)

            return run

        return [call(copy) for copy in range(problem.copies)]

    return Peer("vllm-triton", version, "its own split rule", prepare)


def _stub_vllm(ops: Path) -> None:
    """Put modules into ``sys.modules`` with the names that vLLM's attention kernels import."""
    import triton
    import triton.language as tl

    modes = (
        "NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD",
        "INT4_PER_TOKEN_HEAD", "NVFP4",
    )  # fmt: skip
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda family: False
    )
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": _logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": enum.IntEnum("KVQuantMode", modes, start=0)},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {"__path__": [str(ops)]},
    }
    for name, names in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []  # a package: its submodules are looked up in sys.modules first
        module.__dict__.update(names)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.debug_once = logger.debug  # vLLM's own addition
    return logger
