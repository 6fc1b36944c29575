"""Partial results of one query merged by their lse: KV splits of decode, and dense parts.

    out = sum_p exp(lse_p - z) out_p   with   z = log(sum_p exp(lse_p) + exp(sink))

Source: FlashInfer (arXiv 2501.01005) 2.2, attention states and their merge.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from . import launching, split_kv, strided
from .arch import Arch
from .query_tiles import LOG2E
from .split_kv import DecodePlan

# Registers of a thread of a merge of splits: few enough for five programs an SM.
MERGE_REGISTERS = 96


@triton.jit
def _exp(x):
    # Differences of logarithms come in: scaled to base 2 only here, large ones lose nothing to the
    # factor's rounding.
    return tl.exp2(x * LOG2E)


@triton.jit
def _merge_rows(
    rows, lses, num_parts, stride_part, lse_stride_part, sinks, head,
    HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge one row of every part; returns the row [HEAD_DIM] fp32 and its natural-log lse."""
    part = tl.arange(0, BLOCK_PARTS)
    dim = tl.arange(0, HEAD_DIM)
    row_max = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, num_parts, BLOCK_PARTS):
        index = (start + part).to(tl.int64)
        live = index < num_parts
        part_lse = tl.load(lses + index * lse_stride_part, mask=live, other=float("-inf"))
        live &= part_lse != float("-inf")
        new_max = tl.maximum(row_max, tl.max(part_lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = _exp(part_lse - base)  # [BLOCK_PARTS]
        decay = _exp(row_max - base)
        cells = rows + index[:, None] * stride_part + dim[None, :]
        values = tl.load(cells, mask=live[:, None], other=0.0).to(tl.float32)
        acc = acc * decay + tl.sum(values * weight[:, None], 0)
        row_sum = row_sum * decay + tl.sum(weight, 0)
        row_max = new_max
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head)
    joint = tl.maximum(row_max, sink)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    share = _exp(row_max - base)
    total = row_sum * share + _exp(sink - base)
    merged = acc * tl.where(total > 0.0, share / total, 0.0)
    return merged, tl.where(row_sum > 0.0, row_max + tl.log(row_sum), float("-inf"))


@triton.jit
def _store(merged, merged_lse, out, lse, token, head, HEAD_DIM: tl.constexpr):
    row = out.data + token * out.stride_token + head * out.stride_head
    tl.store(row + tl.arange(0, HEAD_DIM), merged.to(out.data.dtype.element_ty))
    if lse is not None:
        tl.store(lse.data + token * lse.stride_token + head * lse.stride_head, merged_lse)


@triton.jit
def _inverse_rope(row, position, cos_sin, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Rotate the trailing pairs (2i, 2i + 1) of a row by minus the angles of a position."""
    even, odd = tl.split(tl.reshape(row, [HEAD_DIM // 2, 2]))
    pair = tl.arange(0, HEAD_DIM // 2) - (HEAD_DIM - ROPE_DIM) // 2
    angle = cos_sin.data + position.to(tl.int64) * cos_sin.stride_row + pair
    # A padding row has no position. (Triton 3.9's interpreter takes no mask made of a vector & a
    # scalar.)
    known = pair >= tl.where(position >= 0, 0, HEAD_DIM)
    cos = tl.load(angle, mask=known, other=1.0)
    sin = tl.load(angle + ROPE_DIM // 2, mask=known, other=0.0)
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [HEAD_DIM])


@triton.jit(
    do_not_specialize=["num_decodes", "decode_tokens", "target_splits", "ratio", "most_entries"]
)
def merge_splits_kernel(
    partial_out, first_lse, sinks, cos_sin, out, lse, seq_lens, cu_seqlens_q, num_decodes,
    decode_tokens, target_splits, sliding_window, ratio, most_entries, num_heads,
    NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    EMPTY_LSE: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the KV splits of one head of one decode sequence, if it has several.

    cos_sin: for the inverse RoPE of the trailing ROPE_DIM channels, or None. EMPTY_LSE: lse of a
    query without keys. num_decodes to most_entries: as in ``split_kv.DecodeBatch``.
    """
    seq = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first_token, q_len, context = seq, 1, 0
    if seq_lens is not None:
        first_token = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
        context = tl.load(seq_lens + seq) - q_len
    if q_len > decode_tokens:
        return
    batch = split_kv.DecodeBatch(
        seq_lens, cu_seqlens_q, num_decodes, decode_tokens, target_splits, sliding_window, ratio,
        most_entries,
    )  # fmt: skip
    first, num_parts = split_kv.splits_of(seq, batch, NEW_KV, BLOCK_Q)
    if num_parts <= 1:
        return
    for t in range(0, q_len):
        part = (first + t // BLOCK_Q * num_parts).to(tl.int64)
        row = (part * BLOCK_Q + t % BLOCK_Q) * num_heads + head
        merged, merged_lse = _merge_rows(
            partial_out + row * HEAD_DIM, partial_out + first_lse + row, num_parts,
            BLOCK_Q * num_heads * HEAD_DIM, BLOCK_Q * num_heads, sinks, head, HEAD_DIM, BLOCK_PARTS,
        )  # fmt: skip
        if cos_sin is not None:
            merged = _inverse_rope(merged, context + t, cos_sin, HEAD_DIM, ROPE_DIM)
        if EMPTY_LSE > 0:
            merged_lse = tl.where(merged_lse == float("-inf"), EMPTY_LSE, merged_lse)
        _store(merged, merged_lse, out, lse, (first_token + t).to(tl.int64), head, HEAD_DIM)


@triton.jit(do_not_specialize=["num_parts"])
def merge_partials_kernel(
    partial_out, partial_lse, sinks, out, lse, num_parts, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge one row of dense parts: ``strided.Pages`` [num_parts, num_tokens, num_heads, ...]."""
    token = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    merged, merged_lse = _merge_rows(
        partial_out.data + token * partial_out.stride_row + head * partial_out.stride_head,
        partial_lse.data + token * partial_lse.stride_row + head * partial_lse.stride_head,
        num_parts, partial_out.stride_page, partial_lse.stride_page, sinks, head, HEAD_DIM,
        BLOCK_PARTS,
    )  # fmt: skip
    _store(merged, merged_lse, out, lse, token, head, HEAD_DIM)


def merge_splits(
    call: Any, plan: DecodePlan, partial_out: torch.Tensor | None, first_lse: int, arch: Arch,
    *, dim: int, block_q: int, new_kv: bool, cos_sin: torch.Tensor | None = None,
    ratio: int | None = None, most_entries: int = 0, empty_lse: float = -math.inf,
) -> None:  # fmt: skip
    """Launch the merge of a call's decode, if any of it was split.

    dim, block_q: channels of an output row, tokens of a query tile. Others: as in
    ``merge_splits_kernel``.
    """
    if partial_out is None:
        return
    num_heads = call.q.shape[1]
    launching.launch(
        merge_splits_kernel, (call.num_decodes * num_heads,),
        partial_out=partial_out, first_lse=first_lse, sinks=call.sinks,
        cos_sin=strided.matrix(cos_sin), out=strided.rows(call.out), lse=strided.lse_rows(call.lse),
        seq_lens=call.seq_lens, cu_seqlens_q=call.cu_seqlens_q, num_decodes=call.num_decodes,
        decode_tokens=plan.decode_tokens, target_splits=plan.target_splits,
        sliding_window=call.sliding_window, ratio=ratio, most_entries=most_entries,
        num_heads=num_heads, NEW_KV=new_kv, BLOCK_Q=block_q, HEAD_DIM=dim,
        ROPE_DIM=0 if cos_sin is None else cos_sin.shape[1], EMPTY_LSE=empty_lse,
        BLOCK_PARTS=_block_parts(plan.target_splits, dim), num_warps=4, **launching.EQUAL_SUMS,
        **arch.register_limit(MERGE_REGISTERS),
    )  # fmt: skip


def merge_dense(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Launch checked arguments, shaped as in ``quire.kernels.merge_partials``; returns ``out``."""
    num_parts, num_tokens, num_heads, head_dim = partial_out.shape
    with torch.cuda.device_of(out):
        launching.launch(
            merge_partials_kernel, (num_tokens * num_heads,),
            partial_out=strided.pages(partial_out),
            partial_lse=strided.Pages(partial_lse, partial_lse.stride(0), 1, partial_lse.stride(1)),
            sinks=sinks, out=strided.rows(out), lse=strided.lse_rows(lse), num_parts=num_parts,
            num_heads=num_heads, HEAD_DIM=head_dim, BLOCK_PARTS=_block_parts(num_parts, head_dim),
            num_warps=4, **launching.EQUAL_SUMS,
        )  # fmt: skip
    return out


def _block_parts(num_parts: int, head_dim: int) -> int:
    """Parts that are merged at once: all of a few, or what keeps a tile at 4096 values."""
    return min(triton.next_power_of_2(num_parts), max(8, 4096 // head_dim))
