"""Problems of latent attention: raw rows in a ring of pages, entries behind a linear table.

Every copy has queries, raw rows and ``topk_indices`` of its own. Entries have as many copies as
exceed the L2 cache. ``topk_indices`` are drawn evenly and independently for each token, so caches
serve fewer of them than those of a trained indexer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels import (
    IndexPages,
    LatentPages,
    compressed_attention,
    compressed_attention_workspace_numel,
    mla_attention,
    page_bytes,
    workspace_numel,
)

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
from .shapes import Case, LatentShape
from .work import case_bytes

QUANTIZED_ROWS = 1 << 16  # rows that are quantized at a time


def make_latent_attention(
    case: Case, device: torch.device, dtype: torch.dtype, copies: int | None, seed: int
) -> Problem:
    """Random tensors for a case; arguments as in `bench.cases.make.make_problem`."""
    shape, generator, q_len = case.shape, random_generator(device, seed), case.q_lens[0]
    pools = num_copies(device, case.cache_bytes, copies) if case.cache_bytes else 0
    size = (case.num_tokens, shape.num_heads, shape.head_dim)
    std = LOGIT_STD / (shape.softmax_scale * shape.head_dim**0.5)
    each: list[dict[str, Any]] = []
    for _ in range(num_copies(device, case_bytes(case), copies)):
        q = torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)
        each.append({"q": q.mul_(std)})
    results = {
        "out": torch.empty(*size[:2], shape.head_dim_v, dtype=dtype, device=device),
        "lse": torch.empty(shape.num_heads, case.num_tokens, device=device),
    }
    shared: dict[str, Any] = {
        **batch_arguments(case, device),
        "num_decodes": case.num_decodes,
        "softmax_scale": shape.softmax_scale,
        "workspace": _workspace(case, device),
    }
    width = -(-shape.entries(case.context) // shape.rows)
    table = shuffled_table(case.batch, width, generator, device)
    entries = [make_pages(table, shape, shape.rows, dtype, generator) for _ in range(pools)]
    operator = mla_attention if shape.op == "mla" else compressed_attention
    if shape.op == "mla":
        shared |= {"block_table": table, "head_dim_v": shape.head_dim_v}
    else:
        # Room for the rows that the first new token sees, the new ones, and a page at both ends.
        width = -(-(shape.sliding_window - 1 + q_len) // shape.window_rows) + 1
        shared |= {
            "window_table": shuffled_table(case.batch, width, generator, device),
            "sliding_window": shape.sliding_window,
            "sinks": torch.randn(shape.num_heads, generator=generator, device=device),
        }
        if pools:
            shared |= {"compressed_table": table, "compress_ratio": shape.ratio}
    visible = (positions(case, device) + 1) // shape.ratio
    if shape.op == "csa":
        shared["topk_lens"] = visible.clamp(max=shape.topk).int()
    for copy, tensors in enumerate(each):
        if shape.op != "mla":
            window = (shared["window_table"], shape, shape.window_rows)
            tensors["window_pages"] = make_pages(*window, dtype, generator)
        if pools:
            name = "pages" if shape.op == "mla" else "compressed_pages"
            tensors[name] = entries[copy % pools]
        if shape.op == "csa":
            tensors["topk_indices"] = _spread_topk(visible, shape.topk, generator)
    problem = Problem(case, operator, shared, each, results, in_step=[])
    # The step's own rows, and V4's fused inverse RoPE with angles of 0, which changes nothing.
    new = torch.arange(case.context - q_len, case.context, device=device)
    zero = torch.zeros(case.context, shape.rope_dim // 2, device=device)
    rope = {} if shape.op == "mla" else {"cos_sin": torch.cat([zero.cos(), zero], 1)}
    for copy in range(len(each)):
        rows = [raw_rows(problem, copy, seq, new) for seq in range(case.batch)]
        problem.in_step.append({"kv": torch.cat(rows).to(dtype), **rope})
    return problem


def make_pages(
    table: Tensor, shape: LatentShape, rows: int, dtype: torch.dtype, generator: torch.Generator
) -> LatentPages | IndexPages | Tensor:
    """Pages for a table's entries, of random normal rows; for "mla" a tensor."""
    num_pages, dim, device = table.numel() + 1, shape.head_dim, table.device
    index = shape.op == "index"
    kind = {"index_dim": dim} if index else {"head_dim": dim, "rope_dim": shape.rope_dim}
    make = IndexPages if index else LatentPages
    if not shape.fp8:
        data = torch.empty(num_pages, rows, dim, dtype=dtype, device=device)
        data.normal_(generator=generator)
        return data if shape.op == "mla" else make(data, rows, **kind)
    width = page_bytes(rows, dim + 4) if index else page_bytes(rows)
    pages = make(torch.zeros(num_pages, width, dtype=torch.uint8, device=device), rows, **kind)
    if device.type == "meta":
        return pages
    for slots in torch.arange(num_pages * rows, device=device).split(QUANTIZED_ROWS):
        pages.write(slots, torch.randn(len(slots), dim, generator=generator, device=device))
    return pages


