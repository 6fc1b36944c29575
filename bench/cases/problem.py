"""The tensors of a case, which all implementations share.

Several copies of them exceed the L2 cache; calls take turns over them. K/V tables are linear. Pages
behind a sliding window do not exist: their entries name page 0, which no query sees. Raw rows of
latents lie in a ring of pages, entries behind a linear table. ``topk_indices`` are drawn evenly and
independently for each token, so caches serve fewer of them than those of a trained indexer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.kernels import IndexPages, LatentPages

from .shapes import AttentionShape, Case, LatentShape

LOGIT_STD = 3.0  # a softmax over thousands of keys rests on few, so that a wrong value shows
L2_MULTIPLE, MAX_COPIES = 4, 32
QUANTIZED_ROWS = 1 << 16  # rows that are quantized at a time
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Problem:
    """The arguments of an operator for one case.

    Attributes:
        operator: function of ``quire.kernels``.
        shared: arguments that all copies share, by name.
        each: the other arguments, a dictionary for each copy.
        results: name -> empty tensor of a result that the operator writes (``out``, ``lse``).
        in_step: further arguments of each copy: the step's own rows; None for the indexer.
    """

    case: Case
    operator: Callable[..., Any]
    shared: dict[str, Any]
    each: list[dict[str, Any]]
    results: dict[str, Tensor]
    in_step: list[dict[str, Any]] | None = None

    @property
    def copies(self) -> int:
        """Calls that read different tensors."""
        return len(self.each)


@dataclass(frozen=True)
class Draw:
    """Random tensors of a device; on "meta" they have no values."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        made = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        return made.normal_(generator=self.generator)

    def table(self, batch: int, width: int) -> Tensor:
        """[batch, width] int32: every page from 1 on once."""
        order = torch.randperm(batch * width, generator=self.generator, device=self.device)
        return (order + 1).int().view(batch, width)

    def pages(
        self, table: Tensor, shape: LatentShape, rows: int
    ) -> LatentPages | IndexPages | Tensor:
        """Pages of random rows for a table's entries; for "mla" a tensor."""
        num_pages, dim = table.numel() + 1, shape.head_dim
        if shape.op == "mla":
            return self.normal(num_pages, rows, dim)
        if shape.op == "index":
            make, kind, width = IndexPages, {"index_dim": dim}, kernels.page_bytes(rows, dim + 4)
        else:
            make, kind = LatentPages, {"head_dim": dim, "rope_dim": shape.rope_dim}
            width = kernels.page_bytes(rows)
        if not shape.fp8:
            return make(self.normal(num_pages, rows, dim), rows, **kind)
        data = torch.zeros(num_pages, width, dtype=torch.uint8, device=self.device)
        pages = make(data, rows, **kind)
        if self.device.type != "meta":
            every = torch.arange(num_pages * rows, device=self.device)
            for part in every.split(QUANTIZED_ROWS):
                pages.write(part, self.normal(len(part), dim, dtype=torch.float32))
        return pages


def make_problem(
    case: Case,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    copies: int | None = None,
    seed: int = 0,
) -> Problem:
    """Random tensors for a case; on the device "meta" they have no values.

    Args:
        dtype: dtype of queries and plain pages.
        copies: calls that read different tensors; default: enough to exceed the L2 cache.
    """
    generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
    draw, shape = Draw(device, dtype, generator), case.shape
    q_lens = torch.tensor([0, *case.q_lens], device=device)
    shared: dict[str, Any] = {
        "seq_lens": torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        "cu_seqlens_q": q_lens.cumsum(0).int(),
        "max_seqlen_q": max(case.q_lens),
        "max_seq_len": case.context,
    }
    each = []
    for _ in range(_num_copies(device, case.num_bytes, copies)):
        q = draw.normal(case.num_tokens, shape.num_heads, shape.head_dim)
        each.append({"q": q.mul_(LOGIT_STD / (shape.softmax_scale * shape.head_dim**0.5))})
    if shape.op == "index":
        return _index(case, draw, shared, each)
    shared |= {"num_decodes": case.num_decodes, "softmax_scale": shape.softmax_scale}
    tokens, heads = case.num_tokens, shape.num_heads
    results = {
        "out": torch.empty(tokens, heads, shape.head_dim_v, dtype=dtype, device=device),
        "lse": torch.empty(heads, tokens, device=device),
    }
    if isinstance(shape, AttentionShape):
        return _attention(case, draw, shared, each, results)
    pools = _num_copies(device, case.cache_bytes, copies) if case.cache_bytes else 0
    return _latent(case, draw, shared, each, results, pools)


