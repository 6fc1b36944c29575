"""Launches of ``compressed_attention``: attention over window, in-step rows and compressed entries.

    out_i = R(-p_i) sum_j softmax_j(softmax_scale * q_i . c_j) c_j

over the keys j that query i sees, with one sink a head. ``prefill_kernel`` and ``decode_kernel``
hold the kernels, ``query_tile`` their common body, and ``key_tiles`` the loop over keys.

Layout: q, out [num_tokens, num_heads, head_dim]; pages as in ``common.latent_pages``; cos_sin
[max_position, rope_dim] fp32, cosines then sines.

Source: DeepSeek-V4 report 2.3; FlashAttention-2 (arXiv 2307.08691); FlashDecoding.
"""

from typing import Any

import torch

from ..common import strided
from ..common.arch import Arch
from ..common.decode_plans import SPLIT_COST
from ..common.latent_pages import LatentPages
from ..common.launching import Launch, arch_and_sms, given, partials, run
from ..common.merging import block_parts, compressed_merge_kernel
from ..common.query_tiles import LOG2E
from ..common.tile_shapes import MAX_REGISTERS, tile_heads, tile_rows
from ..common.tiles import hoists
from .call import CompressedCall
from .configs import MIN_SPLIT_KEYS, CompressedConfig, plan_decode, select_config
from .decode_kernel import compressed_decode_kernel
from .key_tiles import KeyTile, Softmax
from .prefill_kernel import compressed_prefill_kernel
from .query_tile import Lists, QueryTile, Sequences


def attention(call: CompressedCall) -> torch.Tensor:
    """Launch a checked call; returns ``out``."""
    run(prepare(call, *arch_and_sms(call.q)), call.q)
    return call.out


def prepare(call: CompressedCall, arch: Arch, num_sms: int) -> list[Launch]:
    """The launches of a checked call.

    In a mixed batch the host does not know how many new tokens the decode sequences have: the
    decode kernel takes those of up to ``decode_tokens`` and the prefill kernel all others, so each
    sequence is computed once whatever the caller put first.

    Args:
        call: the checked call.
        arch: of the GPU.
        num_sms: streaming multiprocessors of the device.
    """
    launches: list[Launch] = []
    decode_tokens = 0
    if call.num_decodes:
        decode_tokens = max(1, call.max_seqlen_q) if call.num_decodes == call.num_seqs else 1
        launches = _prepare_decode(call, arch, num_sms, decode_tokens)
    if call.num_decodes < call.num_seqs:
        launches.append(_prepare_prefill(call, arch, decode_tokens))
    return launches


