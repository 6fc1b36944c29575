"""FlashInfer. It compiles kernels with nvcc at their first use (``bench.kernels --compile``)."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cases.problem import Problem
from ..cases.shapes import LatentShape
from .folder import import_package
from .peer import Call, Peer, Unsupported

BACKEND = "fa2"
LAYOUT = "NHD"
WORKSPACE_BYTES = 256 * 2**20
TENSOR_CORE_DIM = 256  # largest head_dim of the kernels for grouped heads and prompts
MLA_BACKEND = "fa3"


def flashinfer_peer(folder: Path | None) -> Peer:
    """FlashInfer's attention; raises ImportError."""
    flashinfer = import_package(folder, "flashinfer")

    def prepare(problem: Problem) -> list[Call]:
        case, shape = problem.case, problem.case.shape
        if problem.shared["sinks"] is not None:
            raise Unsupported("sinks")
        if shape.head_dim > TENSOR_CORE_DIM and case.phase != "decode":
            raise Unsupported(f"head_dim above {TENSOR_CORE_DIM} in prefill")
        return _attention_calls(flashinfer, problem)

    return Peer("flashinfer", flashinfer.__version__, "plan() not timed", prepare)


def flashinfer_mla_peer(folder: Path | None) -> Peer:
    """FlashInfer's MLA; raises ImportError."""
    flashinfer = import_package(folder, "flashinfer")

    def prepare(problem: Problem) -> list[Call]:
        if problem.case.shape.op != "mla":
            raise Unsupported("no such operator")
        return _mla_calls(flashinfer, problem)

    note, version = "plan() not timed", flashinfer.__version__
    return Peer("flashinfer-mla", version, note, prepare, (LatentShape,))


def _attention_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    device, dtype = shared["seq_lens"].device, problem.results["out"].dtype
    count = -(-case.context // shape.block_size)
    last = case.context - (count - 1) * shape.block_size

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    indices = shared["block_table"][:, :count].flatten().contiguous()
    rows = ints([0, *accumulate([count] * case.batch)]), indices, ints([last] * case.batch)
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size
    options = {
        "window_left": -1 if shape.sliding_window is None else shape.sliding_window - 1,
        "sm_scale": shape.softmax_scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }
    scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if case.phase == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch, LAYOUT, use_tensor_cores=shape.head_dim <= TENSOR_CORE_DIM, backend=BACKEND
        )
        wrapper.plan(*rows, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, LAYOUT, backend=BACKEND)
        wrapper.plan(shared["cu_seqlens_q"], *rows, *heads, causal=True, **options)
    out = torch.full_like(problem.results["out"], float("nan"))

    def call(tensors: dict[str, Any]) -> Call:
        q, pages = tensors["q"], (tensors["k_pages"], tensors["v_pages"])
        return lambda: (wrapper.run(q, pages, out=out),)

    return [call(tensors) for tensors in problem.each]


def _mla_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    device, dtype = shared["seq_lens"].device, problem.results["out"].dtype
    count = -(-case.context // shape.rows)
    scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend=MLA_BACKEND)
    parts = [shape.head_dim_v, shape.head_dim - shape.head_dim_v]
    wrapper.plan(
        shared["cu_seqlens_q"],
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * count,
        shared["block_table"][:, :count].flatten().contiguous(),
        shared["seq_lens"],
        shape.num_heads,
        *parts,
        shape.rows,
        True,
        shape.softmax_scale,
        dtype,
        dtype,
    )
    out = torch.full_like(problem.results["out"], float("nan"))

    def call(tensors: dict[str, Any]) -> Call:
        inputs = (*tensors["q"].split(parts, -1), *tensors["pages"].split(parts, -1))
        return lambda: (wrapper.run(*inputs, out=out),)

    return [call(tensors) for tensors in problem.each]