def _attention(
    case: Case, draw: Draw, shared: dict[str, Any], each: list[dict[str, Any]],
    results: dict[str, Tensor],
) -> Problem:  # fmt: skip
    """Attention over K and V of a page, which lie side by side."""
    shape = case.shape
    first = torch.tensor([lowest_visible(case, seq) for seq in range(case.batch)])
    block = torch.arange(-(-case.context // shape.block_size))
    seen = block >= first[:, None] // shape.block_size
    table, num_pages = torch.zeros(seen.shape, dtype=torch.int32), 1 + int(seen.sum())
    generator = torch.Generator().manual_seed(draw.generator.initial_seed())
    table[seen] = 1 + torch.randperm(num_pages - 1, generator=generator).int()
    shared["block_table"] = table.to(draw.device)
    shared["sinks"] = draw.normal(shape.num_heads).float() if shape.sinks else None
    operator = kernels.paged_attention
    if shape.sliding_window is not None:
        operator, shared["sliding_window"] = kernels.sliding_window_attention, shape.sliding_window
    for tensors in each:
        pages = draw.normal(num_pages, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        if shape.fp8:
            pages = pages.mul_(64).clamp_(-448, 448).to(E4M3)
            # A head's scales lie side by side, as in the runner's pool. They are powers of two, so
            # that rows in the model's dtype can hold what pages hold.
            size = (num_pages, 2, shape.num_kv_heads, shape.block_size)
            options = {"generator": draw.generator, "device": draw.device}
            scales = torch.randint(-7, -4, size, **options).float().exp2().transpose(2, 3)
            tensors["k_scale"], tensors["v_scale"] = scales.unbind(1)
        tensors["k_pages"], tensors["v_pages"] = pages.unbind(1)
    problem = Problem(case, operator, shared, each, results, in_step=[])
    for copy in range(len(each)):
        new = [
            gathered(problem, seq, copy, range(case.context - q_len, case.context))
            for seq, q_len in enumerate(case.q_lens)
        ]
        k, v = (torch.cat(rows).to(draw.dtype) for rows in zip(*new, strict=True))
        problem.in_step.append({"k": k, "v": v})
    return problem


def _latent(
    case: Case, draw: Draw, shared: dict[str, Any], each: list[dict[str, Any]],
    results: dict[str, Tensor], pools: int,
) -> Problem:  # fmt: skip
    """Latent attention.

    Args:
        pools: copies of the entries that exceed the L2 cache; 0: the operator has none.
    """
    shape, q_len, device = case.shape, case.q_lens[0], draw.device
    table = draw.table(case.batch, -(-shape.entries(case.context) // shape.rows))
    entries = [draw.pages(table, shape, shape.rows) for _ in range(pools)]
    operator = kernels.mla_attention if shape.op == "mla" else kernels.compressed_attention
    rope: dict[str, Any] = {}
    if shape.op == "mla":
        shared |= {"block_table": table, "head_dim_v": shape.head_dim_v}
    else:
        # Angles of 0, with which the fused inverse RoPE changes nothing.
        zero = torch.zeros(case.context, shape.rope_dim // 2, device=device)
        rope["cos_sin"] = torch.cat([zero.cos(), zero], 1)
        # Room for the rows that the first new token sees, the new ones, and a page at both ends.
        width = -(-(shape.sliding_window - 1 + q_len) // shape.window_rows) + 1
        shared |= {
            "window_table": draw.table(case.batch, width),
            "sliding_window": shape.sliding_window,
            "sinks": draw.normal(shape.num_heads, dtype=torch.float32),
        }
        if pools:
            shared |= {"compressed_table": table, "compress_ratio": shape.ratio}
    visible = (positions(case, device) + 1) // shape.ratio
    if shape.op == "csa":
        shared["topk_lens"] = visible.clamp(max=shape.topk).int()
    for copy, tensors in enumerate(each):
        if shape.op != "mla":
            tensors["window_pages"] = draw.pages(shared["window_table"], shape, shape.window_rows)
        if pools:
            name = "pages" if shape.op == "mla" else "compressed_pages"
            tensors[name] = entries[copy % pools]
        if shape.op == "csa":
            tensors["topk_indices"] = _spread_topk(visible, shape.topk, draw.generator)
    problem = Problem(case, operator, shared, each, results, in_step=[])
    new = range(case.context - q_len, case.context)
    for copy in range(len(each)):
        rows = [raw_rows(problem, seq, copy, new) for seq in range(case.batch)]
        problem.in_step.append({"kv": torch.cat(rows).to(draw.dtype), **rope})
    return problem


def _index(case: Case, draw: Draw, shared: dict[str, Any], each: list[dict[str, Any]]) -> Problem:
    shape = case.shape
    sizes = {"topk": shape.topk, "compress_ratio": shape.ratio, "max_seq_len": case.context}
    weights = draw.normal(case.num_tokens, shape.num_heads, dtype=torch.float32)
    table = draw.table(case.batch, -(-shape.entries(case.context) // shape.rows))
    shared |= {
        "weights": weights * (shape.num_heads * shape.head_dim) ** -0.5,
        "block_table": table,
        **sizes,
    }
    for tensors in each:
        tensors["pages"] = draw.pages(table, shape, shape.rows)
    results = {
        "out": torch.empty(case.num_tokens, shape.topk, dtype=torch.int32, device=draw.device),
        "lens": torch.empty(case.num_tokens, dtype=torch.int32, device=draw.device),
    }
    return Problem(case, kernels.index_topk, shared, each, results)


def lowest_visible(case: Case, seq: int) -> int:
    """The first position that some query of a sequence sees."""
    window = case.shape.sliding_window
    return 0 if window is None else max(0, case.context - case.q_lens[seq] - window + 1)


def gathered(problem: Problem, seq: int, copy: int, rows: range) -> tuple[Tensor, Tensor]:
    """K and V [len(rows), num_kv_heads, head_dim] of some positions of a sequence.

    Rows of e4m3 pages are fp32, scales applied.
    """
    tensors, block_size = problem.each[copy], problem.case.shape.block_size
    position = torch.arange(rows.start, rows.stop, device=tensors["q"].device)
    page = problem.shared["block_table"][seq, position // block_size].long()
    where, found = (page, position % block_size), []
    for name in ("k", "v"):
        pages, scale = tensors[f"{name}_pages"], tensors.get(f"{name}_scale")
        if scale is not None:
            values = pages.view(torch.uint8)[where].view(E4M3).float()
            found.append(values * scale[where][..., None])
        else:
            found.append(pages[where])
    return found[0], found[1]


def raw_rows(problem: Problem, seq: int, copy: int, rows: range) -> Tensor:
    """[len(rows), head_dim] fp32 raw rows of a sequence's positions."""
    shape, tensors = problem.case.shape, problem.each[copy]
    position = torch.arange(rows.start, rows.stop, device=tensors["q"].device)
    if shape.op == "mla":
        table = problem.shared["block_table"][seq]
        return tensors["pages"].flatten(0, 1)[slots(table, shape.rows, position)].float()
    table = problem.shared["window_table"][seq]
    return tensors["window_pages"].read(slots(table, shape.window_rows, position))


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
    """[num_tokens] int64: the position of every new token of sequences with equal lengths."""
    new = torch.arange(case.context - case.q_lens[0], case.context, device=device)
    return new.repeat(case.batch)


def _num_copies(device: torch.device, size: float, asked: int | None) -> int:
    """``asked`` copies, or those of ``size`` bytes that exceed the L2 cache; 1 on a CPU."""
    if asked is not None or device.type != "cuda":
        return asked or 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, max(1, -int(-L2_MULTIPLE * l2 // size)))


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
