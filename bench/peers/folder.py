"""Peers that are GPU packages of others: installed ones, or files in a folder, for machines that cannot install.

The folder holds, packed or unpacked: ``_vllm_fa3_C.abi3.so`` and ``_flashmla_C.abi3.so`` (FlashAttention-3 and FlashMLA as vLLM builds them,
their operators registered with torch; `bench.peers.flashmla`),
``vllm/v1/attention/ops`` (vLLM's Triton kernels, which need a few modules of vLLM in name only), and the packages ``flashinfer`` and
``tvm_ffi`` (`bench.peers.flashinfer`).
"""

from __future__ import annotations

import enum
import importlib
import logging
import lzma
import shutil
import sys
import tarfile
import types
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cases.problem import Problem
from .attention import Call, Peer, Unsupported

# vLLM splits the keys of a decode in this many parts, while the batch is at most this many sequences over KV heads.
VLLM_SEGMENTS = 16
VLLM_GRID_2D = 128


def unpack(source: Path, target: Path) -> Path:
    """Unpacks ``*.so.xz``, ``*.tar.xz`` and ``*.whl`` of a folder into another one; files already there are kept.

    Returns: the folder to load from: ``source`` itself when nothing in it is packed.
    """
    packed = [p for p in sorted(source.iterdir()) if p.name.endswith((".xz", ".whl"))]
    if not packed:
        return source
    target.mkdir(parents=True, exist_ok=True)
    for path in packed:
        done = target / f".{path.name}.done"
        if done.exists():
            continue
        if path.name.endswith(".tar.xz"):
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")
        elif path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(target)
        else:
            with lzma.open(path) as compressed, open(target / path.stem, "wb") as file:
                shutil.copyfileobj(compressed, file, 1 << 22)
        done.touch()
    return target


def fa3_peer(folder: Path | None) -> Peer:
    """FlashAttention-3. Raises: FileNotFoundError, OSError where its library cannot be loaded."""
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


# Values of the FA3 operator's arguments that are neither tensors of the problem nor None, by the names of its schema.
FA3_DEFAULTS = {"softcap": 0.0, "is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}  # fmt: skip


def _positions(schema: Any, named: dict[str, Any]) -> list[Any]:
    """Arguments after q, k, v in the order of an operator's schema. Raises: Unsupported when the schema lacks a name."""
    names = [argument.name for argument in schema.arguments]
    lacking = sorted(set(named) - set(names))
    if lacking:
        raise Unsupported(f"the operator has no argument {lacking}")
    values = FA3_DEFAULTS | named
    return [values.get(name) for name in names[3:]]


def vllm_triton_peer(folder: Path | None) -> Peer:
    """vLLM's Triton unified attention. Raises: FileNotFoundError, ImportError."""
    name = "vllm.v1.attention.ops.triton_unified_attention"
    version = installed("vllm")
    if version is None:
        path = file_in(folder, "vllm/v1/attention/ops/triton_unified_attention.py")
        if "vllm" not in sys.modules:
            _stub_vllm(path.parent)
        version = "0.33.0"
    unified = importlib.import_module(name).unified_attention

    def prepare(problem: Problem) -> list[Call]:
        case, shape = problem.case, problem.case.shape
        device = problem.q.device
        rows = max(1, VLLM_GRID_2D // shape.num_kv_heads)
        parts = (max(rows, case.batch), shape.num_heads, VLLM_SEGMENTS)
        out = torch.full_like(problem.q[0], float("nan"))
        window = (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)
        options = {
            "out": out,
            "cu_seqlens_q": problem.cu_seqlens_q,
            "max_seqlen_q": max(case.q_lens),
            "seqused_k": problem.seq_lens,
            "max_seqlen_k": max(case.seq_lens),
            "softmax_scale": problem.softmax_scale,
            "causal": True,
            "window_size": window,
            "block_table": problem.block_table,
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            "seq_threshold_3D": rows,
            "num_par_softmax_segments": VLLM_SEGMENTS,
            "softmax_segm_output": torch.empty(*parts, shape.head_dim, device=device),
            "softmax_segm_max": torch.empty(parts, device=device),
            "softmax_segm_expsum": torch.empty(parts, device=device),
            "sinks": problem.sinks,
        }

        def call(copy: int) -> Call:
            first = (problem.q[copy], problem.k_pages(copy), problem.v_pages(copy))

            def run() -> tuple[Tensor]:
                unified(*first, **options)
                return (out,)

            return run

        return [call(copy) for copy in range(problem.copies)]

    return Peer("vllm-triton", version, "its own split rule", prepare)


def _stub_vllm(ops: Path) -> None:
    """Modules that vLLM's attention kernels import, with just the names that they use, so that the rest of vLLM is not needed."""
    import triton
    import triton.language as tl

    modes = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "NVFP4")  # fmt: skip
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


def installed(distribution: str) -> str | None:
    """Version of an installed package; a folder of the same name somewhere on the path is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def file_in(folder: Path | None, name: str) -> Path:
    """A file of the folder. Raises: FileNotFoundError naming what would help."""
    if folder is None:
        raise FileNotFoundError("not installed, and no --peers folder")
    if not (folder / name).exists():
        raise FileNotFoundError(f"not installed, and the folder has no {name}")
    return folder / name
