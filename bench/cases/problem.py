"""The tensors of one case, shared by all implementations, and what the result has to be.

Pages lie as the runner's pool has them: ``[num_pages, 2, block_size, num_kv_heads, head_dim]``, K
and V of a page side by side. The table is linear, so that every implementation can read it; pages
behind a sliding window do not exist (their entries name page 0, which no query sees). There are
several copies of pages, queries and in-step K/V where one would stay in the L2 cache: calls take
turns.

Logits have a standard deviation of ``LOGIT_STD``: a softmax over thousands of keys then rests on
few of them, elsewhere for every query and head, so values read from a wrong place show. A tile of
keys that was not read at all may matter little to each output, and shows in the lse, which is known
to more digits. Budgets are derived, as in the tests: what a right program may be off by in any
order of summation (`bench.common.bounds`).

Pages of e4m3 (``Shape.fp8``) hold quantized values, and beside them the scales of rows, as the
runner's pool has them. The result that is expected is that of what values and scales stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.common import e4m3

from ..common.bounds import Bounded, allowed, bounding
from .shapes import Case

LOGIT_STD = 3.0
# Bytes of K and V that calls rotate over, as a multiple of the L2 cache, and copies at most.
L2_MULTIPLE = 4
MAX_COPIES = 32
# Pages that are quantised at once.
QUANTISED_PAGES = 1024
# Sequences, and rows of each, that are compared with the float64 result.
CHECKED_SEQS = 8
CHECKED_ROWS = 12


@dataclass(frozen=True)
class Problem:
    """A case with its tensors; the first dimension of q, pages, k and v is the copy.

    Attributes:
        q: [copies, num_tokens, num_heads, head_dim].
        pages: [copies, num_pages, 2, block_size, num_kv_heads, head_dim].
        k, v: [copies, num_tokens, num_kv_heads, head_dim], the rows of the new tokens, which the
            pages hold as well.
        block_table, seq_lens, cu_seqlens_q, sinks: as in ``quire.kernels.paged_attention``. sinks
            is None where the shape has none.
        scales: fp32 [copies, num_pages, 2, block_size, num_kv_heads], of the rows of e4m3 pages;
            None with others.
    """

    case: Case
    q: Tensor
    pages: Tensor
    k: Tensor
    v: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    sinks: Tensor | None
    scales: Tensor | None = None

    @property
    def copies(self) -> int:
        """How many calls can be made before one reads what another has read."""
        return self.q.shape[0]

    @property
    def softmax_scale(self) -> float:
        """The shape's, or head_dim ** -0.5."""
        shape = self.case.shape
        return shape.head_dim**-0.5 if shape.softmax_scale is None else shape.softmax_scale

    def k_pages(self, copy: int) -> Tensor:
        """[num_pages, block_size, num_kv_heads, head_dim] view."""
        return self.pages[copy, :, 0]

    def v_pages(self, copy: int) -> Tensor:
        """[num_pages, block_size, num_kv_heads, head_dim] view."""
        return self.pages[copy, :, 1]

    def row_scales(self, copy: int) -> dict[str, Tensor]:
        """k_scale and v_scale, [num_pages, block_size, num_kv_heads] views, as arguments by name;
        empty where there are none.
        """
        if self.scales is None:
            return {}
        return {"k_scale": self.scales[copy, :, 0], "v_scale": self.scales[copy, :, 1]}

    def gathered(self, seq: int, copy: int = 0, lowest: int = 0) -> tuple[Tensor, Tensor]:
        """K and V rows [keys, num_kv_heads, head_dim] of one sequence from position ``lowest`` on;
        those of e4m3 pages in fp32.
        """
        block_size = self.case.block_size
        position = torch.arange(lowest, self.case.seq_lens[seq], device=self.q.device)
        page = self.block_table[seq, position // block_size].long()
        row = position % block_size
        k_pages, v_pages, scales = self.k_pages(copy), self.v_pages(copy), self.row_scales(copy)
        if not scales:
            return k_pages[page, row], v_pages[page, row]
        k, v = (
            e4m3.dequantize(pages.view(torch.uint8)[page, row].view(pages.dtype), scale[page, row])
            for pages, scale in zip((k_pages, v_pages), scales.values(), strict=True)
        )
        return k, v

    def lowest_visible(self, seq: int) -> int:
        """The first position that some query of a sequence sees."""
        window = self.case.shape.sliding_window
        context = self.case.seq_lens[seq] - self.case.q_lens[seq]
        return 0 if window is None else max(0, context - window + 1)


def make_problem(
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    copies: int | None = None,
) -> Problem:
    """Random tensors for a case.

    Args:
        copies: default: as many as exceed the L2 cache ``L2_MULTIPLE`` times; 1 on a CPU.
    """
    shape = case.shape
    if copies is None:
        copies = 1
        if device.type == "cuda":
            l2 = torch.cuda.get_device_properties(device).L2_cache_size
            copies = min(MAX_COPIES, -(-L2_MULTIPLE * l2 // case.cache_bytes))
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    num_tokens = sum(case.q_lens)
    table, num_pages = _table(case, seed)
    scale = shape.head_dim**-0.5 if shape.softmax_scale is None else shape.softmax_scale
    q = normal(copies, num_tokens, shape.num_heads, shape.head_dim)
    q.mul_(LOGIT_STD / (scale * shape.head_dim**0.5))
    page_shape = (2, case.block_size, shape.num_kv_heads, shape.head_dim)
    scales = None
    if shape.fp8:
        pages = torch.empty(
            copies, num_pages, *page_shape, dtype=torch.float8_e4m3fn, device=device
        )
        # As the runner's pool has them: a head's rows side by side.
        scales = torch.empty(
            copies, num_pages, 2, shape.num_kv_heads, case.block_size, device=device
        ).transpose(3, 4)
        for copy in range(copies):
            for first in range(0, num_pages, QUANTISED_PAGES):
                part = slice(first, min(num_pages, first + QUANTISED_PAGES))
                quantized, found = e4m3.quantize(normal(part.stop - first, *page_shape))
                pages[copy, part] = quantized
                # Powers of two: rows are then numbers of the model's dtype too, and in-step K/V
                # are what pages hold.
                scales[copy, part] = found.log2().round().exp2()
    else:
        pages = normal(copies, num_pages, *page_shape)
    problem = Problem(
        case=case,
        q=q,
        pages=pages,
        k=normal(copies, num_tokens, shape.num_kv_heads, shape.head_dim),
        v=normal(copies, num_tokens, shape.num_kv_heads, shape.head_dim),
        block_table=table.to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32, device=device),
        sinks=normal(shape.num_heads).float() if shape.sinks else None,
        scales=scales,
    )
    first = 0
    for seq, q_len in enumerate(case.q_lens):
        for copy in range(copies):
            k, v = problem.gathered(seq, copy, case.seq_lens[seq] - q_len)
            problem.k[copy, first : first + q_len] = k
            problem.v[copy, first : first + q_len] = v
        first += q_len
    return problem


@dataclass(frozen=True)
class Expected:
    """What a sample of rows of a problem's first copy has to be.

    Attributes:
        rows: [n] indices of tokens.
        exact: [n, num_heads, head_dim] float64.
        lse: [n, num_heads] float64.
        budget, lse_budget: largest errors allowed, of each element.
    """

    rows: Tensor
    exact: Tensor
    lse: Tensor
    budget: Tensor
    lse_budget: Tensor

    def wrong(self, out: Tensor, lse: Tensor | None = None) -> str | None:
        """What is wrong with a result: a message, or None. All of it has to be finite.

        Args:
            out: [num_tokens, num_heads, head_dim].
            lse: [num_heads, num_tokens] natural log, where an implementation gives it.
        """
        found = [("out", out, out[self.rows], self.exact, self.budget)]
        if lse is not None:
            found.append(("lse", lse, lse[:, self.rows].T, self.lse, self.lse_budget))
        for name, whole, sample, exact, budget in found:
            if not bool(torch.isfinite(whole).all()):
                return f"{name}: not finite"
            error = (sample.double() - exact).abs()
            if bool((error > budget).any()):
                worst = (error / budget).argmax()
                return f"{name}: error {error.flatten()[worst]:.3g}, budget {budget.flatten()[worst]:.3g}"
        return None


def expect(problem: Problem) -> Expected:
    """The float64 result of a sample of rows, and the budgets of the problem's dtype."""
    starts = [0, *accumulate(problem.case.q_lens)]
    index: list[int] = []
    results = []
    for seq in spread(problem.case.batch, CHECKED_SEQS):
        rows = spread(problem.case.q_lens[seq], CHECKED_ROWS)
        index += [starts[seq] + row for row in rows]
        with bounding(weights=problem.q.dtype):
            results.append(attention_rows(problem, seq, rows, torch.float64))
    rows = torch.tensor(index, device=problem.q.device)
    return budgeted(rows, results, problem.q.dtype)


def budgeted(rows: Tensor, results: list[tuple[Bounded, Bounded]], dtype: torch.dtype) -> Expected:
    """Expected rows with the budgets of a dtype.

    Args:
        rows: [n] indices of tokens.
        results: (out [m, num_heads, *], lse [m, num_heads]) of these rows, in parts, float64 with
            bounds.
    """
    exact, lse = (torch.cat(part) for part in zip(*results, strict=True))
    return Expected(
        rows=rows,
        exact=exact.value,
        lse=lse.value,
        budget=allowed(exact, dtype),
        lse_budget=allowed(lse, torch.float32),
    )


def attention_rows(problem: Problem, seq: int, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Attention of some rows of one sequence of the first copy, all keys at once, in the arithmetic
    ``dtype``.

    Args:
        rows: new tokens of the sequence, counted from 0.

    Returns:
        out [len(rows), num_heads, head_dim] and lse [len(rows), num_heads] in ``dtype``.

    Source: as ``tests/kernels/oracles/attention.py``, with which a test compares it.
    """
    case, shape = problem.case, problem.case.shape
    lowest = problem.lowest_visible(seq)
    keys, values = problem.gathered(seq, 0, lowest)
    first = sum(case.q_lens[:seq])
    index = torch.tensor(rows, device=problem.q.device)
    queries = problem.q[0, first + index].to(dtype)
    position = case.seq_lens[seq] - case.q_lens[seq] + index
    distance = position[:, None] - torch.arange(lowest, case.seq_lens[seq], device=index.device)
    hidden = distance < 0
    if shape.sliding_window is not None:
        hidden |= distance >= shape.sliding_window
    group = shape.num_heads // shape.num_kv_heads
    out = torch.empty(queries.shape, dtype=dtype, device=index.device)
    lse = torch.empty(queries.shape[:2], dtype=dtype, device=index.device)
    for head in range(shape.num_heads):
        key, value = keys[:, head // group].to(dtype), values[:, head // group].to(dtype)
        logits = (queries[:, head] @ key.T * problem.softmax_scale).masked_fill(hidden, -torch.inf)
        lse[:, head] = torch.logsumexp(logits, 1)
        if problem.sinks is not None:
            sink = problem.sinks[head].to(dtype).expand(len(rows), 1)
            logits = torch.cat([logits, sink], 1)
        out[:, head] = torch.softmax(logits, 1)[:, : len(key)] @ value
    return out, lse


def _table(case: Case, seed: int) -> tuple[Tensor, int]:
    """Block table [batch, width] with shuffled pages, and the number of pages; page 0 stands for
    pages that nobody sees.
    """
    window, block_size = case.shape.sliding_window, case.block_size
    width = -(-max(case.seq_lens) // block_size)
    table = torch.zeros(case.batch, width, dtype=torch.int32)
    seen = torch.zeros(case.batch, width, dtype=torch.bool)
    for seq, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        lowest = 0 if window is None else max(0, seq_len - q_len - window + 1)
        seen[seq, lowest // block_size : -(-seq_len // block_size)] = True
    num_pages = 1 + int(seen.sum())
    shuffled = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed))
    table[seen] = shuffled.int()
    return table, num_pages


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of range(count), the first and the last among them, evenly spaced."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
