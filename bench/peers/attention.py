"""Who is compared on attention: quire's kernels, and every other implementation that this machine
has.

Each makes its calls over the same tensors. An implementation is prepared once per case: whatever
depends on lengths alone (FlashInfer's ``plan()``, masks, contiguous copies for those that cannot
read pages) happens there, outside of the time that is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quire.kernels import paged_attention, sliding_window_attention, workspace_numel

from ..cases.problem import Problem
from ..common.machine import describe_machine
from .fa3 import fa3_peer
from .flashinfer import flashinfer_peer
from .peer import Call, Peer, load_peers
from .torch_attention import flex, sdpa
from .vllm_triton import vllm_triton_peer


def find_peers(folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """All implementations that can be imported here.

    Args:
        folder: of `bench.peers.folder`, or None.

    Returns:
        The implementations, quire's first, and {name: why} of those that are missing.
    """
    found = [
        Peer("quire", _commit(), "all keys in pages", _quire, ours=True),
        Peer(
            "quire-in-step",
            _commit(),
            "in-step K/V beside the pages, as in the runner",
            _quire_in_step,
            ours=True,
        ),
    ]
    loaded, missing = load_peers(
        {
            "flashinfer": flashinfer_peer,
            "fa3": fa3_peer,
            "vllm-triton": vllm_triton_peer,
        },
        folder,
    )
    found += loaded
    found.append(Peer("sdpa", torch.__version__, "contiguous K/V", sdpa))
    found.append(Peer("flex", torch.__version__, "contiguous K/V", flex))
    return found, missing


def _commit() -> str:
    return str(describe_machine(torch.device("cpu"))["commit"])


def _quire(problem: Problem) -> list[Call]:
    return quire_calls(problem, in_step=False)


def _quire_in_step(problem: Problem) -> list[Call]:
    return quire_calls(problem, in_step=True)


def quire_calls(problem: Problem, *, in_step: bool, impl: str | None = None) -> list[Call]:
    """One call of quire's attention for each copy; all share ``out``, ``lse`` and ``workspace``.

    Args:
        problem: the tensors.
        in_step: pass in-step K/V beside the pages.
        impl: as in ``quire.kernels.paged_attention``.
    """
    case, shape = problem.case, problem.case.shape
    device = problem.q.device
    max_seqlen_q = max(case.q_lens)
    workspace = None
    if device.type == "cuda" and case.num_decodes:
        numel = workspace_numel(
            num_decodes=case.num_decodes,
            max_seqlen_q=max_seqlen_q if case.num_decodes == case.batch else 1,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        )
        workspace = torch.empty(numel, dtype=torch.float32, device=device)
    options: dict[str, Any] = {
        "max_seqlen_q": max_seqlen_q,
        "max_seq_len": max(case.seq_lens),
        "num_decodes": case.num_decodes,
        "softmax_scale": problem.softmax_scale,
        "sinks": problem.sinks,
        "workspace": workspace,
        "impl": impl,
        "out": torch.full_like(problem.q[0], float("nan")),
    }
    lse = torch.full((shape.num_heads, problem.q.shape[1]), float("nan"), device=device)
    options["lse"] = lse
    attend = paged_attention
    if shape.sliding_window is not None:
        attend, options["sliding_window"] = sliding_window_attention, shape.sliding_window

    def call(copy: int) -> Call:
        tensors = (problem.q[copy], problem.k_pages(copy), problem.v_pages(copy))
        lengths = (problem.block_table, problem.seq_lens, problem.cu_seqlens_q)
        rows = {"k": problem.k[copy], "v": problem.v[copy]} if in_step else {}
        rows |= problem.row_scales(copy)
        return lambda: (attend(*tensors, *lengths, **options, **rows), lse)

    return [call(copy) for copy in range(problem.copies)]
