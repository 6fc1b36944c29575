"""The tensors of cases that make what attention reads: ``topk_indices``, entries, written rows.

``topk_indices`` are right if none that was left out scores higher than one that was taken, by more
than the errors of two scores; there have to be as many as there should, each once. Rows that were
written are read back from the pages. Budgets are those of `bench.common.bounds`, and for e4m3 half
a step more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import IndexPages, LatentPages

from ..common.bounds import Bounded, allowed, bounding
from .latent_problem import lengths, make_pages, num_copies, shuffled_table
from .latent_shapes import LatentCase
from .problem import CHECKED_ROWS, CHECKED_SEQS, spread

EPS = 1e-6
ROPE_THETA = 1e4


@dataclass(frozen=True)
class IndexProblem:
    """A case of "index"; the first dimension of q is the copy, ``pages`` has an element for each.
    Shapes as in ``index_topk``.
    """

    case: LatentCase
    q: Tensor
    weights: Tensor
    pages: list[IndexPages]
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor

    @property
    def copies(self) -> int:
        """How many calls can be made before one reads what another has read."""
        return self.q.shape[0]


@dataclass(frozen=True)
class RowsProblem:
    """A case of "write" or "compress".

    Attributes:
        x: [copies, num_tokens, channels] bf16 rows of "write", fp32 rows of "compress".
        gate, ape: of "compress" alone, as there.
        state: of "compress" alone, an element for each copy.
        pages: an element for each copy.
        slot_mapping: [num_tokens] int64.
        positions: [num_tokens] int64.
        cos_sin, norm_weight: as in ``write_latent``.
    """

    case: LatentCase
    x: Tensor
    gate: Tensor | None
    ape: Tensor | None
    state: list[Tensor] | None
    pages: list[LatentPages] | list[IndexPages]
    slot_mapping: Tensor
    positions: Tensor
    cos_sin: Tensor
    norm_weight: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor

    @property
    def copies(self) -> int:
        """How many calls can be made before one reads what another has read."""
        return self.x.shape[0]


def make_index(
    case: LatentCase,
    device: torch.device,
    *,
    case_bytes: float,
    seed: int = 0,
    copies: int | None = None,
) -> IndexProblem:
    """Random tensors for a case of "index"; arguments as in
    `bench.cases.latent_problem.make_attention`.
    """
    shape = case.shape
    generator = torch.Generator(device).manual_seed(seed)
    if copies is None:
        copies = num_copies(device, case_bytes) if device.type == "cuda" else 1
    seq_lens, cu_seqlens_q, _ = lengths(case, device)
    table = shuffled_table(case.batch, -(-case.num_entries // shape.rows), generator)
    size = (copies, case.num_tokens, shape.num_heads, shape.head_dim)
    q = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    weights = torch.randn(size[1:3], generator=generator, device=device)
    num_pages = table.numel() + 1
    return IndexProblem(
        case=case,
        q=q,
        weights=weights * (shape.num_heads * shape.head_dim) ** -0.5,
        pages=[make_pages(num_pages, shape, shape.rows, case.fp8, generator) for _ in range(copies)],
        block_table=table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
    )  # fmt: skip


@dataclass(frozen=True)
class ExpectedTopk:
    """What ``index_topk`` has to give.

    Attributes:
        rows: tokens that are checked.
        scores: of each of these tokens, float64 scores of all entries that it sees, with bounds.
        topk: entries of a token, at most.
    """

    rows: list[int]
    scores: list[Bounded]
    topk: int

    def wrong(self, topk_indices: Tensor, lens: Tensor) -> str | None:
        """What is wrong with a result.

        Args:
            topk_indices: [num_tokens, topk] int32, entries of each token, then -1.
            lens: [num_tokens] int32, how many there are.

        Returns:
            A message, or None.
        """
        for token, scores in zip(self.rows, self.scores, strict=True):
            count = min(self.topk, len(scores))
            row = topk_indices[token].long()
            ids = row[:count]
            if int(lens[token]) != count or bool((row[count:] != -1).any()):
                return f"topk_indices: expected {count} of token {token}, got {int(lens[token])}"
            taken = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
            if not bool(((ids >= 0) & (ids < len(scores))).all()):
                return f"topk_indices: token {token} has one that it does not see"
            taken[ids] = True
            if int(taken.sum()) != count:
                return f"topk_indices: token {token} has one twice"
            if count < len(scores):
                # As high as each may have been found, and as low.
                highest, lowest = scores.value + scores.error, scores.value - scores.error
                gap = (lowest[~taken].max() - highest[taken].min()).item()
                if gap > 0:
                    return (
                        f"topk_indices: one left out scores {gap:.3g} more than the budget allows"
                    )
        return None


def expect_topk(problem: IndexProblem) -> ExpectedTopk:
    """The float64 scores of a sample of rows of the first copy."""
    case, shape = problem.case, problem.case.shape
    q_len = case.q_lens[0]
    rows, scores = [], []
    for seq in spread(case.batch, CHECKED_SEQS):
        entry = torch.arange(case.num_entries, device=problem.q.device)
        page = problem.block_table[seq].long()[entry // shape.rows]
        keys = problem.pages[0].read(page * shape.rows + entry % shape.rows)
        for row in spread(q_len, CHECKED_ROWS):
            token = seq * q_len + row
            visible = (case.context - q_len + row + 1) // shape.ratio
            rows.append(token)
            with bounding():
                scores.append(_scores(problem, token, keys[:visible], torch.float64))
    return ExpectedTopk(rows, scores, shape.topk)


def _scores(problem: IndexProblem, token: int, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """[keys] scores of a token of the first copy."""
    weights = problem.weights[token]
    products = torch.relu(keys.to(dtype) @ problem.q[0, token].to(dtype).T)
    return products @ weights.to(dtype)


def make_rows(
    case: LatentCase,
    device: torch.device,
    *,
    case_bytes: float,
    seed: int = 0,
    copies: int | None = None,
) -> RowsProblem:
    """Random tensors for a case of "write" or "compress"; arguments as in
    `bench.cases.latent_problem.make_attention`.

    The state holds, where the step puts its rows, these rows already: then a call changes nothing
    that the next one reads.
    """
    shape = case.shape
    generator = torch.Generator(device).manual_seed(seed)
    if copies is None:
        copies = num_copies(device, case_bytes) if device.type == "cuda" else 1

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    seq_lens, cu_seqlens_q, positions = lengths(case, device)
    q_len, num_tokens = case.q_lens[0], case.num_tokens
    gate = ape = state = None
    if shape.op == "write":
        table = shuffled_table(case.batch, -(-q_len // shape.window_rows), generator)
        x = normal(copies, num_tokens, shape.head_dim).bfloat16()
        row, rows = torch.arange(q_len, device=device).repeat(case.batch), shape.window_rows
        made = torch.ones_like(row, dtype=torch.bool)
    else:
        table = shuffled_table(case.batch, -(-case.num_entries // shape.rows), generator)
        channels = shape.head_dim * (1 + shape.overlap)
        x, gate = normal(copies, num_tokens, channels), normal(copies, num_tokens, channels)
        ape = normal(shape.ratio, channels)
        ring = shape.ratio * (1 + shape.overlap)
        state = [normal(case.batch, ring, 2, channels) for _ in range(copies)]
        kept = torch.arange(q_len - min(ring, q_len), q_len, device=device)
        for copy, seq in ((c, s) for c in range(copies) for s in range(case.batch)):
            token = seq * q_len + kept
            place = positions[token] % ring
            state[copy][seq, place, 0] = x[copy, token]
            state[copy][seq, place, 1] = gate[copy, token] + ape[positions[token] % shape.ratio]
        row, rows = positions // shape.ratio, shape.rows
        made = (positions + 1) % shape.ratio == 0
    seq = torch.arange(case.batch, device=device).repeat_interleave(q_len)
    slots = table[seq, row // rows].long() * rows + row % rows
    return RowsProblem(
        case=case,
        x=x,
        gate=gate,
        ape=ape,
        state=state,
        pages=[make_pages(table.numel() + 1, shape, rows, case.fp8, generator) for _ in range(copies)],
        slot_mapping=torch.where(made, slots, -1),
        positions=positions,
        cos_sin=rope_table(case.context, shape.rope_dim, device),
        norm_weight=1 + 0.3 * normal(shape.head_dim),
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
    )  # fmt: skip


def rope_table(num_positions: int, rope_dim: int, device: torch.device) -> Tensor:
    """[num_positions, rope_dim] fp32: cosines, then sines."""
    frequency = ROPE_THETA ** -(torch.arange(0, rope_dim, 2, device=device) / rope_dim)
    angle = torch.arange(num_positions, device=device)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], 1)


@dataclass(frozen=True)
class ExpectedRows:
    """What rows that were written have to be.

    Attributes:
        rows: [n] indices of tokens, whose row or entry went to ``slots``.
        exact: [n, head_dim] float64.
        budget: [n, head_dim], the largest errors allowed.
    """

    pages: LatentPages | IndexPages
    rows: Tensor
    slots: Tensor
    exact: Tensor
    budget: Tensor

    def wrong(self, out: Tensor | None = None) -> str | None:
        """What is wrong with pages or ``out`` [num_tokens, head_dim]: a message, or None."""
        found = {"pages": self.pages.read(self.slots)}
        if out is not None:
            found["out"] = out[self.rows]
        for name, sample in found.items():
            share = ((sample.double() - self.exact).abs() / self.budget).max().item()
            if not share <= 1:
                return f"{name}: error {share:.3g} of the budget"
        return None


def expect_rows(problem: RowsProblem) -> ExpectedRows:
    """The float64 rows of a sample of those that the first copy's call writes, and clears these
    rows of the pages.
    """
    written = (problem.slot_mapping >= 0).nonzero()[:, 0]
    chosen = written[spread(len(written), CHECKED_SEQS * CHECKED_ROWS)]
    with bounding():
        exact = _rows(problem, chosen, torch.float64)
    slots, pages = problem.slot_mapping[chosen], problem.pages[0]
    # Garbage where a call is to write.
    pages.write(slots, torch.full(exact.shape, 1e4, device=slots.device))
    budget = allowed(exact, torch.bfloat16)
    if pages.fp8:
        # Half a step of e4m3: 2^-4 of the number, 2^-10 of its scale at the least; a power of two
        # up to twice the largest / 448.
        size = exact.value.abs() + budget
        budget = budget + size / 16 + size.amax(1, keepdim=True) * 2.0**-9 / 448
    return ExpectedRows(pages, chosen, slots, exact.value, budget)


def _rows(problem: RowsProblem, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[len(tokens), head_dim]: rows of "write", entries that these tokens close of "compress",
    before they are rounded.

    Source: as ``quire.kernels.write_latent`` and ``quire.kernels.compress``; a test
    compares them.
    """
    shape = problem.case.shape
    position = problem.positions[tokens]
    if shape.op == "write":
        rows = problem.x[0, tokens].to(dtype)
    else:
        rows = torch.stack([_pooled(problem, int(token), dtype) for token in tokens])
        position = position + 1 - shape.ratio
    rows = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + EPS)
    rows = rows * problem.norm_weight.to(dtype)
    cos, sin = problem.cos_sin[position].to(dtype).chunk(2, 1)
    first = shape.head_dim - shape.rope_dim
    even, odd = rows[:, first::2], rows[:, first + 1 :: 2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], 2).flatten(1)
    return torch.cat([rows[:, :first], rotated], 1)


def _pooled(problem: RowsProblem, token: int, dtype: torch.dtype) -> Tensor:
    """[head_dim]: the window that a token closes, pooled."""
    shape, q_len = problem.case.shape, problem.case.q_lens[0]
    assert problem.gate is not None and problem.ape is not None and problem.state is not None
    seq, last = token // q_len, int(problem.positions[token])
    ring = problem.state[0].shape[1]
    values, logits = [], []
    for position in range(max(0, last + 1 - ring), last + 1):
        # Series a of the window before, series b of this one.
        first = shape.head_dim if shape.overlap and position > last - shape.ratio else 0
        part = slice(first, first + shape.head_dim)
        source = token - (last - position)
        if source >= seq * q_len:
            values.append(problem.x[0, source, part].to(dtype))
            bias = problem.ape[position % shape.ratio, part].to(dtype)
            logits.append(problem.gate[0, source, part].to(dtype) + bias)
        else:
            row = problem.state[0][seq, position % ring, :, part].to(dtype)
            values.append(row[0])
            logits.append(row[1])
    return (torch.softmax(torch.stack(logits), 0) * torch.stack(values)).sum(0)
