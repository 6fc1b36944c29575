"""Merge of partial attention results by their natural-log lse, vectorised over the parts; sinks fold in once, at the end.

    m = max_p lse_p,  w_p = exp(lse_p - m),  out = sum_p w_p out_p / (sum_p w_p + exp(sink - m)),  lse = m + log(sum_p w_p)

A part with lse -inf has weight 0 and its rows are not read; where all parts are such, out is 0 and lse -inf.
Two kernels: ``merge_partials`` over dense parts, and the merge of the pieces that split-KV decode left in its workspace.

Source: FlashInfer (arXiv 2501.01005) 2.2; FlashDecoding for the split.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..common import launch_cache, split_kv
from ..common.decode_plans import MIN_SPLIT_KEYS
from ..common.launching import Launch
from ..common.merging import block_parts, load_sink, merge_rows
from .call import AttentionCall, check_merge
from .configs import DecodePlan


@triton.jit(do_not_specialize=["num_parts"])
def _merge_partials_kernel(
    partial_out,
    partial_lse,
    sinks,
    out,
    lse,
    num_parts,
    num_heads,
    stride_part,
    stride_token,
    stride_head,
    lse_stride_part,
    lse_stride_head,
    out_stride_token,
    out_stride_head,
    merged_lse_stride_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    token = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    merged, merged_lse = merge_rows(
        partial_out + token * stride_token + head * stride_head,
        partial_lse + head * lse_stride_head + token,
        num_parts,
        stride_part,
        lse_stride_part,
        load_sink(sinks, head),
        HEAD_DIM,
        BLOCK_PARTS,
    )
    out_row = out + token * out_stride_token + head * out_stride_head
    tl.store(out_row + tl.arange(0, HEAD_DIM), merged.to(out.dtype.element_ty))
    if lse is not None:
        tl.store(lse + head * merged_lse_stride_head + token, merged_lse)


@triton.jit(do_not_specialize=["num_decodes", "target_items"])
def _merge_pieces_kernel(
    partial_out,
    first_lse,
    sinks,
    out,
    lse,
    seq_lens,
    cu_seqlens_q,
    num_decodes,
    num_heads,
    target_items,
    sliding_window,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    FRESH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Merge the pieces of one head of one decode sequence, which the attention kernel numbered as ``common.split_kv`` does."""
    seq = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first_token = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    seq_len = tl.load(seq_lens + seq)
    # The attention kernel wrote what is in one piece; most short sequences are, whatever the batch holds.
    if split_kv.num_pieces(seq_len, q_len, MIN_TOKENS, sliding_window, FRESH, BLOCK_Q) <= 1:
        return
    tokens = split_kv.piece_tokens(
        seq_lens, cu_seqlens_q, num_decodes, target_items, sliding_window, FRESH, MIN_TOKENS
    )
    num_parts = split_kv.num_pieces(seq_len, q_len, tokens, sliding_window, FRESH, BLOCK_Q)
    if num_parts <= 1:
        return
    first = split_kv.first_item(
        seq, seq_lens, cu_seqlens_q, num_decodes, tokens, sliding_window, FRESH, BLOCK_Q
    ).to(tl.int64)
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
        token = (first_token + t).to(tl.int64)
        out_row = out + token * out_stride_token + head * out_stride_head
        tl.store(out_row + tl.arange(0, HEAD_DIM), merged.to(out.dtype.element_ty))
        if lse is not None:
            tl.store(lse + head * lse_stride_head + token, merged_lse)


def merge(arguments: dict[str, Any]) -> torch.Tensor:
    """Check and launch ``quire.kernels.merge_partials(**arguments)``; returns ``out``."""
    return launch_cache.run(prepare, arguments, _checked)


def _checked(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    checked = {**arguments, "out": check_merge(**arguments)}
    return checked, [prepare(**checked)]


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
            "partial_out": partial_out,
            "partial_lse": partial_lse,
            "sinks": sinks,
            "out": out,
            "lse": lse,
            "num_parts": num_parts,
            "num_heads": num_heads,
            "stride_part": partial_out.stride(0),
            "stride_token": partial_out.stride(1),
            "stride_head": partial_out.stride(2),
            "lse_stride_part": partial_lse.stride(0),
            "lse_stride_head": partial_lse.stride(1),
            "out_stride_token": out.stride(0),
            "out_stride_head": out.stride(1),
            "merged_lse_stride_head": 0 if lse is None else lse.stride(0),
            "HEAD_DIM": head_dim,
            "BLOCK_PARTS": block_parts(num_parts, head_dim),
            "num_warps": 4,
        },
    )


def prepare_pieces(
    call: AttentionCall,
    partial_out: torch.Tensor,
    first_lse: int,
    plan: DecodePlan,
    block_q: int,
) -> Launch:
    """The launch that merges the pieces of the decode sequences that were cut into several.

    Args:
        call: the attention call whose ``out`` and ``lse`` are filled.
        partial_out: [max_items, block_q, num_heads, head_dim] fp32, flat.
        first_lse: element of ``partial_out`` from which on lie [max_items, block_q, num_heads] natural-log lse.
        plan: the plan that the attention kernel is launched with.
        block_q: tokens of a query tile.
    """
    num_heads, head_dim = call.q.shape[1:]
    return Launch(
        _merge_pieces_kernel,
        (call.num_decodes * num_heads,),
        {
            "partial_out": partial_out,
            "first_lse": first_lse,
            "sinks": call.sinks,
            "out": call.out,
            "lse": call.lse,
            "seq_lens": call.seq_lens,
            "cu_seqlens_q": call.cu_seqlens_q,
            "num_decodes": call.num_decodes,
            "num_heads": num_heads,
            "target_items": plan.target_items,
            "sliding_window": call.sliding_window,
            "out_stride_token": call.out.stride(0),
            "out_stride_head": call.out.stride(1),
            "lse_stride_head": 0 if call.lse is None else call.lse.stride(0),
            "FRESH": call.k is not None,
            "BLOCK_Q": block_q,
            "MIN_TOKENS": MIN_SPLIT_KEYS,
            "HEAD_DIM": head_dim,
            "BLOCK_PARTS": block_parts(plan.max_items, head_dim),
            "num_warps": 4,
        },
    )
