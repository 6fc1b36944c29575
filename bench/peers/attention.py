"""Who is compared: quire's kernels, and every other implementation that this machine has. Each makes its calls over the same tensors.

An implementation is prepared once per case: whatever depends on lengths alone (FlashInfer's ``plan()``, masks, contiguous copies for
those that cannot read pages) happens there, outside of the time that is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.kernels import paged_attention, sliding_window_attention, workspace_numel

from ..cases.problem import Problem

Call = Callable[[], tuple[Tensor, ...]]
"""Computes one copy; returns what ``wrong`` of what is expected takes: for attention (out,) or (out, lse), [num_tokens, num_heads, head_dim] and
[num_heads, num_tokens] in natural log."""

# Implementations that read no pages get contiguous copies of K and V up to this size.
MAX_CONTIGUOUS_BYTES = 12 * 2**30


class Unsupported(Exception):
    """An implementation cannot do a case; the message says why."""


@dataclass(frozen=True)
class Peer:
    """An implementation.

    name: short, for tables and ``--impl``. version: of the package. note: what differs in its work, or "".
    prepare: (problem of the peer's family, `bench.kernels.families`) -> one call for each copy. Raises Unsupported.
    ours: whether a wrong result of it is a bug of this repository.
    """

    name: str
    version: str
    note: str
    prepare: Callable[[Any], list[Call]]
    ours: bool = False


def find_peers(folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """All implementations that can be imported here, quire's first, and {name: why} of those that are missing.

    folder: of `bench.peers.folder`, or None.
    """
    from . import flashinfer as peers_flashinfer
    from . import folder as peers_folder

    found = [
        Peer("quire", _commit(), "all keys in pages", _quire, ours=True),
        Peer("quire-fresh", _commit(), "new rows beside the pages, as in the runner", _quire_fresh, ours=True),
    ]  # fmt: skip
    loaded, missing = load_peers(
        {
            "flashinfer": peers_flashinfer.flashinfer_peer,
            "fa3": peers_folder.fa3_peer,
            "vllm-triton": peers_folder.vllm_triton_peer,
        },
        folder,
    )
    found += loaded
    found.append(Peer("sdpa", torch.__version__, "contiguous K/V", _sdpa))
    found.append(Peer("flex", torch.__version__, "contiguous K/V", _flex))
    return found, missing


def load_peers(
    loaders: dict[str, Callable[[Path | None], Peer]], folder: Path | None
) -> tuple[list[Peer], dict[str, str]]:
    """The peers that load, and {name: why} of the others."""
    found, missing = [], {}
    for name, load in loaders.items():
        try:
            found.append(load(folder))
        # Foreign packages fail to load in many ways, a missing library among them; each is a reason to report, not to stop.
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return found, missing


def _commit() -> str:
    from ..common.machine import describe_machine

    return str(describe_machine(torch.device("cpu"))["commit"])


def _quire(problem: Problem) -> list[Call]:
    return quire_calls(problem, fresh=False)


def _quire_fresh(problem: Problem) -> list[Call]:
    return quire_calls(problem, fresh=True)


def quire_calls(problem: Problem, *, fresh: bool, impl: str | None = None) -> list[Call]:
    """One call of quire's attention for each copy; all share ``out``, ``lse`` and ``workspace``.

    fresh: pass the new rows beside the pages. impl: as in ``quire.kernels.paged_attention``.
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
        rows = {"k": problem.k[copy], "v": problem.v[copy]} if fresh else {}
        rows |= problem.row_scales(copy)
        return lambda: (attend(*tensors, *lengths, **options, **rows), lse)

    return [call(copy) for copy in range(problem.copies)]


def contiguous(problem: Problem) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q [batch, num_heads, q_len, head_dim] and K, V [batch, num_kv_heads, keys, head_dim] of every copy, only keys that are seen.

    Raises: Unsupported for batches of unequal lengths, sinks, and keys that would not fit.
    """
    case = problem.case
    if case.phase == "mixed":
        raise Unsupported("unequal lengths in a batch")
    if problem.sinks is not None:
        raise Unsupported("sinks")
    if problem.copies * case.cache_bytes > MAX_CONTIGUOUS_BYTES:
        raise Unsupported("a contiguous copy of K and V would not fit")
    found = []
    for copy in range(problem.copies):
        rows = [problem.gathered(s, copy, problem.lowest_visible(s)) for s in range(case.batch)]
        k, v = (torch.stack(part).transpose(1, 2) for part in zip(*rows, strict=True))
        q = problem.q[copy].unflatten(0, (case.batch, -1)).transpose(1, 2)
        found.append((q, k, v))
    return found


def _sdpa(problem: Problem) -> list[Call]:
    """torch's scaled_dot_product_attention; keys of grouped heads are repeated beforehand where its causal mask needs that."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    q_len = problem.case.q_lens[0]
    if problem.case.shape.sliding_window is not None and q_len > 1:
        raise Unsupported("a window and several queries: needs a dense mask")
    calls = []
    for q, k, v in contiguous(problem):
        if q_len > 1:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        options = {"scale": problem.softmax_scale, "enable_gqa": q_len == 1}
        if q_len > 1:
            options["attn_mask"] = causal_lower_right(q_len, k.shape[2])

        def call(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, options: dict = options
        ) -> tuple[Tensor]:
            out = scaled_dot_product_attention(q, k, v, **options)
            return (out.transpose(1, 2).flatten(0, 1),)

        calls.append(call)
    return calls


def _flex(problem: Problem) -> list[Call]:
    """torch's FlexAttention with a block mask, compiled on a GPU, eager on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tensors = contiguous(problem)
    q, k, _ = tensors[0]
    offset, window = k.shape[2] - q.shape[2], problem.case.shape.sliding_window

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        return (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device)
    attend = torch.compile(flex_attention) if q.is_cuda else flex_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        options = {"block_mask": mask, "scale": problem.softmax_scale, "enable_gqa": True}
        return lambda: (attend(q, k, v, **options).transpose(1, 2).flatten(0, 1),)

    return [call(*three) for three in tensors]
