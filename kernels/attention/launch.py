"""Launches of paged attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..common import checks, launching, split_kv, strided
from ..common.arch import Arch
from ..common.launching import arch_and_sms
from ..common.merging import merge_splits
from ..common.query_tiles import LOG2E
from ..common.tile_shapes import MAX_REGISTERS, MAX_ROWS, Config, tile_heads, tile_rows
from .kernel import Scoring, TileShape, attention_kernel
from .tiles import select_config, target_splits

if TYPE_CHECKING:
    from .api import AttentionCall


def launch_attention(call: AttentionCall) -> torch.Tensor:
    """Launch a checked call; returns ``out``.

    In a mixed batch the host does not know how many new tokens the decode sequences have: decode
    programs take those that fit a query tile and prefill programs all others.

    Raises:
        NotImplementedError: as ``quire.kernels.paged_attention``.
    """
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads, quantized = call.k_pages.shape[2], call.k_scale is not None
    checks.expect_head_dim("k_pages", head_dim)
    arch, num_sms = arch_and_sms(call.q)
    dtype_bytes, mixed = call.q.element_size(), call.num_decodes < call.num_seqs
    decode_tokens = 0
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(call.q):
        if call.num_decodes > 0:
            # The longest sequence sizes the grid, and has at most all tokens.
            tokens = 1 if mixed else min(call.max_seqlen_q, max(call.q.shape[0], MAX_ROWS))
            rows = tile_rows(call.group, tokens)
            tile = select_config(head_dim, dtype_bytes, arch, quantized=quantized, rows=rows)
            block_q, _, head_tiles = tile_heads(call.group, tile.block_m)
            limits = [n for n in (call.max_seq_len, call.sliding_window) if n is not None]
            plan = split_kv.plan_decode(
                num_decodes=call.num_decodes,
                max_seqlen_q=tokens,
                block_q=block_q,
                target_splits=target_splits(num_sms, num_kv_heads, head_tiles),
                row_numel=num_heads * (head_dim + 1),
                max_keys=min(limits, default=None),
                bounded=call.sliding_window is not None,
            )
            decode_tokens = plan.decode_tokens
            partial_out, first_lse = plan.partials(head_dim, call.workspace, call.q.device)
            _launch(call, arch, tile, decode_tokens, plan, partial_out, first_lse)
            merge_splits(
                call, plan, partial_out, first_lse, arch, dim=head_dim, block_q=block_q,
                new_kv=call.paged_context,
            )  # fmt: skip
        if mixed:
            tile = select_config(head_dim, dtype_bytes, arch, quantized=quantized, rows=None)
            _launch(call, arch, tile, decode_tokens)
    return call.out


def _launch(
    call: AttentionCall, arch: Arch, tile: Config, decode_tokens: int,
    plan: split_kv.DecodePlan | None = None, partial_out: torch.Tensor | None = None,
    first_lse: int = 0,
) -> None:  # fmt: skip
    """Launch decode (``plan``) or prefill (None)."""
    head_dim, num_kv_heads = call.q.shape[2], call.k_pages.shape[2]
    k_pages, v_pages, k_scale, v_scale = call.k_pages, call.v_pages, call.k_scale, call.v_scale
    scales = checks.scale_kind(k_scale)
    block_q, heads, head_tiles = tile_heads(call.group, tile.block_m)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // block_q + call.num_seqs
    items = num_tiles if plan is None else plan.max_items
    inner_scale, outer_scale = call.softmax_scale * LOG2E.value, None
    if call.softcap is not None:
        inner_scale = call.softmax_scale / call.softcap
        outer_scale = call.softcap * LOG2E.value
    if scales != "none":  # as bytes: not every architecture has the type
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    if scales == "rows":
        k_scale, v_scale = strided.pages(k_scale), strided.pages(v_scale)
    elif scales == "number":  # Triton would compile a kernel for the number 1
        k_scale, v_scale = float(k_scale), float(v_scale)
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
        out=strided.rows(call.out),
        lse=strided.lse_rows(call.lse),
        partial_out=partial_out,
        first_lse=first_lse,
        num_seqs=call.num_seqs,
        num_decodes=call.num_decodes,
        decode_tokens=decode_tokens,
        num_tiles=num_tiles,
        target_splits=0 if plan is None else plan.target_splits,
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
            WIDENS_E4M3=scales != "none" and arch.widens_e4m3,
            NEW_KV=call.paged_context,
            DECODE=plan is not None,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **arch.register_limit(MAX_REGISTERS),
    )
