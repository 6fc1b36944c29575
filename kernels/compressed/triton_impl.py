"""Launches of ``compressed_attention``: attention over window, in-step rows and compressed entries.

    out_i = R(-p_i) sum_j softmax_j(softmax_scale * q_i . c_j) c_j   over the keys j that query i sees

with one sink a head. ``prefill`` and ``decode`` hold the kernels, ``query_tile`` their common body,
and ``key_tiles`` the loop over keys.

Layout: q, out [num_tokens, num_heads, head_dim]; pages as in ``common.latent_pages``; cos_sin
[max_position, rope_dim] fp32, cosines then sines.

Source: DeepSeek-V4 report 2.3; FlashAttention-2 (arXiv 2307.08691); FlashDecoding.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..common import launch_cache
from ..common.launching import Launch, arch_and_sms, partials
from ..common.merging import block_parts, compressed_merge_kernel
from ..common.query_tiles import LOG2E
from ..common.stream_k import PIECE_COST
from ..common.tile_shapes import MAX_REGISTERS, tile_heads
from ..common.tiles import hoists
from .call import CompressedCall
from .configs import MIN_PIECE_KEYS, CompressedConfig, plan_decode, select_config, tile_rows
from .decode import compressed_decode_kernel
from .prefill import compressed_prefill_kernel

# The first architecture with an instruction that widens e4m3.
E4M3_ARCH = 89


def attention(arguments: dict[str, Any]) -> torch.Tensor:
    """Check and launch ``compressed_attention(**arguments)``; returns ``out``.

    Calls that look alike are checked once (``common.launch_cache``).
    """
    pages = arguments["window_pages"], arguments["compressed_pages"]
    aligned = launch_cache.at_16_bytes(*pages, arguments["kv"])
    return launch_cache.run((select_config, aligned), arguments, _prepared)


def _prepared(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    call = CompressedCall(**arguments)
    return dict(vars(call)), prepare(call, *arch_and_sms(call.q))


def attend_slots(
    arguments: dict[str, Any],
    checked: Callable[[dict[str, Any]], CompressedCall],
    returned: Callable[[CompressedCall, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    """Check and launch a call of ``flash_mla_with_kvcache``.

    Args:
        arguments: of ``checked``; after the call what is ``returned`` of it is among them.
    """

    def prepared(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
        call = checked(arguments)
        return arguments | returned(call, arguments["q"]), prepare(call, *arch_and_sms(call.q))

    aligned = launch_cache.at_16_bytes(arguments["window_pages"], arguments["compressed_pages"])
    launch_cache.run((select_config, "slots", aligned), arguments, prepared)


def prepare(call: CompressedCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches of a checked call.

    In a mixed batch the host does not know how many new tokens the decode sequences have: the
    decode kernel takes those of up to ``decode_tokens`` and the prefill kernel all others, so each
    sequence is computed once whatever the caller put first.

    Args:
        call: the checked call.
        arch: compute capability as major * 10 + minor.
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


def _shared_arguments(call: CompressedCall, config: CompressedConfig, arch: int) -> dict[str, Any]:
    """Arguments, constants and options that both attention kernels take."""
    num_heads, head_dim = call.q.shape[1:]
    block_q, heads, head_tiles = tile_heads(num_heads, config.block_m)
    if call.has_topk:
        block_q = 1
    window, entries = call.window_pages, call.compressed_pages
    table, topk_indices = call.compressed_table, call.topk_indices
    entry_strides = (0, 0) if entries is None else entries.data.stride()
    return {
        "q": call.q,
        "window_pages": window.data,
        "kv": call.kv,
        "compressed_pages": None if entries is None else entries.data,
        "window_table": call.window_table,
        "compressed_table": table,
        "topk_indices": topk_indices,
        "topk_lens": call.topk_lens,
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "sinks": call.sinks,
        "cos_sin": call.cos_sin,
        "out": call.out,
        "lse": call.lse,
        "decode_tokens": 0,
        "window_width": call.window_table.shape[1],
        "window_room": call.window_room,
        "entry_room": call.entry_room,
        "topk": None if topk_indices is None else topk_indices.shape[1],
        "sliding_window": call.sliding_window,
        "ratio": call.compress_ratio,
        "scale": call.softmax_scale * LOG2E.value,
        "q_stride_token": call.q.stride(0),
        "q_stride_head": call.q.stride(1),
        "out_stride_token": call.out.stride(0),
        "out_stride_head": call.out.stride(1),
        "lse_stride_head": 0 if call.lse is None else call.lse.stride(0),
        "cos_sin_stride": 0 if call.cos_sin is None else call.cos_sin.stride(0),
        "kv_stride": 0 if call.kv is None else call.kv.stride(0),
        "window_table_stride": call.window_table.stride(0),
        "compressed_table_stride": 0 if table is None else table.stride(0),
        "topk_stride": 0 if topk_indices is None else topk_indices.stride(0),
        "window_stride_page": window.data.stride(0),
        "window_stride_row": 0 if window.fp8 else window.data.stride(1),
        "compressed_stride_page": entry_strides[0],
        "compressed_stride_row": entry_strides[1],
        "NUM_HEADS": num_heads,
        "BLOCK_Q": block_q,
        "HEADS": heads,
        "HEAD_TILES": head_tiles,
        "WINDOW_ROWS": window.storage_block_size,
        "ENTRY_ROWS": 1 if entries is None else entries.storage_block_size,
        "HARDWARE_E4M3": arch >= E4M3_ARCH,
        "HEAD_DIM": head_dim,
        "ROPE_DIM": window.rope_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SWAP": config.swap,
        "DIVIDE": config.divide,
        "HOIST": hoists(config.swap, config.divide, arch),
        "ALIGNED": launch_cache.rows_at_16_bytes(window, call.kv, entries),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        # 16 warps have to share the 65536 registers of a multiprocessor.
        "maxnreg": min(MAX_REGISTERS, 2048 // config.num_warps),
    }


def _config(call: CompressedCall, arch: int, tokens: int) -> CompressedConfig:
    num_heads, head_dim = call.q.shape[1:]
    rows = tile_rows(num_heads, 1 if call.has_topk else tokens)
    return select_config(head_dim, call.q.element_size(), call.window_pages.fp8, arch, rows=rows)


def _prepare_prefill(call: CompressedCall, arch: int, decode_tokens: int) -> Launch:
    """The launch for all sequences but the first ``num_decodes`` of up to ``decode_tokens`` new tokens."""
    shared = _shared_arguments(call, _config(call, arch, 64), arch)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // shared["BLOCK_Q"] + call.num_seqs
    return Launch(
        compressed_prefill_kernel,
        (num_tiles * shared["HEAD_TILES"],),
        {
            **shared,
            "num_seqs": call.num_seqs,
            "num_decodes": call.num_decodes,
            "decode_tokens": decode_tokens,
            "num_tiles": num_tiles,
        },
    )


def _prepare_decode(
    call: CompressedCall, arch: int, num_sms: int, decode_tokens: int
) -> list[Launch]:
    """The launches for the first ``num_decodes`` sequences: attention, and the merge of KV splits."""
    shared = _shared_arguments(call, _config(call, arch, decode_tokens), arch)
    num_heads, head_dim = call.q.shape[1:]
    block_q, block_n = shared["BLOCK_Q"], shared["BLOCK_N"]
    seq_tiles = -(-decode_tokens // block_q)
    plan = plan_decode(
        num_decodes=call.num_decodes,
        seq_tiles=seq_tiles,
        block_q=block_q,
        block_m=shared["BLOCK_M"],
        num_heads=num_heads,
        head_tiles=shared["HEAD_TILES"],
        head_dim=head_dim,
        num_sms=num_sms,
        max_keys=call.max_keys(block_q),
        bounded=call.bounded,
    )
    partial_out, first_lse = partials(plan.workspace_numel, head_dim, call.workspace, call.q.device)
    # With few query tiles a program leaves partial results of about one, with many of two.
    splits_left = 1 if 2 * call.num_decodes * seq_tiles <= plan.programs else 2
    decode = {
        "window_lens": call.window_lens,
        "tokens_per_len": call.tokens_per_len,
        "num_whole": plan.num_whole,
        "num_decodes": call.num_decodes,
        "decode_tokens": decode_tokens,
        "num_splits": plan.pieces,
        "programs": plan.programs,
        "SLOTS": call.slots,
        "STREAM_K": plan.programs > 0,
        "LEAST": MIN_PIECE_KEYS // block_n,
        "COST": splits_left * PIECE_COST * shared["BLOCK_M"] // block_n,
        "partial_out": partial_out,
        "first_lse": first_lse,
    }
    num_split = call.num_decodes - plan.num_whole
    items = plan.programs or (plan.num_whole + num_split * plan.pieces) * seq_tiles
    attention = Launch(
        compressed_decode_kernel, (items * shared["HEAD_TILES"],), {**shared, **decode}
    )
    if partial_out is None:
        return [attention]
    merge_names = set(compressed_merge_kernel.arg_names)
    arguments = {**shared, **decode, "num_heads": num_heads}
    arguments |= {"pieces": plan.pieces, "LINE": decode["STREAM_K"]}
    arguments = {name: value for name, value in arguments.items() if name in merge_names}
    most = block_parts(plan.programs or plan.pieces, head_dim)
    merge = Launch(
        compressed_merge_kernel,
        (num_split * num_heads,),
        {**arguments, "BLOCK_PARTS": most, "num_warps": 4},
    )
    return [attention, merge]
