"""Problems of attention over keys and values in pages.

The table is linear, so that every implementation can read it. Pages behind a sliding window do not
exist: their entries name page 0, which no query sees. K and V of a page lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels import paged_attention, sliding_window_attention, workspace_numel

from ..common.bounds import bounding
from .problem import (
    LOGIT_STD,
    Expected,
    Problem,
    attend,
    batch_arguments,
    budgeted,
    checked_rows,
    num_copies,
    num_sms,
    random_generator,
)
from .shapes import Case

E4M3 = torch.float8_e4m3fn


def make_attention(
    case: Case, device: torch.device, dtype: torch.dtype, copies: int | None, seed: int
) -> Problem:
    """Random tensors for a case; arguments as in `bench.cases.make.make_problem`."""
    shape, generator = case.shape, random_generator(device, seed)

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    table, num_pages = _table(case, seed)
    shared: dict[str, Any] = {
        **batch_arguments(case, device),
        "block_table": table.to(device),
        "num_decodes": case.num_decodes,
        "softmax_scale": shape.softmax_scale,
        "sinks": normal(shape.num_heads).float() if shape.sinks else None,
        "workspace": None,
    }
    if device.type == "cuda" and case.num_decodes:
        sizes = {name: getattr(shape, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        sizes |= {"num_decodes": case.num_decodes, "max_seqlen_q": case.q_lens[0]}
        numel = workspace_numel(**sizes, num_sms=num_sms(device))
        shared["workspace"] = torch.empty(numel, device=device)
    operator = paged_attention
    if shape.sliding_window is not None:
        operator, shared["sliding_window"] = sliding_window_attention, shape.sliding_window
    pages = (num_pages, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    each: list[dict[str, Any]] = []
    for _ in range(num_copies(device, case.cache_bytes, copies)):
        q = normal(case.num_tokens, shape.num_heads, shape.head_dim)
        q.mul_(LOGIT_STD / (shape.softmax_scale * shape.head_dim**0.5))
        if shape.fp8:
            k_pages, v_pages = normal(*pages).mul_(64).clamp_(-448, 448).to(E4M3).unbind(1)
            # A head's scales lie side by side, as in the runner's pool. They are powers of two, so
            # that rows in the model's dtype can hold what pages hold.
            size = (num_pages, 2, shape.num_kv_heads, shape.block_size)
            exponent = torch.randint(-7, -4, size, generator=generator, device=device)
            k_scale, v_scale = exponent.float().exp2().transpose(2, 3).unbind(1)
            scales = {"k_scale": k_scale, "v_scale": v_scale}
        else:
            (k_pages, v_pages), scales = normal(*pages).unbind(1), {}
        each.append({"q": q, "k_pages": k_pages, "v_pages": v_pages, **scales})
    lse = torch.empty(shape.num_heads, case.num_tokens, device=device)
    results = {"out": torch.empty_like(each[0]["q"]), "lse": lse}
    problem = Problem(case, operator, shared, each, results, in_step=[])
    for copy in range(len(each)):
        new = [gathered(problem, s, copy, case.context - n) for s, n in enumerate(case.q_lens)]
        k, v = (torch.cat(rows).to(dtype) for rows in zip(*new, strict=True))
        problem.in_step.append({"k": k, "v": v})
    return problem


def gathered(problem: Problem, seq: int, copy: int = 0, lowest: int = 0) -> tuple[Tensor, Tensor]:
    """K and V rows [keys, num_kv_heads, head_dim] of one sequence from position ``lowest`` on.

    Rows of e4m3 pages are fp32, scales applied.
    """
    case, tensors = problem.case, problem.each[copy]
    position = torch.arange(lowest, case.context, device=tensors["q"].device)
    page = problem.shared["block_table"][seq, position // case.shape.block_size].long()
    row = position % case.shape.block_size
    found = []
    for name in ("k", "v"):
        pages, scale = tensors[f"{name}_pages"], tensors.get(f"{name}_scale")
        if scale is None:
            found.append(pages[page, row])
        else:
            values = pages.view(torch.uint8)[page, row].view(E4M3).float()
            found.append(values * scale[page, row][..., None])
    return found[0], found[1]


def lowest_visible(case: Case, seq: int) -> int:
    """The first position that some query of a sequence sees."""
    window = case.shape.sliding_window
    return 0 if window is None else max(0, case.context - case.q_lens[seq] - window + 1)


def expect_attention(problem: Problem) -> Expected:
    """The float64 result of a sample of rows, and the budgets of the queries' dtype."""
    case, dtype = problem.case, problem.results["out"].dtype
    tokens, results = [], []
    for seq, rows in checked_rows(case).items():
        tokens += [sum(case.q_lens[:seq]) + row for row in rows]
        with bounding(weights=dtype):
            results.append(attention_rows(problem, seq, rows))
    return budgeted(tokens, results, dtype)


def attention_rows(problem: Problem, seq: int, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attention in float64 of some new tokens of a sequence of the first copy.

    Returns:
        out [len(rows), num_heads, head_dim] and lse [len(rows), num_heads].

    Source: as ``tests/kernels/oracles/attention.py``, with which a test compares it.
    """
    case, shape, sinks = problem.case, problem.case.shape, problem.shared["sinks"]
    lowest = lowest_visible(case, seq)
    keys, values = gathered(problem, seq, 0, lowest)
    index = torch.tensor(rows, device=keys.device)
    queries = problem.each[0]["q"][sum(case.q_lens[:seq]) + index].double()
    position = case.context - case.q_lens[seq] + index
    distance = position[:, None] - torch.arange(lowest, case.context, device=keys.device)
    hidden = distance < 0
    if shape.sliding_window is not None:
        hidden |= distance >= shape.sliding_window
    out = torch.empty(queries.shape, dtype=torch.float64, device=keys.device)
    lse = torch.empty(queries.shape[:2], dtype=torch.float64, device=keys.device)
    for head in range(shape.num_heads):
        kv_head = head * shape.num_kv_heads // shape.num_heads
        key, value = keys[:, kv_head].double(), values[:, kv_head].double()
        logits = queries[:, head] @ key.T * shape.softmax_scale
        sink = None if sinks is None else sinks[head].expand(len(rows))
        out[:, head], lse[:, head] = attend(logits, value, sink, hidden)
    return out, lse


def _table(case: Case, seed: int) -> tuple[Tensor, int]:
    """Block table [batch, width] of shuffled pages, and the number of pages."""
    block_size = case.shape.block_size
    table = torch.zeros(case.batch, -(-case.context // block_size), dtype=torch.int32)
    seen = torch.zeros(table.shape, dtype=torch.bool)
    for seq in range(case.batch):
        seen[seq, lowest_visible(case, seq) // block_size :] = True
    num_pages = 1 + int(seen.sum())
    shuffled = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed))
    table[seen] = shuffled.int()
    return table, num_pages
