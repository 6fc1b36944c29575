"""Launches of paged attention and of the merges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..common import launching, strided
from ..common.arch import Arch
from ..common.checks import expect_head_dim, scale_kind
from ..common.launching import arch_and_sms
from ..common.merging import block_parts, merge_options, merge_partials_kernel, merge_splits_kernel
from ..common.query_tiles import LOG2E
from ..common.tile_shapes import MAX_REGISTERS, tile_heads
from .kernel import Scoring, TileShape, attention_kernel
from .tiles import DecodePlan, plan_decode, select_config

if TYPE_CHECKING:
    from .api import AttentionCall


def launch_attention(call: AttentionCall) -> torch.Tensor:
    """Launch a checked call; returns ``out``.

    In a mixed batch the host does not know how many new tokens the decode sequences have: decode
    programs take those that fit their query tile and prefill programs all others.

    Raises:
        NotImplementedError: as ``quire.kernels.paged_attention``.
    """
    num_heads, head_dim = call.q.shape[1:]
    expect_head_dim("k_pages", head_dim)
    arch, num_sms = arch_and_sms(call.q)
    decode_tokens = 0
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(call.q):
        if call.num_decodes > 0:
            plan = plan_decode(
                num_decodes=call.num_decodes,
                max_seqlen_q=call.max_seqlen_q if call.num_decodes == call.num_seqs else 1,
                num_heads=num_heads,
                num_kv_heads=call.k_pages.shape[2],
                head_dim=head_dim,
                num_sms=num_sms,
                dtype_bytes=call.q.element_size(),
                max_seq_len=call.max_seq_len,
                sliding_window=call.sliding_window,
            )
            decode_tokens = _launch(call, arch, plan)
        if call.num_decodes < call.num_seqs or call.max_seqlen_q > decode_tokens:
            _launch(call, arch, None, decode_tokens)
    return call.out


def _launch(call: AttentionCall, arch: Arch, plan: DecodePlan | None, decode_tokens: int = 0) -> int:  # fmt: skip
    """Launch decode (``plan``) or prefill (None); returns the tokens of a query tile."""
    (_, num_heads, head_dim), num_kv_heads = call.q.shape, call.k_pages.shape[2]
    k_pages, v_pages, k_scale, v_scale = call.k_pages, call.v_pages, call.k_scale, call.v_scale
    scales = scale_kind(k_scale)
    quantized = scales != "none"
    tile = select_config(
        head_dim,
        call.q.element_size(),
        arch,
        quantized=quantized,
        rows=None if plan is None else plan.block_m,
    )
    block_q, heads, head_tiles = tile_heads(call.group, tile.block_m)
    partial_out, first_lse, target_splits = None, 0, 0
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    items = num_tiles = call.q.shape[0] // block_q + call.num_seqs
    if plan is not None:
        items, target_splits = plan.max_splits, plan.target_splits
        partial_out, first_lse = launching.partials(
            plan.workspace_numel, head_dim, call.workspace, call.q.device
        )
    inner_scale, outer_scale = call.softmax_scale * LOG2E.value, None
    if call.softcap is not None:
        inner_scale = call.softmax_scale / call.softcap
        outer_scale = call.softcap * LOG2E.value
    if quantized:  # as bytes: not every architecture has the type
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    if scales == "rows":
        k_scale, v_scale = strided.pages(k_scale), strided.pages(v_scale)
    elif scales == "number":  # Triton would compile a kernel for the number 1
        k_scale, v_scale = float(k_scale), float(v_scale)
    out, lse = strided.rows(call.out), strided.lse_rows(call.lse)
    launching.launch(
        attention_kernel,
        (items * num_kv_heads * head_tiles,),
        q=strided.rows(call.q),
        k_pages=strided.pages(k_pages),
        v_pages=strided.pages(v_pages),
        k_new=strided.rows(call.k),
        v_new=strided.rows(call.v),
        k_scale=k_scale,
        v_scale=v_scale,
        block_table=strided.table(call.block_table),
        seq_lens=call.seq_lens,
        cu_seqlens_q=call.cu_seqlens_q,
        sinks=call.sinks,
        out=out,
        lse=lse,
        partial_out=partial_out,
        first_lse=first_lse,
        num_seqs=call.num_seqs,
        num_decodes=call.num_decodes,
        decode_tokens=decode_tokens,
        num_tiles=num_tiles,
        target_splits=target_splits,
        num_kv_heads=num_kv_heads,
        scoring=Scoring(call.sliding_window, inner_scale, outer_scale),
        SHAPE=TileShape(
            HEAD_DIM=head_dim,
            VALUE_DIM=head_dim // tile.value_parts,
            GROUP=call.group,
            BLOCK_Q=block_q,
            HEADS=heads,
            HEAD_TILES=head_tiles,
            BLOCK_SIZE=k_pages.shape[1],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            SCALES=scales,
            WIDENS_E4M3=quantized and arch.widens_e4m3,
            NEW_KV=call.paged_context,
            DECODE=plan is not None,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **arch.register_limit(MAX_REGISTERS),
    )
    if partial_out is not None:
        launching.launch(
            merge_splits_kernel,
            (call.num_decodes * num_heads,),
            partial_out=partial_out,
            first_lse=first_lse,
            sinks=call.sinks,
            cos_sin=None,
            out=out,
            lse=lse,
            seq_lens=call.seq_lens,
            cu_seqlens_q=call.cu_seqlens_q,
            num_decodes=call.num_decodes,
            decode_tokens=block_q,
            target_splits=target_splits,
            sliding_window=call.sliding_window,
            ratio=None,
            most_entries=0,
            num_heads=num_heads,
            NEW_KV=call.paged_context,
            BLOCK_Q=block_q,
            ROPE_DIM=0,
            ROUND_UP=True,
            EMPTY_LSE=float("-inf"),
            **merge_options(arch, target_splits, head_dim),
        )
    return block_q


def merge_partials(
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
            merge_partials_kernel,
            (num_tokens * num_heads,),
            partial_out=strided.pages(partial_out),
            partial_lse=strided.Pages(partial_lse, partial_lse.stride(0), 1, partial_lse.stride(1)),
            sinks=sinks,
            out=strided.rows(out),
            lse=strided.lse_rows(lse),
            num_parts=num_parts,
            num_heads=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_PARTS=block_parts(num_parts, head_dim),
            num_warps=4,
        )
    return out
