"""Launches of latent attention."""

from __future__ import annotations

import math

import torch

from ..common import launching, split_kv, strided
from ..common.arch import Arch
from ..common.latent_pages import RowPages
from ..common.launching import arch_and_sms
from ..common.merging import merge_splits
from ..common.query_tiles import LOG2E
from ..common.tile_shapes import MAX_REGISTERS, MAX_ROWS, Config, tile_heads
from .call import LatentCall
from .kernel import TileShape, latent_kernel
from .tiles import select_config, target_splits


def launch_attention(call: LatentCall) -> torch.Tensor:
    """Launch a checked call; returns ``out``.

    In a mixed batch the host does not know how many new tokens the decode sequences have: decode
    programs take those of up to ``decode_tokens`` and prefill programs all others.
    """
    arch, num_sms = arch_and_sms(call.q)
    num_heads, mixed, decode_tokens = call.q.shape[1], call.num_decodes < call.num_seqs, 0

    def choose(tokens: int) -> tuple[Config, int, int]:
        """Tile shape for tiles of up to ``tokens`` tokens, tokens of a tile, and its head tiles."""
        tile = select_config(
            dtype_bytes=call.q.element_size(),
            quantized=call.pages.fp8,
            arch=arch,
            num_heads=num_heads,
            tokens=1 if call.lists else tokens,
        )
        block_q, _, head_tiles = tile_heads(num_heads, tile.block_m)
        return tile, 1 if call.lists else block_q, head_tiles

    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(call.q):
        if call.num_decodes > 0:
            tokens = 1 if mixed else max(1, call.max_seqlen_q)
            tile, block_q, head_tiles = choose(tokens)
            plan = split_kv.plan_decode(
                num_decodes=call.num_decodes,
                max_seqlen_q=tokens,
                block_q=block_q,
                target_splits=target_splits(num_sms, tile, head_tiles),
                row_numel=num_heads * (call.head_dim_v + 1),
                max_keys=call.max_keys,
                bounded=call.bounded,
            )
            decode_tokens = plan.decode_tokens
            partial_out, first_lse = plan.partials(call.head_dim_v, call.workspace, call.q.device)
            _launch(call, arch, tile, block_q, decode_tokens, plan, partial_out, first_lse)
            merge_splits(
                call, plan, partial_out, first_lse, arch, dim=call.head_dim_v, block_q=block_q,
                new_kv=call.kv is not None, cos_sin=call.cos_sin, ratio=call.ratio,
                most_entries=call.most_entries, empty_lse=math.inf if call.slots else -math.inf,
            )  # fmt: skip
        if mixed:
            tile, block_q, _ = choose(MAX_ROWS)
            _launch(call, arch, tile, block_q, decode_tokens)
    return call.out


def _launch(
    call: LatentCall, arch: Arch, tile: Config, block_q: int, decode_tokens: int,
    plan: split_kv.DecodePlan | None = None, partial_out: torch.Tensor | None = None,
    first_lse: int = 0,
) -> None:  # fmt: skip
    """Launch decode (``plan``) or prefill (None)."""
    num_heads, head_dim = call.q.shape[1:]
    _, heads, head_tiles = tile_heads(num_heads, tile.block_m)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // block_q + call.num_seqs
    items = num_tiles if plan is None else plan.max_items
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
        cos_sin=strided.matrix(call.cos_sin),
        out=strided.rows(call.out),
        lse=strided.lse_rows(call.lse),
        partial_out=partial_out,
        first_lse=first_lse,
        num_seqs=call.num_seqs,
        num_decodes=call.num_decodes,
        decode_tokens=decode_tokens,
        num_tiles=num_tiles,
        target_splits=0 if plan is None else plan.target_splits,
        page_room=call.page_room,
        entry_room=call.entry_room,
        most_entries=call.most_entries,
        ratio=call.ratio,
        tokens_per_len=call.tokens_per_len,
        list_width=call.table.shape[1],
        topk_width=0 if call.topk_indices is None else call.topk_indices.shape[1],
        window=call.sliding_window,
        scale=call.softmax_scale * LOG2E.value,
        SHAPE=TileShape(
            VALUE_DIM=call.head_dim_v,
            SCORE_DIM=head_dim - call.head_dim_v,
            ROPE_DIM=0 if call.cos_sin is None else call.cos_sin.shape[1],
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


def _paged_rows(pages: RowPages) -> strided.PagedMatrix:
    stride_row = 0 if pages.fp8 else pages.data.stride(1)
    return strided.PagedMatrix(pages.data, pages.data.stride(0), stride_row)
