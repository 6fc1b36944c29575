"""FlashMLA: DeepSeek's kernels for Hopper, as vLLM builds them.

It serves V3's dense decode over pages of 64 rows, and V4's sparse attention over quantized pages.
Keys of the latter are lists of physical rows: one of the window, and one of entries as the extra
cache. Lists, and its schedule, which the first call computes, are not timed. It takes 64 or 128
heads of V4; fewer are padded to 64.

Source: FlashMLA, flash_mla_interface (conventions of its operators).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels import LatentPages

from ..cases.problem import Problem, positions, slots
from .peer import V4_OPS, Call, Peer, Unsupported, load_operators

DENSE_ROWS = 64
V4_HEADS = (64, 128)
LIST_ALIGNMENT = 64  # a list has a multiple of this many rows
MAX_LIST_BYTES = 8 * 2**30


def flashmla_peer(folder: Path | None) -> Peer:
    ops = load_operators(folder, "_flashmla_C")
    note = "schedule and lists of rows not timed; below 64 heads of V4 padded to 64"
    return Peer("flashmla", "as vLLM builds it", note, partial(calls_of, ops), ("mla", *V4_OPS))


def calls_of(ops: Any, problem: Problem) -> list[Call]:
    return (dense_calls if problem.case.shape.op == "mla" else sparse_calls)(ops, problem)


def dense_calls(ops: Any, problem: Problem) -> list[Call]:
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    if case.phase != "decode":
        raise Unsupported("dense prefill of latents")
    if shape.rows != DENSE_ROWS:
        raise Unsupported(f"pages of {shape.rows} rows")
    lengths = (shape.head_dim_v, shared["seq_lens"], shared["block_table"], shape.softmax_scale)
    plan: list[Any] = [None, None]

    def call(q: Tensor, pages: Tensor) -> Call:
        q, cache = q.unflatten(0, (case.batch, 1)), pages.unsqueeze(2)

        def run() -> tuple[Tensor]:
            out, _, *plan[:] = ops.dense_decode_fwd(q, cache, *lengths, True, *plan, None)
            return (out.flatten(0, 1),)

        return run

    return [call(**tensors) for tensors in problem.each]


def sparse_calls(ops: Any, problem: Problem) -> list[Call]:
    case, shape = problem.case, problem.case.shape
    if not shape.fp8:
        raise Unsupported("plain rows")
    heads = max(shape.num_heads, V4_HEADS[0])
    if heads not in V4_HEADS:
        raise Unsupported(f"{shape.num_heads} heads")
    listed = shape.sliding_window + (shape.topk or shape.entries(case.context))
    if problem.copies * 8 * case.num_tokens * listed > MAX_LIST_BYTES:
        raise Unsupported("lists of rows would not fit")
    padding = heads - shape.num_heads
    sinks, window_list = pad(problem.shared["sinks"], (0, padding)), window_rows(problem)
    plan: list[Any] = [None, None]

    def call(tensors: dict[str, Any]) -> Call:
        q = pad(tensors["q"], (0, 0, 0, padding)).unflatten(0, (case.batch, -1))
        window, extra, extra_list = cache_view(tensors["window_pages"]), None, None
        if "compressed_pages" in tensors:
            extra = cache_view(tensors["compressed_pages"])
            extra_list = entry_rows(problem, tensors.get("topk_indices"))

        def run() -> tuple[Tensor]:
            out, _, *plan[:] = ops.sparse_decode_fwd(
                q, window, window_list, None, sinks, *plan, extra, extra_list, None,
                shape.head_dim, shape.softmax_scale, None, False,
            )  # fmt: skip
            return (out.flatten(0, 1)[:, : shape.num_heads],)

        return run

    return [call(tensors) for tensors in problem.each]


def cache_view(pages: LatentPages) -> Tensor:
    """Pages in FlashMLA's shape [num_pages, rows, 1, 584] bytes, although scales lie behind all
    rows of a page.
    """
    num_pages, rows = pages.data.shape[0], pages.storage_block_size
    return pages.data.as_strided((num_pages, rows, 1, 584), (pages.data.stride(0), 584, 584, 1))


def window_rows(problem: Problem) -> Tensor:
    """[batch, q_len, n] int32 physical rows of each query's window, oldest first, -1 for none."""
    case, shape, tables = problem.case, problem.case.shape, problem.shared["window_table"]
    position = positions(case, tables.device)[: case.q_lens[0], None]
    seen = position - torch.arange(shape.sliding_window - 1, -1, -1, device=tables.device)
    return _aligned([slots(table, shape.window_rows, seen) for table in tables])


def entry_rows(problem: Problem, topk_indices: Tensor | None) -> Tensor:
    """[batch, q_len, n] int32 physical rows of each query's ``topk_indices``; None: of all entries
    that it sees.
    """
    case, shape, tables = problem.case, problem.case.shape, problem.shared["compressed_table"]
    if topk_indices is None:
        entry = torch.arange(shape.entries(case.context), device=tables.device)
        visible = (positions(case, tables.device)[:, None] + 1) // shape.ratio
        topk_indices = torch.where(entry < visible, entry, -1)
    indices = topk_indices.long().unflatten(0, (case.batch, -1))
    return _aligned([slots(t, shape.rows, i) for t, i in zip(tables, indices, strict=True)])


def _aligned(rows: list[Tensor]) -> Tensor:
    found = torch.stack(rows)
    return pad(found, (0, -found.shape[2] % LIST_ALIGNMENT), value=-1).int()
