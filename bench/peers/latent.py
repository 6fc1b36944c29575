"""Who is compared on latent attention: quire's kernels, FlashMLA, and FlashInfer's MLA; see
`bench.peers.attention`.

Nobody else that can be imported here pools entries, chooses among them or writes such rows as
operators of their own, so those cases have no peer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.kernels import (
    compress,
    compressed_attention,
    compressed_attention_workspace_numel,
    index_topk,
    index_topk_workspace_numel,
    mla_attention,
    workspace_numel,
    write_latent,
)

from ..cases.latent_problem import AttentionProblem
from ..cases.latent_rows import EPS, IndexProblem, RowsProblem
from ..common.machine import describe_machine
from .flashinfer import flashinfer_mla_peer
from .flashmla import flashmla_peer
from .peer import Call, Peer, Unsupported, load_peers

LatentProblem = AttentionProblem | IndexProblem | RowsProblem


def find_latent_peers(folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """All implementations that can be imported here.

    Args:
        folder: as in `bench.peers.attention.find_peers`.

    Returns:
        The implementations, quire's first, and {name: why} of those that are missing.
    """
    commit = str(describe_machine(torch.device("cpu"))["commit"])
    ours = [
        Peer("quire", commit, "all rows in pages", quire_latent_calls, ours=True),
        Peer(
            "quire-in-step",
            commit,
            "in-step K/V beside the pages, inverse RoPE (angles of 0), as in the runner",
            _quire_in_step,
            ours=True,
        ),
    ]
    others = {
        "flashmla": flashmla_peer,
        "flashinfer-mla": flashinfer_mla_peer,
    }
    found, missing = load_peers(others, folder)
    return ours + found, missing


def quire_latent_calls(problem: LatentProblem, impl: str | None = None) -> list[Call]:
    """One call for each copy; all share results and workspace.

    Args:
        impl: as in ``quire.kernels``.
    """
    if isinstance(problem, IndexProblem):
        return _index_calls(problem, impl)
    if isinstance(problem, RowsProblem):
        return _write_calls(problem, impl) if problem.gate is None else _compress_calls(problem, impl)  # fmt: skip
    return attention_calls(problem, in_step=False, impl=impl)


def _quire_in_step(problem: LatentProblem) -> list[Call]:
    if not isinstance(problem, AttentionProblem):
        raise Unsupported("no attention")
    return attention_calls(problem, in_step=True)


def attention_calls(
    problem: AttentionProblem, *, in_step: bool, impl: str | None = None
) -> list[Call]:
    """One call of quire's attention for each copy.

    Args:
        problem: the tensors.
        in_step: in-step K/V beside the pages, and V4's inverse RoPE fused; its angles are 0, to the
            same result.
        impl: as in ``quire.kernels``.
    """
    case, shape = problem.case, problem.case.shape
    device, num_tokens = problem.q.device, problem.q.shape[1]
    value_dim = shape.head_dim_v if shape.op == "mla" else shape.head_dim
    size = (num_tokens, shape.num_heads, value_dim)
    out = torch.full(size, float("nan"), dtype=problem.q.dtype, device=device)
    lse = torch.full((shape.num_heads, num_tokens), float("nan"), device=device)
    options: dict[str, Any] = {
        "max_seqlen_q": case.q_lens[0],
        "max_seq_len": case.context,
        "num_decodes": case.num_decodes,
        "softmax_scale": shape.softmax_scale,
        "workspace": _workspace(problem, value_dim) if case.num_decodes else None,
        "out": out,
        "lse": lse,
        "impl": impl,
    }
    lengths = (problem.seq_lens, problem.cu_seqlens_q)
    if shape.op == "mla":
        options["head_dim_v"] = value_dim
    else:
        options |= {"sliding_window": shape.sliding_window, "sinks": problem.sinks}
        if problem.entries is not None:
            options |= {"compressed_table": problem.entry_table, "compress_ratio": shape.ratio}
            options["topk_lens"] = problem.topk_lens
        if in_step:
            zero = torch.zeros(case.context, shape.rope_dim // 2, device=device)
            options["cos_sin"] = torch.cat([zero.cos(), zero], 1)

    def call(copy: int) -> Call:
        q, rows = problem.q[copy], {"kv": problem.kv[copy]} if in_step else {}
        pages = None if problem.entries is None else problem.entries[copy]
        if problem.window is None:
            table = problem.entry_table
            return lambda: (mla_attention(q, pages, table, *lengths, **options, **rows), lse)
        window, table = problem.window[copy], problem.window_table
        if pages is not None:
            rows |= {"compressed_pages": pages}
        if problem.topk_indices is not None:
            rows |= {"topk_indices": problem.topk_indices[copy]}
        return lambda: (compressed_attention(q, window, table, *lengths, **options, **rows), lse)

    return [call(copy) for copy in range(problem.copies)]


def _workspace(problem: AttentionProblem, value_dim: int) -> Tensor | None:
    device, case = problem.q.device, problem.case
    if device.type != "cuda":
        return None
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if case.shape.op == "mla":
        numel = workspace_numel(
            num_decodes=case.num_decodes,
            max_seqlen_q=case.q_lens[0],
            num_heads=case.shape.num_heads,
            num_kv_heads=1,
            head_dim=value_dim,
            num_sms=num_sms,
        )
    else:
        numel = compressed_attention_workspace_numel(head_dim=value_dim, num_sms=num_sms)
    return torch.empty(numel, device=device)


def _index_calls(problem: IndexProblem, impl: str | None) -> list[Call]:
    case, shape = problem.case, problem.case.shape
    sizes = {"topk": shape.topk, "compress_ratio": shape.ratio, "max_seq_len": case.context}
    numel = index_topk_workspace_numel(num_tokens=case.num_tokens, **sizes)
    device = problem.q.device
    options = {
        "max_seqlen_q": case.q_lens[0],
        "out": torch.full((case.num_tokens, shape.topk), -2, dtype=torch.int32, device=device),
        "lens": torch.full((case.num_tokens,), -2, dtype=torch.int32, device=device),
        "workspace": torch.empty(numel, device=device),
        "impl": impl,
    }
    shared = (problem.block_table, problem.seq_lens, problem.cu_seqlens_q)

    def call(copy: int) -> Call:
        first = (problem.q[copy], problem.weights, problem.pages[copy])
        return lambda: index_topk(*first, *shared, **sizes, **options)

    return [call(copy) for copy in range(problem.copies)]


def _write_calls(problem: RowsProblem, impl: str | None) -> list[Call]:
    out = torch.full_like(problem.x[0], float("nan"))
    options = {
        "positions": problem.positions,
        "cos_sin": problem.cos_sin,
        "norm_weight": problem.norm_weight,
        "eps": EPS,
        "out": out,
        "impl": impl,
    }

    def call(copy: int) -> Call:
        first = (problem.x[copy], problem.pages[copy], problem.slot_mapping)
        return lambda: (write_latent(*first, **options),)

    return [call(copy) for copy in range(problem.copies)]


def _compress_calls(problem: RowsProblem, impl: str | None) -> list[Call]:
    case, shape = problem.case, problem.case.shape
    assert problem.gate is not None and problem.state is not None
    options = {
        "ratio": shape.ratio,
        "overlap": shape.overlap,
        "norm_weight": problem.norm_weight,
        "eps": EPS,
        "cos_sin": problem.cos_sin,
        "slot_mapping": problem.slot_mapping,
        "max_seqlen_q": case.q_lens[0],
        "impl": impl,
    }
    index = torch.arange(case.batch, dtype=torch.int32, device=problem.x.device)
    shared = (index, problem.seq_lens, problem.cu_seqlens_q)

    def call(copy: int) -> Call:
        rows = (problem.x[copy], problem.gate[copy], problem.ape, problem.state[copy])
        pages = problem.pages[copy]

        def run() -> tuple[()]:
            compress(*rows, *shared, pages=pages, **options)
            return ()

        return run

    return [call(copy) for copy in range(problem.copies)]
