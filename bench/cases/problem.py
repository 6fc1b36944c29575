"""The tensors of a case, which all implementations share.

Several copies of them exceed the L2 cache; calls take turns over them. K/V tables are linear. Pages
behind a sliding window do not exist: their entries name page 0, which no query sees. Raw rows of
latents lie in a ring of pages, entries behind a linear table. ``topk_indices`` are drawn evenly and
independently for each token, so caches serve fewer of them than those of a trained indexer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.kernels import IndexPages, LatentPages

from .shapes import Case, Shape

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
        made = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        return made.normal_(generator=self.generator)

    def table(self, batch: int, width: int) -> Tensor:
        """[batch, width] int32: every page from 1 on once."""
        order = torch.randperm(batch * width, generator=self.generator, device=self.device)
        return (order + 1).int().view(batch, width)

    def latents(self, table: Tensor, shape: Shape, rows: int) -> LatentPages | IndexPages | Tensor:
        """Pages of random latent rows for a table's entries; for "mla" a tensor."""
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
        pages = make(
            torch.zeros(num_pages, width, dtype=torch.uint8, device=self.device), rows, **kind
        )
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
    each: list[dict[str, Any]] = []
    for _ in range(_num_copies(device, case.num_bytes, copies)):
        q = draw.normal(case.num_tokens, shape.num_heads, shape.head_dim)
        each.append({"q": q.mul_(LOGIT_STD / (shape.softmax_scale * shape.head_dim**0.5))})
    tokens, empty = case.num_tokens, functools.partial(torch.empty, device=device)
    if shape.op == "index":
        _index(case, draw, shared, each)
        results = {
            "out": empty(tokens, shape.topk, dtype=torch.int32),
            "lens": empty(tokens, dtype=torch.int32),
        }
        return Problem(case, kernels.index_topk, shared, each, results)
    shared |= {"num_decodes": case.num_decodes, "softmax_scale": shape.softmax_scale}
    results = {
        "out": empty(tokens, shape.num_heads, shape.head_dim_v, dtype=dtype),
        "lse": empty(shape.num_heads, tokens),
    }
    names, rope = ("kv",), {}
    if shape.op == "attention":
        names, operator = ("k", "v"), kernels.paged_attention
        if shape.sliding_window is not None:
            operator = kernels.sliding_window_attention
        _attention(case, draw, shared, each)
    elif shape.op == "mla":
        operator = kernels.mla_attention
        _latent(case, draw, shared, each, copies)
    else:
        operator = kernels.compressed_attention
        _latent(case, draw, shared, each, copies)
        # Angles of 0, with which the fused inverse RoPE changes nothing.
        zero = torch.zeros(case.context, shape.rope_dim // 2, device=device)
        rope["cos_sin"] = torch.cat([zero.cos(), zero], 1)
    problem = Problem(case, operator, shared, each, results, in_step=[])
    for copy in range(len(each)):
        rows = [stored(problem, seq, copy, new) for seq, new in enumerate(case.new)]
        own = (torch.cat(parts).to(dtype) for parts in zip(*rows, strict=True))
        problem.in_step.append(dict(zip(names, own, strict=True)) | rope)
    return problem


def _attention(case: Case, draw: Draw, shared: dict[str, Any], each: list[dict[str, Any]]) -> None:
    """Add what attention reads: K and V of a page, which lie side by side."""
    shape = case.shape
    first = torch.tensor([shape.lowest(new.start) for new in case.new])
    block = torch.arange(-(-case.context // shape.rows))
    seen = block >= first[:, None] // shape.rows
    table, num_pages = torch.zeros(seen.shape, dtype=torch.int32), 1 + int(seen.sum())
    generator = torch.Generator().manual_seed(draw.generator.initial_seed())
    table[seen] = 1 + torch.randperm(num_pages - 1, generator=generator).int()
    shared["block_table"] = table.to(draw.device)
    shared["sinks"] = draw.normal(shape.num_heads).float() if shape.sinks else None
    if shape.sliding_window is not None:
        shared["sliding_window"] = shape.sliding_window
    for tensors in each:
        pages = draw.normal(num_pages, 2, shape.rows, shape.num_kv_heads, shape.head_dim)
        if shape.fp8:
            pages = pages.mul_(64).clamp_(-448, 448).to(E4M3)
            # A head's scales lie side by side, as in the runner's pool. They are powers of two, so
            # that rows in the model's dtype can hold what pages hold.
            size = (num_pages, 2, shape.num_kv_heads, shape.rows)
            options = {"generator": draw.generator, "device": draw.device}
            scales = torch.randint(-7, -4, size, **options).float().exp2().transpose(2, 3)
            tensors["k_scale"], tensors["v_scale"] = scales.unbind(1)
        tensors["k_pages"], tensors["v_pages"] = pages.unbind(1)


def _latent(
    case: Case, draw: Draw, shared: dict[str, Any], each: list[dict[str, Any]], copies: int | None
) -> None:
    """Add what latent attention reads; entries are in as many copies as exceed the L2 cache."""
    shape = case.shape
    table = draw.table(case.batch, -(-shape.entries(case.context) // shape.rows))
    pools = _num_copies(draw.device, case.cache_bytes, copies) if case.cache_bytes else 0
    entries = [draw.latents(table, shape, shape.rows) for _ in range(pools)]
    if shape.op == "mla":
        shared |= {"block_table": table, "head_dim_v": shape.head_dim_v}
    else:
        # Room for the rows that the first new token sees, the new ones, and a page at both ends.
        width = -(-(shape.sliding_window - 1 + case.q_lens[0]) // shape.window_rows) + 1
        shared |= {
            "window_table": draw.table(case.batch, width),
            "sliding_window": shape.sliding_window,
            "sinks": draw.normal(shape.num_heads, dtype=torch.float32),
        }
        if pools:
            shared |= {"compressed_table": table, "compress_ratio": shape.ratio}
    visible = (positions(case, draw.device) + 1) // shape.ratio
    if shape.op == "csa":
        shared["topk_lens"] = visible.clamp(max=shape.topk).int()
    for copy, tensors in enumerate(each):
        if shape.op != "mla":
            tensors["window_pages"] = draw.latents(shared["window_table"], shape, shape.window_rows)
        if pools:
            name = "pages" if shape.op == "mla" else "compressed_pages"
            tensors[name] = entries[copy % pools]
        if shape.op == "csa":
            tensors["topk_indices"] = _spread_topk(visible, shape.topk, draw.generator)


def _index(case: Case, draw: Draw, shared: dict[str, Any], each: list[dict[str, Any]]) -> None:
    shape = case.shape
    weights = draw.normal(case.num_tokens, shape.num_heads, dtype=torch.float32)
    table = draw.table(case.batch, -(-shape.entries(case.context) // shape.rows))
    shared |= {
        "weights": weights * (shape.num_heads * shape.head_dim) ** -0.5,
        "block_table": table,
        "topk": shape.topk,
        "compress_ratio": shape.ratio,
    }
    for tensors in each:
        tensors["pages"] = draw.latents(table, shape, shape.rows)


def stored(problem: Problem, seq: int, copy: int, rows: range) -> tuple[Tensor, ...]:
    """Some positions of a sequence as pages hold them.

    Returns:
        K and V [len(rows), num_kv_heads, head_dim], those of e4m3 pages in fp32, scales applied;
        or raw latent rows [len(rows), head_dim] fp32.
    """
    shape, tensors, shared = problem.case.shape, problem.each[copy], problem.shared
    position = torch.arange(rows.start, rows.stop, device=tensors["q"].device)
    if shape.op == "mla":
        slot = slots(shared["block_table"][seq], shape.rows, position)
        return (tensors["pages"].flatten(0, 1)[slot].float(),)
    if shape.op != "attention":
        slot = slots(shared["window_table"][seq], shape.window_rows, position)
        return (tensors["window_pages"].read(slot),)
    where = shared["block_table"][seq, position // shape.rows].long(), position % shape.rows
    found = []
    for name in ("k", "v"):
        pages, scale = tensors[f"{name}_pages"], tensors.get(f"{name}_scale")
        if scale is not None:
            values = pages.view(torch.uint8)[where].view(E4M3).float()
            found.append(values * scale[where][..., None])
        else:
            found.append(pages[where])
    return found[0], found[1]


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
    return torch.cat([torch.arange(new.start, new.stop, device=device) for new in case.new])


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
