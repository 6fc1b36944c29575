"""Launches of ``mla_attention``: attention over one latent row a token.

    out_i = sum_j softmax_j(softmax_scale * (q_i . c_j + q'_i . r_j)) c_j   over the keys j <= p_i,
    row_j = (c_j, r_j)

``prefill_kernel`` and ``decode_kernel`` hold the kernels and ``query_tile`` their common body.

Layout: q [num_tokens, num_heads, HEAD_DIM_V + ROPE_DIM], out [num_tokens, num_heads, HEAD_DIM_V];
pages [num_pages, block_size, *] of any strides.

Source: DeepSeek-V2 (arXiv 2405.04434) 2.1; FlashAttention-2 (arXiv 2307.08691).
"""

from typing import Any

import torch

from ..common import strided
from ..common.arch import Arch
from ..common.decode_plans import MIN_SPLIT_KEYS, SPLIT_COST
from ..common.launching import Launch, arch_and_sms, given, partials, run
from ..common.merging import block_parts, compressed_merge_kernel
from ..common.query_tiles import LOG2E
from ..common.tile_shapes import MAX_REGISTERS, tile_heads
from ..common.tiles import hoists
from .call import MlaCall
from .configs import PREFILL_ROWS, MlaConfig, decode_rows, plan_decode, select_config
from .decode_kernel import mla_decode_kernel
from .prefill_kernel import mla_prefill_kernel

# Tiles of a KV split where nothing may be split: more than any sequence has.
NEVER = 1 << 28


def attention(call: MlaCall) -> torch.Tensor:
    """Launch a checked call; returns ``out``."""
    run(prepare(call, *arch_and_sms(call.q)), call.q)
    return call.out


def prepare(call: MlaCall, arch: Arch, num_sms: int) -> list[Launch]:
    """The launches of a checked call.

    Each sequence is computed once, whatever the caller put first (see
    ``kernels.attention.triton_impl.attention``).

    Args:
        call: the checked call.
        arch: of the GPU.
        num_sms: streaming multiprocessors of the device.
    """
    launches: list[Launch] = []
    decode_tokens = 0
    if call.num_decodes > 0:
        launches = _prepare_decode(call, arch, num_sms)
        decode_tokens = launches[0].arguments["decode_tokens"]
    if call.num_decodes < call.num_seqs:
        launches.append(_prepare_prefill(call, arch, decode_tokens))
    return launches


def _shared_arguments(call: MlaCall, config: MlaConfig, arch: Arch) -> dict[str, Any]:
    """Arguments, constants and options that both attention kernels take."""
    num_heads, head_dim = call.q.shape[1:]
    block_q, heads, head_tiles = tile_heads(num_heads, config.block_m)
    return {
        "q": strided.rows(call.q),
        "pages": strided.PagedRows(call.pages, *call.pages.stride()[:2]),
        "kv": strided.matrix(call.kv),
        "block_table": strided.table(call.block_table),
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "out": strided.rows(call.out),
        "lse": strided.lse_rows(call.lse),
        "num_decodes": call.num_decodes,
        "scale": call.softmax_scale * LOG2E.value,
        "NUM_HEADS": num_heads,
        "BLOCK_Q": block_q,
        "HEADS": heads,
        "HEAD_TILES": head_tiles,
        "HEAD_DIM_V": call.head_dim_v,
        "ROPE_DIM": head_dim - call.head_dim_v,
        "BLOCK_SIZE": call.pages.shape[1],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SWAP": config.swap,
        "DIVIDE": config.divide,
        "HOIST": hoists(config.swap, config.divide, arch),
        "ALIGNED": strided.rows_at_16_bytes(call.pages, call.kv),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **given(matrix_instr_nonkdim=config.matrix_instr_nonkdim),
        **arch.register_limit(min(MAX_REGISTERS, 2048 // config.num_warps // config.per_sm)),
    }


def _prepare_prefill(call: MlaCall, arch: Arch, decode_tokens: int) -> Launch:
    """The launch for all sequences but the first ``num_decodes`` of up to ``decode_tokens`` new tokens."""
    config = select_config(call.q.element_size(), PREFILL_ROWS, arch)
    shared = _shared_arguments(call, config, arch)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // shared["BLOCK_Q"] + call.num_seqs
    return Launch(
        mla_prefill_kernel,
        (num_tiles * shared["HEAD_TILES"],),
        {
            **shared,
            "num_seqs": call.num_seqs,
            "decode_tokens": decode_tokens,
            "num_tiles": num_tiles,
        },
    )


def _prepare_decode(call: MlaCall, arch: Arch, num_sms: int) -> list[Launch]:
    """The launches for the first ``num_decodes`` sequences: attention, and the merge of KV splits."""
    max_seqlen_q = call.max_seqlen_q if call.num_decodes == call.num_seqs else 1
    num_heads, dim = call.q.shape[1], call.head_dim_v
    rows = decode_rows(
        num_heads=num_heads, max_seqlen_q=max_seqlen_q, arch=arch, block_size=call.pages.shape[1]
    )
    config = select_config(call.q.element_size(), rows, arch)
    plan = plan_decode(
        config=config,
        num_heads=num_heads,
        head_dim_v=dim,
        num_sms=num_sms,
        max_seq_len=call.max_seq_len,
    )
    shared = _shared_arguments(call, config, arch)
    block_q, block_n = shared["BLOCK_Q"], shared["BLOCK_N"]
    partial_out, first_lse = partials(plan.workspace_numel, dim, call.workspace, call.q.device)
    cost = 2 * SPLIT_COST * config.block_m // block_n
    least = MIN_SPLIT_KEYS // block_n if plan.workspace_numel else NEVER
    decode_tokens = max(max_seqlen_q, block_q)
    attention = Launch(
        mla_decode_kernel,
        (plan.programs * shared["HEAD_TILES"],),
        {
            **shared,
            "partial_out": partial_out,
            "first_lse": first_lse,
            "decode_tokens": decode_tokens,
            "programs": plan.programs,
            "LEAST": least,
            "cost": cost,
        },
    )
    if partial_out is None:
        return [attention]
    merge = Launch(
        compressed_merge_kernel,
        (call.num_decodes * num_heads,),
        {
            "partial_out": partial_out,
            "first_lse": first_lse,
            "seq_lens": call.seq_lens,
            "cu_seqlens_q": call.cu_seqlens_q,
            "sinks": None,
            "cos_sin": None,
            "out": call.out,
            "lse": call.lse,
            "num_unsplit": 0,
            "num_decodes": call.num_decodes,
            "decode_tokens": decode_tokens,
            "num_splits": 0,
            "programs": plan.programs,
            "cost": cost,
            "sliding_window": None,
            "ratio": None,
            "num_heads": num_heads,
            "out_stride_token": call.out.stride(0),
            "out_stride_head": call.out.stride(1),
            "lse_stride_head": 0 if call.lse is None else call.lse.stride(0),
            "cos_sin_stride": 0,
            "BLOCK_Q": block_q,
            "SLOTS": False,
            "HEAD_DIM": dim,
            "ROPE_DIM": shared["ROPE_DIM"],
            "BLOCK_N": block_n,
            "LEAST": least,
            "BLOCK_PARTS": block_parts(plan.programs, dim),
            "num_warps": 4,
        },
    )
    return [attention, merge]
