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
    budgeted,
    checked_rows,
    lengths,
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
    shape = case.shape
    assert isinstance(shape, LatentShape)
    generator = random_generator(device, seed)
    pools = num_copies(device, case.cache_bytes, copies) if case.cache_bytes else 0
    copies = num_copies(device, case_bytes(case), copies)
    seq_lens, cu_seqlens_q = lengths(case, device)
    shared: dict[str, Any] = {
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": case.q_lens[0],
        "max_seq_len": case.context,
        "num_decodes": case.num_decodes,
        "softmax_scale": shape.softmax_scale,
        "workspace": _workspace(case, shape, device),
    }
    size = (case.num_tokens, shape.num_heads, shape.head_dim)
    std = LOGIT_STD / (shape.softmax_scale * shape.head_dim**0.5)
    each: list[dict[str, Any]] = []
    for _ in range(copies):
        q = torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)
        each.append({"q": q.mul_(std)})
    results = {
        "out": torch.empty(*size[:2], shape.head_dim_v, dtype=dtype, device=device),
        "lse": torch.empty(shape.num_heads, case.num_tokens, device=device),
    }
    table = shuffled_table(
        case.batch, -(-shape.entries(case.context) // shape.rows), generator, device
    )
    entries = [make_pages(table, shape, shape.rows, dtype, generator) for _ in range(pools)]
    if shape.op == "mla":
        shared |= {"block_table": table, "head_dim_v": shape.head_dim_v}
        for copy, tensors in enumerate(each):
            tensors["pages"] = entries[copy % pools]
        problem = Problem(case, mla_attention, shared, each, results, in_step=[])
    else:
        # Room for the rows that the first new token sees, the new ones, and a page at both ends.
        width = -(-(shape.sliding_window - 1 + case.q_lens[0]) // shape.window_rows) + 1
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
            tensors["window_pages"] = make_pages(
                shared["window_table"], shape, shape.window_rows, dtype, generator
            )
            if pools:
                tensors["compressed_pages"] = entries[copy % pools]
            if shape.op == "csa":
                tensors["topk_indices"] = _spread_topk(visible, shape.topk, generator)
        problem = Problem(case, compressed_attention, shared, each, results, in_step=[])
    for copy in range(copies):
        problem.in_step.append(_in_step(problem, copy))
    return problem


def _in_step(problem: Problem, copy: int) -> dict[str, Tensor]:
    """The step's own rows, and V4's fused inverse RoPE with angles of 0, which changes nothing."""
    case, shape = problem.case, problem.case.shape
    new = torch.arange(
        case.context - case.q_lens[0], case.context, device=problem.each[0]["q"].device
    )
    rows = [raw_rows(problem, copy, seq, new) for seq in range(case.batch)]
    found = {"kv": torch.cat(rows).to(problem.results["out"].dtype)}
    if shape.op != "mla":
        zero = torch.zeros(case.context, shape.rope_dim // 2, device=new.device)
        found["cos_sin"] = torch.cat([zero.cos(), zero], 1)
    return found


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
    return torch.arange(case.context - case.q_lens[0], case.context, device=device).repeat(
        case.batch
    )


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
    for seq, row, token in checked_rows(problem.case):
        tokens.append(token)
        with bounding(weights=torch.bfloat16):
            results.append(attend(problem, token, visible_rows(problem, seq, row)))
    rows = torch.tensor(tokens, device=problem.results["out"].device)
    return budgeted(rows, results, torch.bfloat16)


def visible_rows(problem: Problem, seq: int, row: int) -> Tensor:
    """[keys, head_dim] fp32 rows that a new token of a sequence sees in the first copy."""
    case, shape, tensors = problem.case, problem.case.shape, problem.each[0]
    position = case.context - case.q_lens[0] + row
    device = tensors["q"].device
    if shape.op == "mla":
        return raw_rows(problem, 0, seq, torch.arange(position + 1, device=device))
    lowest = max(0, position - shape.sliding_window + 1)
    found = raw_rows(problem, 0, seq, torch.arange(lowest, position + 1, device=device))
    if shape.op == "window":
        return found
    entry = torch.arange((position + 1) // shape.ratio, device=device)
    if shape.op == "csa":
        entry = tensors["topk_indices"][seq * case.q_lens[0] + row].long()
        entry = entry[entry >= 0]
    table = problem.shared["compressed_table"][seq]
    return torch.cat([found, tensors["compressed_pages"].read(slots(table, shape.rows, entry))])


def attend(problem: Problem, token: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in float64 of one token of the first copy to ``keys`` [n, head_dim].

    Returns:
        out [1, num_heads, head_dim_v] and lse [1, num_heads].

    Source: as ``quire.kernels.compressed_attention``; a test compares it with an oracle of loops.
    """
    shape, sinks, keys = problem.case.shape, problem.shared.get("sinks"), keys.double()
    logits = problem.each[0]["q"][token].double() @ keys.T * shape.softmax_scale
    lse = torch.logsumexp(logits, 1)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None]], 1)
    out = torch.softmax(logits, 1)[:, : len(keys)] @ keys[:, : shape.head_dim_v]
    return out[None], lse[None]


def _workspace(case: Case, shape: LatentShape, device: torch.device) -> Tensor | None:
    if device.type != "cuda" or not case.num_decodes:
        return None
    if shape.op == "mla":
        numel = workspace_numel(
            num_decodes=case.num_decodes,
            max_seqlen_q=max(case.q_lens[: case.num_decodes]),
            num_heads=shape.num_heads,
            num_kv_heads=1,
            head_dim=shape.head_dim_v,
            num_sms=num_sms(device),
        )
    else:
        numel = compressed_attention_workspace_numel(
            head_dim=shape.head_dim, num_sms=num_sms(device)
        )
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
