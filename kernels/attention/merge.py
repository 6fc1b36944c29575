"""Merge of partial attention results by their natural-log lse, vectorised over the parts.

    m = max_p lse_p,  w_p = exp(lse_p - m)
    out = sum_p w_p out_p / (sum_p w_p + exp(sink - m)),  lse = m + log(sum_p w_p)

Sinks fold in once, at the end. A part with lse -inf has weight 0 and its rows are not read; where
all parts are such, out is 0 and lse -inf. Two kernels: ``merge_partials`` over dense parts, and the
merge of the KV splits that decode left in its workspace.

Source: FlashInfer (arXiv 2501.01005) 2.2; FlashDecoding for the split.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.arch import Arch
from ..common.decode_plans import MIN_SPLIT_KEYS
from ..common.launching import Launch, run
from ..common.merging import block_parts, load_sink, merge_rows
from . import split_kv
from .call import AttentionCall
from .configs import DecodePlan


class Parts(NamedTuple):
    """Partial results, [num_parts, num_tokens, num_heads, head_dim], or their lse without head_dim.

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_part, stride_token, stride_head: elements from one to the next.
    """

    data: Any
    stride_part: Any
    stride_token: Any
    stride_head: Any


@triton.jit
def _store(merged, merged_lse, out, lse, token, head, HEAD_DIM: tl.constexpr):
    """Store a merged row and its lse; lse may be None."""
    out_row = out.data + token * out.stride_token + head * out.stride_head
    tl.store(out_row + tl.arange(0, HEAD_DIM), merged.to(out.data.dtype.element_ty))
    if lse is not None:
        tl.store(lse.data + head * lse.stride_head + token, merged_lse)


@triton.jit(do_not_specialize=["num_parts"])
def _merge_partials_kernel(
    partial_out, partial_lse, sinks, out, lse, num_parts, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    merged, merged_lse = merge_rows(
        partial_out.data + token * partial_out.stride_token + head * partial_out.stride_head,
        partial_lse.data + head * partial_lse.stride_head + token,
        num_parts,
        partial_out.stride_part,
        partial_lse.stride_part,
        load_sink(sinks, head),
        HEAD_DIM,
        BLOCK_PARTS,
    )
    _store(merged, merged_lse, out, lse, token, head, HEAD_DIM)


@triton.jit(do_not_specialize=["num_decodes", "target_items"])
def _merge_splits_kernel(
    partial_out, first_lse, sinks, out, lse, seq_lens, cu_seqlens_q, num_decodes, num_heads,
    target_items, sliding_window, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr,
    MIN_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the KV splits of one head of one decode sequence, numbered as in `split_kv`."""
    seq = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first_token = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    seq_len = tl.load(seq_lens + seq)
    # The attention kernel wrote what is not split; most short sequences are not, whatever the batch
    # holds.
    if split_kv.num_splits(seq_len, q_len, MIN_TOKENS, sliding_window, NEW_KV, BLOCK_Q) <= 1:
        return
    batch = split_kv.Batch(seq_lens, cu_seqlens_q, num_decodes, sliding_window)
    tokens = split_kv.split_tokens(batch, target_items, NEW_KV, MIN_TOKENS)
    num_parts = split_kv.num_splits(seq_len, q_len, tokens, sliding_window, NEW_KV, BLOCK_Q)
    if num_parts <= 1:
        return
    first = split_kv.first_item(seq, batch, tokens, NEW_KV, BLOCK_Q).to(tl.int64)
    sink = load_sink(sinks, head)
    for t in range(0, q_len):
        row = (first * BLOCK_Q + t) * num_heads + head
        merged, merged_lse = merge_rows(
            partial_out + row * HEAD_DIM,
            partial_out + first_lse + row,
            num_parts,
            BLOCK_Q * num_heads * HEAD_DIM,
            BLOCK_Q * num_heads,
            sink,
            HEAD_DIM,
            BLOCK_PARTS,
        )
        _store(merged, merged_lse, out, lse, (first_token + t).to(tl.int64), head, HEAD_DIM)


# Registers of a thread, said outright (``common.tile_shapes.MAX_REGISTERS`` has the reason), and few
# enough for six programs an SM.
MERGE_REGISTERS = 80


def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Launch checked arguments, shaped as in ``quire.kernels.merge_partials``; returns ``out``."""
    run([prepare(partial_out, partial_lse, sinks, out, lse)], out)
    return out


def prepare(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Launch:
    """The launch that merges checked arguments; shapes as in ``quire.kernels.merge_partials``."""
    num_parts, num_tokens, num_heads, head_dim = partial_out.shape
    return Launch(
        _merge_partials_kernel,
        (num_tokens * num_heads,),
        {
            "partial_out": Parts(partial_out, *partial_out.stride()[:3]),
            "partial_lse": Parts(partial_lse, partial_lse.stride(0), 1, partial_lse.stride(1)),
            "sinks": sinks,
            "out": strided.rows(out),
            "lse": strided.lse_rows(lse),
            "num_parts": num_parts,
            "num_heads": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_PARTS": block_parts(num_parts, head_dim),
            "num_warps": 4,
        },
    )


def prepare_splits(
    call: AttentionCall,
    arch: Arch,
    partial_out: torch.Tensor,
    first_lse: int,
    plan: DecodePlan,
    block_q: int,
) -> Launch:
    """The launch that merges the KV splits of the decode sequences that have several.

    Args:
        call: the attention call whose ``out`` and ``lse`` are filled.
        arch: of the GPU.
        partial_out: [max_items, block_q, num_heads, head_dim] fp32, flat.
        first_lse: element of ``partial_out`` where [max_items, block_q, num_heads] natural-log lse
            begin.
        plan: the plan that the attention kernel is launched with.
        block_q: tokens of a query tile.
    """
    num_heads, head_dim = call.q.shape[1:]
    return Launch(
        _merge_splits_kernel,
        (call.num_decodes * num_heads,),
        {
            "partial_out": partial_out,
            "first_lse": first_lse,
            "sinks": call.sinks,
            "out": strided.rows(call.out),
            "lse": strided.lse_rows(call.lse),
            "seq_lens": call.seq_lens,
            "cu_seqlens_q": call.cu_seqlens_q,
            "num_decodes": call.num_decodes,
            "num_heads": num_heads,
            "target_items": plan.target_items,
            "sliding_window": call.sliding_window,
            "NEW_KV": call.paged_context,
            "BLOCK_Q": block_q,
            "MIN_TOKENS": MIN_SPLIT_KEYS,
            "HEAD_DIM": head_dim,
            # Of one sequence, however many others there are.
            "BLOCK_PARTS": block_parts(plan.target_items + 1, head_dim),
            "num_warps": 4,
            **arch.register_limit(MERGE_REGISTERS),
        },
    )