def shuffled_table(
    batch: int, width: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """[batch, width] int32: every page from 1 on once."""
    order = torch.randperm(batch * width, generator=generator, device=device)
    return (order + 1).int().view(batch, width)


def slots(table: Tensor, rows: int, index: Tensor) -> Tensor:
    """Physical rows of one sequence; -1 where the index is negative.

    Args:
        table: [width], pages of the sequence, a ring if indices run beyond it.
        rows: rows of a page.
        index: int64 positions or entries, any shape.
    """
    known = index.clamp(min=0)
    page = table.long()[known // rows % len(table)]
    return torch.where(index < 0, -1, page * rows + known % rows)


def positions(case: Case, device: torch.device) -> Tensor:
    """[num_tokens] int64: the position of every new token."""
    new = torch.arange(case.context - case.q_lens[0], case.context, device=device)
    return new.repeat(case.batch)


def raw_rows(problem: Problem, copy: int, seq: int, position: Tensor) -> Tensor:
    """[len(position), head_dim] fp32 raw rows of a sequence."""
    shape, tensors = problem.case.shape, problem.each[copy]
    if shape.op == "mla":
        table = problem.shared["block_table"][seq]
        return tensors["pages"].flatten(0, 1)[slots(table, shape.rows, position)].float()
    table = problem.shared["window_table"][seq]
    return tensors["window_pages"].read(slots(table, shape.window_rows, position))


def expect_latent_attention(problem: Problem) -> Expected:
    """The float64 result of a sample of rows of the first copy, and the budgets of bf16."""
    tokens, results = [], []
    for seq, rows in checked_rows(problem.case).items():
        for row in rows:
            tokens.append(seq * problem.case.q_lens[0] + row)
            with bounding(weights=torch.bfloat16):
                results.append(latent_row(problem, seq, row))
    return budgeted(tokens, results, torch.bfloat16)


def latent_row(problem: Problem, seq: int, row: int) -> tuple[Tensor, Tensor]:
    """Attention in float64 of one new token of a sequence of the first copy.

    Returns:
        out [1, num_heads, head_dim_v] and lse [1, num_heads].

    Source: as ``quire.kernels.compressed_attention``; a test compares it with an oracle of loops.
    """
    shape, sinks = problem.case.shape, problem.shared.get("sinks")
    keys = visible_rows(problem, seq, row).double()
    q = problem.each[0]["q"][seq * problem.case.q_lens[0] + row].double()
    logits = q @ keys.T * shape.softmax_scale
    out, lse = attend(logits, keys[:, : shape.head_dim_v], sinks)
    return out[None], lse[None]


def visible_rows(problem: Problem, seq: int, row: int) -> Tensor:
    """[keys, head_dim] fp32 rows that a new token of a sequence sees in the first copy."""
    case, shape, tensors = problem.case, problem.case.shape, problem.each[0]
    position = case.context - case.q_lens[0] + row
    device = tensors["q"].device
    lowest = 0 if shape.op == "mla" else max(0, position - shape.sliding_window + 1)
    found = raw_rows(problem, 0, seq, torch.arange(lowest, position + 1, device=device))
    if shape.op in ("mla", "window"):
        return found
    entry = torch.arange((position + 1) // shape.ratio, device=device)
    if shape.op == "csa":
        entry = tensors["topk_indices"][seq * case.q_lens[0] + row].long()
        entry = entry[entry >= 0]
    table = problem.shared["compressed_table"][seq]
    return torch.cat([found, tensors["compressed_pages"].read(slots(table, shape.rows, entry))])


def _workspace(case: Case, device: torch.device) -> Tensor | None:
    shape = case.shape
    if device.type != "cuda" or not case.num_decodes:
        return None
    if shape.op != "mla":
        count = num_sms(device)
        numel = compressed_attention_workspace_numel(head_dim=shape.head_dim, num_sms=count)
        return torch.empty(numel, device=device)
    numel = workspace_numel(
        num_decodes=case.num_decodes, max_seqlen_q=case.q_lens[0], num_heads=shape.num_heads,
        num_kv_heads=1, head_dim=shape.head_dim_v, num_sms=num_sms(device),
    )  # fmt: skip
    return torch.empty(numel, device=device)


def _spread_topk(visible: Tensor, topk: int, generator: torch.Generator) -> Tensor:
    """[num_tokens, topk] int32 ascending entries, then -1.

    All entries of a token that sees at most ``topk``; else one of each of ``topk`` equal parts.
    """
    rank = torch.arange(topk, device=visible.device)
    first = rank * visible[:, None] // topk
    stop = (rank + 1) * visible[:, None] // topk
    draw = torch.rand(first.shape, generator=generator, device=visible.device)
    spread = first + (draw * (stop - first)).long().clamp(max=(stop - first - 1).clamp(min=0))
    few = torch.where(rank < visible[:, None], rank, -1)
    return torch.where(visible[:, None] <= topk, few, spread).int()