def _shared_arguments(call: CompressedCall, config: CompressedConfig, arch: Arch) -> dict[str, Any]:
    """Arguments, constants and options that both attention kernels take."""
    num_heads, head_dim = call.q.shape[1:]
    block_q, heads, head_tiles = tile_heads(num_heads, config.block_m)
    # For what a kind of layer has none of something else stands in, of which nothing is read: all
    # kinds take the same kernels.
    window, entries = call.window_pages, call.compressed_pages or call.window_pages
    window_table = strided.table(call.window_table)
    entry_table = lists = window_table
    topk, topk_lens = 0 if call.slots else -1, call.seq_lens
    if call.compressed_table is not None:
        entry_table = strided.table(call.compressed_table)
    if call.topk_indices is not None:
        lists, topk_lens = strided.table(call.topk_indices), call.topk_lens
        topk = lists.width
    queries = QueryTile(
        NUM_HEADS=num_heads,
        BLOCK_M=config.block_m,
        BLOCK_Q=1 if call.has_topk else block_q,
        HEADS=heads,
        HEAD_TILES=head_tiles,
    )
    keys = KeyTile(
        HEAD_DIM=head_dim,
        ROPE_DIM=window.rope_dim,
        BLOCK_N=config.block_n,
        WINDOW_ROWS=window.storage_block_size,
        SLOTS=call.slots,
        HARDWARE_E4M3=arch.widens_e4m3,
        SWAP=config.swap,
        DIVIDE=config.divide,
        HOIST=hoists(config.swap, config.divide, arch),
        # Beside quantized pages new rows are in no tile of theirs.
        ALIGNED=strided.rows_at_16_bytes(
            window.data, None if window.fp8 else call.kv, entries.data
        ),
    )
    return {
        "q": strided.rows(call.q),
        "window_pages": _paged_rows(window),
        "kv": strided.matrix(call.kv),
        "compressed_pages": _paged_rows(entries),
        # A kernel divides by the width, also where there are no entries to look up.
        "window_table": window_table._replace(width=max(1, window_table.width)),
        "compressed_table": None if call.slots else entry_table.data,
        "lists": Lists(lists.data, call.window_lens, topk_lens, call.tokens_per_len),
        "sequences": Sequences(call.seq_lens, call.cu_seqlens_q),
        "sinks": call.sinks,
        "cos_sin": strided.matrix(call.cos_sin),
        "out": strided.rows(call.out),
        "lse": strided.lse_rows(call.lse),
        "decode_tokens": 0,
        "window_room": call.window_room,
        "entry_room": call.entry_room,
        "entry_rows": entries.storage_block_size,
        "table_stride": entry_table.stride_seq,
        "topk": topk,
        "topk_stride": lists.stride_seq,
        "ratio": call.ratio,
        "softmax": Softmax(call.sliding_window, call.softmax_scale * LOG2E.value),
        "QUERIES": queries,
        "KEYS": keys,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        # 16 warps have to share the 65536 registers of a multiprocessor.
        **given(matrix_instr_nonkdim=config.matrix_instr_nonkdim),
        **arch.register_limit(min(MAX_REGISTERS, 2048 // config.num_warps)),
    }


def _paged_rows(pages: LatentPages) -> strided.PagedRows:
    stride_row = 0 if pages.fp8 else pages.data.stride(1)
    return strided.PagedRows(pages.data, pages.data.stride(0), stride_row)


def _config(call: CompressedCall, arch: Arch, tokens: int) -> CompressedConfig:
    num_heads, head_dim = call.q.shape[1:]
    rows = tile_rows(num_heads, 1 if call.has_topk else tokens)
    return select_config(head_dim, call.q.element_size(), call.window_pages.fp8, arch, rows=rows)


def _prepare_prefill(call: CompressedCall, arch: Arch, decode_tokens: int) -> Launch:
    """The launch for all sequences but the first ``num_decodes`` of few new tokens."""
    shared = _shared_arguments(call, _config(call, arch, 64), arch)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    queries = shared["QUERIES"]
    num_tiles = call.q.shape[0] // queries.BLOCK_Q + call.num_seqs
    return Launch(
        compressed_prefill_kernel,
        (num_tiles * queries.HEAD_TILES,),
        {
            **shared,
            "num_seqs": call.num_seqs,
            "num_decodes": call.num_decodes,
            "decode_tokens": decode_tokens,
            "num_tiles": num_tiles,
        },
    )


def _prepare_decode(
    call: CompressedCall, arch: Arch, num_sms: int, decode_tokens: int
) -> list[Launch]:
    """The launches for the first ``num_decodes`` sequences: attention and the merge of splits."""
    shared = _shared_arguments(call, _config(call, arch, decode_tokens), arch)
    num_heads, head_dim = call.q.shape[1:]
    queries, block_n = shared["QUERIES"], shared["KEYS"].BLOCK_N
    block_q = queries.BLOCK_Q
    seq_tiles = -(-decode_tokens // block_q)
    max_keys = call.max_keys(block_q)
    plan = plan_decode(
        num_decodes=call.num_decodes,
        seq_tiles=seq_tiles,
        block_q=block_q,
        block_m=queries.BLOCK_M,
        num_heads=num_heads,
        head_tiles=queries.HEAD_TILES,
        head_dim=head_dim,
        num_sms=num_sms,
        max_keys=max_keys,
        bounded=call.bounded,
    )
    partial_out, first_lse = partials(plan.workspace_numel, head_dim, call.workspace, call.q.device)
    # With few query tiles a program leaves partial results of about one, with many of two.
    splits_left = 1 if 2 * call.num_decodes * seq_tiles <= plan.programs else 2
    decode = {
        "num_unsplit": plan.num_unsplit,
        "num_decodes": call.num_decodes,
        "decode_tokens": decode_tokens,
        "num_splits": plan.num_splits,
        "programs": plan.programs,
        "cost": splits_left * SPLIT_COST * queries.BLOCK_M // block_n,
        "partial_out": partial_out,
        "first_lse": first_lse,
    }
    num_split = call.num_decodes - plan.num_unsplit
    items = plan.programs or (plan.num_unsplit + num_split * plan.num_splits) * seq_tiles
    attention = Launch(
        compressed_decode_kernel, (items * queries.HEAD_TILES,), {**shared, **decode}
    )
    if not plan.is_split:
        return [attention]
    arguments = {
        "partial_out": partial_out,
        "first_lse": first_lse,
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "sinks": call.sinks,
        "cos_sin": call.cos_sin,
        "out": call.out,
        "lse": call.lse,
        "num_unsplit": plan.num_unsplit,
        "num_decodes": call.num_decodes,
        "decode_tokens": decode_tokens,
        "num_splits": plan.num_splits,
        "programs": plan.programs,
        "sliding_window": call.sliding_window,
        "ratio": call.ratio,
        "num_heads": num_heads,
        "out_stride_token": call.out.stride(0),
        "out_stride_head": call.out.stride(1),
        "lse_stride_head": 0 if call.lse is None else call.lse.stride(0),
        "cos_sin_stride": 0 if call.cos_sin is None else call.cos_sin.stride(0),
        "BLOCK_Q": block_q,
        "SLOTS": call.slots,
        "HEAD_DIM": head_dim,
        "ROPE_DIM": call.window_pages.rope_dim,
        "BLOCK_N": block_n,
        "LEAST": MIN_SPLIT_KEYS // block_n,
        "cost": decode["cost"],
        # Whatever the batch: a number of splits is no reason for another kernel.
        "BLOCK_PARTS": block_parts(num_sms, head_dim),
        "num_warps": 4,
    }
    merge = Launch(compressed_merge_kernel, (num_split * num_heads,), arguments)
    return [attention, merge]
