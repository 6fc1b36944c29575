"""FlashMLA beside the others: DeepSeek's kernels for Hopper, as vLLM builds them, from the folder
of `bench.peers.folder`.

It serves V3's dense decode over pages of 64 rows, and V4's sparse attention over quantised pages,
whose keys it takes as lists of physical rows: those of the window, and of entries as the extra
cache. Lists are made outside of the timed calls, as its schedule is (which its first call
computes). It takes 64 or 128 heads of V4: fewer are padded to 64 beforehand.

Source: FlashMLA, flash_mla_interface (conventions of its operators).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels import LatentPages

from ..cases.latent_problem import AttentionProblem
from .folder import expect_nvidia, file_in
from .peer import Call, Peer, Unsupported

LIBRARY = "_flashmla_C.abi3.so"
DENSE_ROWS = 64
V4_HEADS = (64, 128)
# A list of rows has a multiple of this many.
LIST_ALIGNMENT = 64
MAX_LIST_BYTES = 8 * 2**30


def flashmla_peer(folder: Path | None) -> Peer:
    """FlashMLA.

    Raises:
        FileNotFoundError, OSError where its library cannot be loaded.
        NotImplementedError: under ROCm.
    """
    expect_nvidia("FlashMLA")
    library = file_in(folder, LIBRARY)
    torch.ops.load_library(str(library))
    ops = torch.ops._flashmla_C

    def prepare(problem: Any) -> list[Call]:
        if not isinstance(problem, AttentionProblem):
            raise Unsupported("no such operator")
        calls = dense_calls if problem.case.shape.op == "mla" else sparse_calls
        return calls(ops, problem)

    note = "schedule and lists of rows not timed; below 64 heads of V4 padded to 64"
    return Peer("flashmla", "vLLM 0.33.0 build", note, prepare)


def dense_calls(ops: Any, problem: AttentionProblem) -> list[Call]:
    """V3's decode.

    Raises:
        Unsupported.
    """
    case, shape = problem.case, problem.case.shape
    if case.phase != "decode":
        raise Unsupported("dense prefill of latents")
    if shape.rows != DENSE_ROWS:
        raise Unsupported(f"pages of {shape.rows} rows")

    assert problem.entries is not None
    plan: list[Any] = [None, None]

    def call(copy: int) -> Call:
        q = problem.q[copy].unflatten(0, (case.batch, 1))
        cache = problem.entries[copy].unsqueeze(2)

        def run() -> tuple[Tensor]:
            out, _, *plan[:] = ops.dense_decode_fwd(
                q, cache, shape.head_dim_v, problem.seq_lens, problem.entry_table, shape.softmax_scale, True, *plan, None
            )  # fmt: skip
            return (out.flatten(0, 1),)

        return run

    return [call(copy) for copy in range(problem.copies)]


def sparse_calls(ops: Any, problem: AttentionProblem) -> list[Call]:
    """V4 over lists of rows.

    Raises:
        Unsupported.
    """
    case, shape = problem.case, problem.case.shape
    if not case.fp8:
        raise Unsupported("plain rows")
    heads = max(shape.num_heads, V4_HEADS[0])
    if heads not in V4_HEADS:
        raise Unsupported(f"{shape.num_heads} heads")
    if problem.copies * list_bytes(problem) > MAX_LIST_BYTES:
        raise Unsupported("lists of rows would not fit")
    assert problem.window is not None
    sinks = pad(problem.sinks, (0, heads - shape.num_heads))
    window_list = window_rows(problem)
    plan: list[Any] = [None, None]

    def call(copy: int) -> Call:
        q = pad(problem.q[copy], (0, 0, 0, heads - shape.num_heads)).unflatten(0, (case.batch, -1))
        window = cache_view(problem.window[copy])
        extra = extra_list = None
        if problem.entries is not None:
            extra, extra_list = cache_view(problem.entries[copy]), entry_rows(problem, copy)

        def run() -> tuple[Tensor]:
            out, _, *plan[:] = ops.sparse_decode_fwd(
                q, window, window_list, None, sinks, *plan, extra, extra_list, None,
                shape.head_dim, shape.softmax_scale, None, False,
            )  # fmt: skip
            return (out.flatten(0, 1)[:, : shape.num_heads],)

        return run

    return [call(copy) for copy in range(problem.copies)]


def cache_view(pages: LatentPages) -> Tensor:
    """Pages in the shape that FlashMLA gives them, [num_pages, rows, 1, 584] bytes: rows of 584 are
    a fiction, scales lie behind all rows.
    """
    num_pages, rows, width = pages.data.shape[0], pages.storage_block_size, 584
    return pages.data.as_strided((num_pages, rows, 1, width), (pages.data.stride(0), width, width, 1))  # fmt: skip


def window_rows(problem: AttentionProblem) -> Tensor:
    """[batch, q_len, n] int32 physical rows of each query's window, oldest first, -1 before the
    first token.
    """
    case = problem.case
    q_len, reach = case.q_lens[0], case.shape.sliding_window
    position = torch.arange(case.context - q_len, case.context, device=problem.q.device)
    seen = position[:, None] - torch.arange(reach - 1, -1, -1, device=position.device)
    return _aligned(torch.stack([problem.window_slots(s, seen) for s in range(case.batch)]))


def entry_rows(problem: AttentionProblem, copy: int) -> Tensor:
    """Physical rows of each query's ``topk_indices``, or of all entries that it sees.

    Returns:
        [batch, q_len, n] int32.
    """
    case = problem.case
    q_len = case.q_lens[0]
    if problem.topk_indices is not None:
        topk_indices = problem.topk_indices[copy].unflatten(0, (case.batch, q_len)).long()
    else:
        position = torch.arange(case.context - q_len, case.context, device=problem.q.device)
        entry = torch.arange(case.num_entries, device=position.device)
        visible = entry < ((position + 1) // case.shape.ratio)[:, None]
        topk_indices = torch.where(visible, entry, -1).expand(case.batch, -1, -1)
    return _aligned(
        torch.stack([problem.entry_slots(s, topk_indices[s]) for s in range(case.batch)])
    )


def list_bytes(problem: AttentionProblem) -> int:
    """Bytes of the lists of one copy, as they are made (int64)."""
    shape = problem.case.shape
    entries = shape.topk if problem.topk_indices is not None else problem.case.num_entries
    return 8 * problem.case.num_tokens * (shape.sliding_window + entries)


def _aligned(slots: Tensor) -> Tensor:
    return pad(slots, (0, -slots.shape[2] % LIST_ALIGNMENT), value=-1).int()
