"""The tensors of one case of latent attention, shared by all implementations, and its result.

Rows lie in pages as a layer's do: raw rows in a ring of pages for each sequence, entries behind a
linear table of shuffled pages. Every copy has queries, raw rows and ``topk_indices`` of its own; of
the entries there are as many copies as exceed the L2 cache, which for a long context is one: there
the indices of every copy name other rows. The indices of a token are drawn evenly from what it
sees, independently of its neighbours, so a chunk finds less of them in caches than it would of a
trained indexer's.

Logits, budgets and the sample of rows are those of `bench.cases.problem`. Quantised rows are read
back before they are compared with: bf16 holds them exactly, so quantisation is no error here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import IndexPages, LatentPages, page_bytes

from ..common.bounds import bounding
from .latent_shapes import LatentCase, LatentShape
from .problem import (
    CHECKED_ROWS,
    CHECKED_SEQS,
    L2_MULTIPLE,
    LOGIT_STD,
    MAX_COPIES,
    Expected,
    budgeted,
    spread,
)

# Rows that are quantised at a time.
QUANTISED_ROWS = 1 << 16


@dataclass(frozen=True)
class AttentionProblem:
    """A case with its tensors; the lists have an element for each copy.

    Attributes:
        case: what the tensors are of.
        q: [copies, num_tokens, num_heads, head_dim].
        kv: [copies, num_tokens, head_dim], the in-step rows, which pages hold as well.
        window: raw rows behind ``window_table``; None for "mla".
        window_table: [batch, width] int32, a ring; None for "mla".
        entries: entries; of "mla" rows as [num_pages, rows, head_dim]; None for "window".
        entry_table: [batch, width] int32 pages of ``entries``; None for "window".
        topk_indices: [copies, num_tokens, topk] int32 ascending, then -1; None but for "csa".
        topk_lens: [num_tokens] int32; None but for "csa".
        seq_lens, cu_seqlens_q, sinks: as in ``quire.kernels.compressed_attention``; no sinks for
            "mla".
    """

    case: LatentCase
    q: Tensor
    kv: Tensor
    window: list[LatentPages] | None
    window_table: Tensor | None
    entries: list[LatentPages] | list[Tensor] | None
    entry_table: Tensor | None
    topk_indices: Tensor | None
    topk_lens: Tensor | None
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    sinks: Tensor | None

    @property
    def copies(self) -> int:
        """How many calls can be made before one reads what another has read."""
        return self.q.shape[0]

    def window_slots(self, seq: int, position: Tensor) -> Tensor:
        """Physical rows of raw positions of one sequence, any shape; -1 where the position is
        negative.
        """
        assert self.window_table is not None
        rows, width = self.case.shape.window_rows, self.window_table.shape[1]
        page = self.window_table[seq].long()[position.clamp(min=0) // rows % width]
        return torch.where(position < 0, -1, page * rows + position.clamp(min=0) % rows)

    def entry_slots(self, seq: int, entry: Tensor) -> Tensor:
        """Physical rows of entries of one sequence, any shape; -1 stays -1."""
        assert self.entry_table is not None
        rows = self.case.shape.rows
        page = self.entry_table[seq].long()[entry.clamp(min=0) // rows]
        return torch.where(entry < 0, -1, page * rows + entry.clamp(min=0) % rows)


def make_pages(
    num_pages: int, shape: LatentShape, rows: int, fp8: bool, generator: torch.Generator
) -> LatentPages | IndexPages:
    """Pages of random normal rows."""
    device = generator.device
    dim = shape.head_dim
    kind = {"index_dim": dim} if shape.index else {"head_dim": dim, "rope_dim": shape.rope_dim}
    make = IndexPages if shape.index else LatentPages
    if not fp8:
        data = torch.empty(num_pages, rows, dim, dtype=torch.bfloat16, device=device)
        return make(data.normal_(generator=generator), rows, **kind)
    width = page_bytes(rows, dim + 4) if shape.index else page_bytes(rows)
    pages = make(torch.zeros(num_pages, width, dtype=torch.uint8, device=device), rows, **kind)
    for first in range(0, num_pages * rows, QUANTISED_ROWS):
        slots = torch.arange(first, min(first + QUANTISED_ROWS, num_pages * rows), device=device)
        pages.write(slots, torch.randn(len(slots), dim, generator=generator, device=device))
    return pages


def shuffled_table(batch: int, width: int, generator: torch.Generator) -> Tensor:
    """[batch, width] int32: every page from 1 on once."""
    order = torch.randperm(batch * width, generator=generator, device=generator.device)
    return (order + 1).int().view(batch, width)


def num_copies(device: torch.device, size: float, most: int = MAX_COPIES) -> int:
    """How many copies of ``size`` bytes exceed the L2 cache ``L2_MULTIPLE`` times; at most
    ``most``.
    """
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(most, max(1, -int(-L2_MULTIPLE * l2 // size)))


def lengths(case: LatentCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """seq_lens [batch] and cu_seqlens_q [batch + 1] int32, and the position [num_tokens] int64 of
    every token.
    """
    q_len = case.q_lens[0]
    cu_seqlens_q = torch.arange(case.batch + 1, device=device, dtype=torch.int32) * q_len
    seq_lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    position = torch.arange(case.context - q_len, case.context, device=device).repeat(case.batch)
    return seq_lens, cu_seqlens_q, position


def make_attention(
    case: LatentCase,
    device: torch.device,
    *,
    case_bytes: float,
    seed: int = 0,
    copies: int | None = None,
) -> AttentionProblem:
    """Random tensors for a case of attention.

    Args:
        case_bytes: what one call moves.
        copies: default: as many as exceed the L2 cache; 1 on a CPU.
    """
    shape = case.shape
    generator = torch.Generator(device).manual_seed(seed)
    on_gpu = device.type == "cuda"
    if copies is None:
        copies = num_copies(device, case_bytes) if on_gpu else 1
    seq_lens, cu_seqlens_q, position = lengths(case, device)
    q_shape = (copies, case.num_tokens, shape.num_heads, shape.head_dim)
    q = torch.empty(q_shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    q.mul_(LOGIT_STD / (shape.softmax_scale * shape.head_dim**0.5))
    window = window_table = entries = entry_table = topk_indices = topk_lens = None
    if shape.op != "mla":
        # Room for the rows that the first new token sees, the new ones, and one page that both
        # borders cut.
        width = -(-(shape.sliding_window - 1 + case.q_lens[0]) // shape.window_rows) + 1
        window_table = shuffled_table(case.batch, width, generator)
        pages = (case.batch * width + 1, shape, shape.window_rows, case.fp8, generator)
        window = [make_pages(*pages) for _ in range(copies)]
    if case.num_entries:
        width = -(-case.num_entries // shape.rows)
        entry_table = shuffled_table(case.batch, width, generator)
        pools = min(copies, num_copies(device, case.pool_bytes)) if on_gpu else copies
        num_pages = case.batch * width + 1
        found = []
        for _ in range(pools):
            if shape.op == "mla":
                rows = torch.empty(
                    num_pages, shape.rows, shape.head_dim, dtype=torch.bfloat16, device=device
                )
                found.append(rows.normal_(generator=generator))
            else:
                found.append(make_pages(num_pages, shape, shape.rows, case.fp8, generator))
        entries = [found[copy % pools] for copy in range(copies)]
    if shape.op == "csa":
        visible = (position + 1) // shape.ratio
        topk_indices = torch.stack(
            [_spread_topk(visible, shape.topk, generator) for _ in range(copies)]
        )
        topk_lens = visible.clamp(max=shape.topk).int()
    sinks = torch.randn(shape.num_heads, generator=generator, device=device)
    problem = AttentionProblem(
        case=case,
        q=q,
        kv=torch.empty(copies, case.num_tokens, shape.head_dim, dtype=torch.bfloat16, device=device),
        window=window,
        window_table=window_table,
        entries=entries,
        entry_table=entry_table,
        topk_indices=topk_indices,
        topk_lens=topk_lens,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        sinks=None if shape.op == "mla" else sinks,
    )  # fmt: skip
    for copy in range(copies):
        for seq in range(case.batch):
            part = slice(seq * case.q_lens[0], (seq + 1) * case.q_lens[0])
            problem.kv[copy, part] = _raw_rows(problem, copy, seq, position[part])
    return problem


def expect_attention(problem: AttentionProblem) -> Expected:
    """The float64 result of a sample of rows of the first copy, and the budgets of bf16."""
    case = problem.case
    q_len = case.q_lens[0]
    index: list[int] = []
    results = []
    for seq in spread(case.batch, CHECKED_SEQS):
        for row in spread(q_len, CHECKED_ROWS):
            index.append(seq * q_len + row)
            keys = visible_rows(problem, seq, row)
            with bounding(weights=torch.bfloat16):
                results.append(attend(problem, index[-1], keys, torch.float64))
    rows = torch.tensor(index, device=problem.q.device)
    return budgeted(rows, results, torch.bfloat16)


def visible_rows(problem: AttentionProblem, seq: int, row: int) -> Tensor:
    """[keys, head_dim] fp32: what new token ``row`` of a sequence sees in the first copy."""
    case, shape = problem.case, problem.case.shape
    device = problem.q.device
    position = case.context - case.q_lens[0] + row
    found = []
    if problem.window is not None:
        lowest = max(0, position - shape.sliding_window + 1)
        found.append(_raw_rows(problem, 0, seq, torch.arange(lowest, position + 1, device=device)))
    if problem.entries is not None:
        entry = torch.arange((position + 1) // shape.ratio, device=device)
        if problem.topk_indices is not None:
            chosen = problem.topk_indices[0, seq * case.q_lens[0] + row].long()
            entry = chosen[chosen >= 0]
        found.append(_read(problem.entries[0], problem.entry_slots(seq, entry)))
    return torch.cat(found)


def attend(
    problem: AttentionProblem, token: int, keys: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention of one token of the first copy to ``keys`` [n, head_dim] in the arithmetic
    ``dtype``, with the sink.

    Returns:
        out [1, num_heads, head_dim_v] and lse [1, num_heads].

    Source: as ``quire.kernels.compressed_attention``; a test compares it with an oracle of loops.
    """
    shape = problem.case.shape
    keys = keys.to(dtype)
    logits = problem.q[0, token].to(dtype) @ keys.T * shape.softmax_scale
    lse = torch.logsumexp(logits, 1)
    if problem.sinks is not None:
        logits = torch.cat([logits, problem.sinks.to(dtype)[:, None]], 1)
    values = keys[:, : shape.head_dim_v]
    out = torch.softmax(logits, 1)[:, : len(keys)] @ values
    return out[None], lse[None]


