"""FlashInfer. It compiles kernels with nvcc at their first use (``bench.kernels --compile``)."""

from __future__ import annotations

from functools import partial
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
NOTE = "plan() not timed"


def flashinfer_peer(folder: Path | None) -> Peer:
    """FlashInfer's attention; raises ImportError."""
    package = import_package(folder, "flashinfer")
    return Peer("flashinfer", package.__version__, NOTE, partial(attention_calls, package))


def flashinfer_mla_peer(folder: Path | None) -> Peer:
    """FlashInfer's MLA; raises ImportError."""
    package = import_package(folder, "flashinfer")
    calls = partial(mla_calls, package)
    return Peer("flashinfer-mla", package.__version__, NOTE, calls, (LatentShape,))


def attention_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    """Attention over pages; raises Unsupported."""
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    if shared["sinks"] is not None:
        raise Unsupported("sinks")
    if shape.head_dim > TENSOR_CORE_DIM and case.phase != "decode":
        raise Unsupported(f"head_dim above {TENSOR_CORE_DIM} in prefill")
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


def mla_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    """MLA over pages; raises Unsupported."""
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    if shape.op != "mla":
        raise Unsupported("no such operator")
    device, dtype = shared["seq_lens"].device, problem.results["out"].dtype
    count = -(-case.context // shape.rows)
    scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend=MLA_BACKEND)
    parts = [shape.head_dim_v, shape.head_dim - shape.head_dim_v]
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * count
    indices = shared["block_table"][:, :count].flatten().contiguous()
    wrapper.plan(
        shared["cu_seqlens_q"], starts, indices, shared["seq_lens"], shape.num_heads, *parts,
        shape.rows, True, shape.softmax_scale, dtype, dtype,
    )  # fmt: skip
    out = torch.full_like(problem.results["out"], float("nan"))

    def call(tensors: dict[str, Any]) -> Call:
        inputs = (*tensors["q"].split(parts, -1), *tensors["pages"].split(parts, -1))
        return lambda: (wrapper.run(*inputs, out=out),)

    return [call(tensors) for tensors in problem.each]
