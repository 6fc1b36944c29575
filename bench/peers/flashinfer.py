"""FlashInfer. It compiles kernels with nvcc at their first use (``bench.kernels --compile``)."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cases.problem import Problem
from .peer import Call, Peer, Unsupported, import_package, unwritten

LAYOUT = "NHD"
WORKSPACE_BYTES = 256 * 2**20
TENSOR_CORE_DIM = 256  # largest head_dim of the kernels for grouped heads and prompts
NOTE = "plan() not timed"


def flashinfer_peer(folder: Path | None) -> Peer:
    package = import_package(folder, "flashinfer")
    return Peer("flashinfer", package.__version__, NOTE, partial(attention_calls, package))


def flashinfer_mla_peer(folder: Path | None) -> Peer:
    package = import_package(folder, "flashinfer")
    calls = partial(mla_calls, package)
    return Peer("flashinfer-mla", package.__version__, NOTE, calls, ("mla",))


def scratch(problem: Problem) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.results["out"].device)


def attention_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    if shared["sinks"] is not None:
        raise Unsupported("sinks")
    if shape.head_dim > TENSOR_CORE_DIM and case.phase != "decode":
        raise Unsupported(f"head_dim above {TENSOR_CORE_DIM} in prefill")
    out, count = unwritten(problem), -(-case.context // shape.rows)
    last = case.context - (count - 1) * shape.rows
    ints = partial(torch.tensor, dtype=torch.int32, device=out.device)
    indices = shared["block_table"][:, :count].flatten().contiguous()
    rows = ints([0, *accumulate([count] * case.batch)]), indices, ints([last] * case.batch)
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rows
    options = {
        "window_left": -1 if shape.sliding_window is None else shape.sliding_window - 1,
        "sm_scale": shape.softmax_scale,
        "q_data_type": out.dtype,
        "kv_data_type": out.dtype,
    }
    arguments, backend = (scratch(problem), LAYOUT), {"backend": "fa2"}
    if case.phase == "decode":
        backend["use_tensor_cores"] = shape.head_dim <= TENSOR_CORE_DIM
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(*arguments, **backend)
        wrapper.plan(*rows, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(*arguments, **backend)
        wrapper.plan(shared["cu_seqlens_q"], *rows, *heads, causal=True, **options)

    def call(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Call:
        return lambda: (wrapper.run(q, (k_pages, v_pages), out=out),)

    return [call(**tensors) for tensors in problem.each]


def mla_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    out, count = unwritten(problem), -(-case.context // shape.rows)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch(problem), backend="fa3")
    parts = [shape.head_dim_v, shape.head_dim - shape.head_dim_v]
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=out.device) * count
    indices = shared["block_table"][:, :count].flatten().contiguous()
    wrapper.plan(
        shared["cu_seqlens_q"], starts, indices, shared["seq_lens"], shape.num_heads, *parts,
        shape.rows, True, shape.softmax_scale, out.dtype, out.dtype,
    )  # fmt: skip

    def call(q: Tensor, pages: Tensor) -> Call:
        inputs = (*q.split(parts, -1), *pages.split(parts, -1))
        return lambda: (wrapper.run(*inputs, out=out),)

    return [call(**tensors) for tensors in problem.each]