def _raw_rows(problem: AttentionProblem, copy: int, seq: int, position: Tensor) -> Tensor:
    """[len(position), head_dim] fp32 raw rows of a sequence."""
    if problem.window is not None:
        return problem.window[copy].read(problem.window_slots(seq, position))
    assert problem.entries is not None
    return _read(problem.entries[copy], problem.entry_slots(seq, position))


def _read(pages: LatentPages | Tensor, slots: Tensor) -> Tensor:
    if isinstance(pages, Tensor):
        return pages.flatten(0, 1)[slots].float()
    return pages.read(slots)


def _spread_topk(visible: Tensor, topk: int, generator: torch.Generator) -> Tensor:
    """[num_tokens, topk] int32: one entry of each of ``topk`` equal parts of what a token sees, all
    of it where it sees fewer; then -1.
    """
    rank = torch.arange(topk, device=visible.device)
    first, stop = (torch.div(r * visible[:, None], topk, rounding_mode="floor") for r in (rank, rank + 1))  # fmt: skip
    draw = torch.rand(first.shape, generator=generator, device=visible.device)
    pick = first + (draw * (stop - first)).long().clamp(max=(stop - first - 1).clamp(min=0))
    few = torch.where(rank < visible[:, None], rank, -1)
    return torch.where(visible[:, None] <= topk, few, pick).int()
