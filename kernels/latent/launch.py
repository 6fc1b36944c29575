"""Launches of latent attention: prefill, split-KV decode, and the merge of its splits."""

from __future__ import annotations

import torch

from ..common import launching, strided
from ..common.arch import Arch
from ..common.latent_pages import RowPages
from ..common.launching import arch_and_sms
from ..common.merging import merge_options, merge_splits_kernel
from ..common.query_tiles import LOG2E
from ..common.tile_shapes import MAX_REGISTERS, MAX_ROWS, tile_heads
from .call import LatentCall
from .kernel import TileShape, latent_kernel
from .tiles import DecodePlan, plan_decode, select_config


def launch_attention(call: LatentCall) -> torch.Tensor:
    """Launch a checked call; returns ``out``.

    In a mixed batch the host does not know how many new tokens the decode sequences have: decode
    programs take those of up to ``decode_tokens`` and prefill programs all others.
    """
    arch, num_sms = arch_and_sms(call.q)
    decode_tokens = 0
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(call.q):
        if call.num_decodes > 0:
            max_seqlen_q = call.max_seqlen_q if call.num_decodes == call.num_seqs else 1
            plan = plan_decode(
                num_decodes=call.num_decodes,
                max_seqlen_q=max_seqlen_q,
                num_heads=call.q.shape[1],
                head_dim=call.head_dim_v,
                dtype_bytes=call.q.element_size(),
                quantized=call.pages.fp8,
                lists=call.lists,
                max_keys=call.max_keys,
                bounded=call.bounded,
                arch=arch,
                num_sms=num_sms,
            )
            decode_tokens = plan.decode_tokens
            _launch(call, arch, plan, decode_tokens)
        if call.num_decodes < call.num_seqs:
            _launch(call, arch, None, decode_tokens)
    return call.out


def _launch(call: LatentCall, arch: Arch, plan: DecodePlan | None, decode_tokens: int) -> None:
    """Launch decode, or prefill if ``plan`` is None."""
    num_heads, head_dim = call.q.shape[1:]
    if plan is None:
        tile = select_config(
            dtype_bytes=call.q.element_size(),
            quantized=call.pages.fp8,
            arch=arch,
            num_heads=num_heads,
            tokens=1 if call.lists else MAX_ROWS,
        )
    else:
        tile = plan.config
    block_q, heads, head_tiles = tile_heads(num_heads, tile.block_m)
    block_q = 1 if call.lists else block_q
    partial_out, first_lse, target_splits = None, 0, 0
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    items = num_tiles = call.q.shape[0] // block_q + call.num_seqs
    if plan is not None:
        items, target_splits = plan.max_items, plan.target_splits
        partial_out, first_lse = launching.partials(
            plan.workspace_numel, call.head_dim_v, call.workspace, call.q.device
        )
    rope_dim = 0 if call.cos_sin is None else call.cos_sin.shape[1]
    cos_sin, out, lse = (
        strided.matrix(call.cos_sin),
        strided.rows(call.out),
        strided.lse_rows(call.lse),
    )
    launching.launch(
        latent_kernel,
        (items * head_tiles,),
        q=strided.rows(call.q),
        pages=_paged_rows(call.pages),
        kv=strided.matrix(call.kv),
        entries=None if call.entries is None else _paged_rows(call.entries),
        # A kernel divides by the width, also where there is nothing to look up.
        table=strided.table(call.table)._replace(width=max(1, call.table.shape[1])),
        entry_table=strided.table(call.table if call.entry_table is None else call.entry_table),
        topk_indices=None if call.topk_indices is None else strided.table(call.topk_indices),
        window_lens=call.window_lens,
        topk_lens=call.topk_lens,
        seq_lens=call.seq_lens,
        cu_seqlens_q=call.cu_seqlens_q,
        sinks=call.sinks,
        cos_sin=cos_sin,
        out=out,
        lse=lse,
        partial_out=partial_out,
        first_lse=first_lse,
        num_seqs=call.num_seqs,
        num_decodes=call.num_decodes,
        decode_tokens=decode_tokens,
        num_tiles=num_tiles,
        target_splits=target_splits,
        page_room=call.page_room,
        entry_room=call.entry_room,
        most_entries=call.most_entries,
        ratio=call.ratio,
        tokens_per_len=call.tokens_per_len,
        window=call.sliding_window,
        scale=call.softmax_scale * LOG2E.value,
        SHAPE=TileShape(
            VALUE_DIM=call.head_dim_v,
            SCORE_DIM=head_dim - call.head_dim_v,
            ROPE_DIM=rope_dim,
            NUM_HEADS=num_heads,
            BLOCK_Q=block_q,
            HEADS=heads,
            HEAD_TILES=head_tiles,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PAGE_ROWS=call.pages.storage_block_size,
            ENTRY_ROWS=1 if call.entries is None else call.entries.storage_block_size,
            SLOTS=call.slots,
            WIDENS_E4M3=call.pages.fp8 and arch.widens_e4m3,
            NEW_KV=call.kv is not None,
            DECODE=plan is not None,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **arch.register_limit(min(MAX_REGISTERS, 2048 // tile.num_warps)),
    )
    if partial_out is not None:
        launching.launch(
            merge_splits_kernel,
            (call.num_decodes * num_heads,),
            partial_out=partial_out,
            first_lse=first_lse,
            sinks=call.sinks,
            cos_sin=cos_sin,
            out=out,
            lse=lse,
            seq_lens=call.seq_lens,
            cu_seqlens_q=call.cu_seqlens_q,
            num_decodes=call.num_decodes,
            decode_tokens=decode_tokens,
            target_splits=target_splits,
            sliding_window=call.sliding_window,
            ratio=call.ratio,
            most_entries=call.most_entries,
            num_heads=num_heads,
            NEW_KV=call.kv is not None,
            BLOCK_Q=block_q,
            ROPE_DIM=rope_dim,
            ROUND_UP=False,
            EMPTY_LSE=float("inf") if call.slots else float("-inf"),
            **merge_options(arch, target_splits, call.head_dim_v),
        )


def _paged_rows(pages: RowPages) -> strided.PagedMatrix:
    stride_row = 0 if pages.fp8 else pages.data.stride(1)
    return strided.PagedMatrix(pages.data, pages.data.stride(0), stride_row)
