"""Attention over one latent row a token (MLA): one kernel body for prefill and for split-KV decode.

    out_i = sum_j softmax_j(softmax_scale * (q_i . c_j + q'_i . r_j)) c_j   over the keys j <= p_i,   row_j = (c_j, r_j)

A query tile packs the tokens of a sequence with the query heads (row = token * heads + head), so every tile of rows is read once for all of
them; its first HEAD_DIM_V channels serve as key and as value. The keys of a tile come from pages or from the step's fresh rows, wherever
each lies, in one loop; page ids of the next tile are carried around it (see ``kernels.attention.triton_impl``).

With few rows in the query tile the products are swapped, S^T = C Q^T and O^T = C^T P^T: keys and channels fill the 64 rows of a matrix
instruction and the heads are its columns, which need no padding. Then accumulators are [HEAD_DIM_V, BLOCK_M] and scores [BLOCK_N, BLOCK_M].

Layout: q [num_tokens, num_heads, HEAD_DIM_V + ROPE_DIM], out [num_tokens, num_heads, HEAD_DIM_V]; pages [num_pages, block_size, *] of any
strides. Decode: programs divide the keys of all query tiles evenly (``common.stream_k``), and leave partial results of those they cut.

Source: DeepSeek-V2 (arXiv 2405.04434) 2.1; FlashAttention-2 (arXiv 2307.08691); Stream-K (arXiv 2301.03598).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..common import launch_cache, stream_k
from ..common.decode_plans import MIN_SPLIT_KEYS, SPLIT_COST
from ..common.launching import Launch, arch_and_sms, partials
from ..common.merging import block_parts, compressed_merge_kernel
from ..common.query_tiles import (
    LOG2E,
    find_query_tile,
    fold_sink,
    load_page,
    natural_lse,
    row_pointers,
    rows_of_tile,
)
from ..common.tile_shapes import MAX_REGISTERS, tile_heads
from ..common.tiles import hoists, update
from .call import MlaCall, check
from .configs import PREFILL_ROWS, MlaConfig, decode_rows, plan_decode, select_config

# Tiles of a KV split where nothing may be split: more than any sequence has.
NEVER = 1 << 28


@triton.jit
def _attend_query_tile(
    q_rows, live, position, pages, kv, table, width, stride_page, stride_row, kv_stride, low, high, context, scale,
    HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, DIVIDE: tl.constexpr, HOIST: tl.constexpr, ALIGNED: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Attend for one query tile to the keys [low, high), of which those from ``context`` on are fresh rows if there are any.

    q_rows, live, position: [BLOCK_M] pointer, liveness and int32 position of each row. low is a multiple of BLOCK_N. ALIGNED: pages
    and fresh rows start at multiples of 16 bytes, which Triton 3.9 forgets of one that is chosen from two. ONE_TOKEN: all rows are of one
    token, which sees all keys.
    """
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM_V)
    rope_dim = HEAD_DIM_V + tl.arange(0, ROPE_DIM)
    q = tl.load(q_rows[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    q_rope = tl.load(q_rows[:, None] + rope_dim[None, :], mask=live[:, None], other=0.0)
    if SWAP:
        acc = tl.zeros([HEAD_DIM_V, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, HEAD_DIM_V], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    paged_high = high
    if kv is not None:
        paged_high = tl.minimum(high, context)
    page = load_page(table, width, low // BLOCK_N, low < paged_high, "never", BLOCK_SIZE, BLOCK_N)
    for start in tl.range(low, high, BLOCK_N, disable_licm=not HOIST):
        key = start + offs_n
        if HOIST and BLOCK_SIZE < BLOCK_N:
            # Worked out at length: by a mask it would be the same in all tiles, and hoisted into registers that there are not.
            row = key % BLOCK_SIZE
        else:
            # Unsigned, so that dividing by a power of two is a mask.
            row = (key.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        rows = pages + (page.to(tl.int64) * stride_page + row * stride_row)
        if kv is not None:
            rows = tl.where(key < context, rows, kv + (key - context).to(tl.int64) * kv_stride)
            if ALIGNED:
                rows = tl.multiple_of(rows, 16)
        # What lies in rows that are not live may be NaN: 0 * NaN would reach the output.
        read = (key < high)[:, None]
        latents = tl.load(rows[:, None] + dim[None, :], mask=read, other=0.0)
        ropes = tl.load(rows[:, None] + rope_dim[None, :], mask=read, other=0.0)
        if ONE_TOKEN:
            visible = read if SWAP else (key < high)[None, :]
        elif SWAP:
            visible = read & (key[:, None] <= position[None, :])
        else:
            visible = (key < high)[None, :] & (key[None, :] <= position[:, None])
        acc, row_max, row_sum = update(
            acc, row_max, row_sum, q, latents, q_rope, ropes, visible, scale, start < high, SWAP, DIVIDE, HOIST
        )  # fmt: skip
        more = start + BLOCK_N < paged_high
        page = load_page(table, width, start // BLOCK_N + 1, more, "never", BLOCK_SIZE, BLOCK_N)
    return acc, row_max, row_sum


@triton.jit
def _store_rows(acc, row_max, row_sum, out_rows, lse_rows, live, HEAD_DIM_V: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    """Normalise and store the rows of a query tile and their lse."""
    factor = fold_sink(row_max, row_sum, float("-inf"))
    dim = tl.arange(0, HEAD_DIM_V)
    dtype = out_rows.dtype.element_ty
    if SWAP:
        tl.store(out_rows[None, :] + dim[:, None], (acc * factor[None, :]).to(dtype), mask=live[None, :])  # fmt: skip
    else:
        tl.store(out_rows[:, None] + dim[None, :], (acc * factor[:, None]).to(dtype), mask=live[:, None])  # fmt: skip
    if lse_rows is not None:
        tl.store(lse_rows, natural_lse(row_max, row_sum), mask=live)


# What changes from step to step is not specialised on: a new batch size must not compile a new kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_decodes", "decode_tokens", "num_tiles"])
def _mla_prefill_kernel(
    q, pages, kv, block_table, seq_lens, cu_seqlens_q, out, lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, width, scale,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, table_stride, stride_page, stride_row, kv_stride,
    NUM_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, DIVIDE: tl.constexpr, HOIST: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    head_tile = tl.program_id(0) % HEAD_TILES
    # Later tiles of a sequence see more keys; they start first, so that no long tile runs alone at the end.
    tile = num_tiles - 1 - tl.program_id(0) // HEAD_TILES
    seq, q_first = find_query_tile(cu_seqlens_q, tile, num_seqs, BLOCK_Q)
    first_token = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    if (q_first >= q_len) | ((seq < num_decodes) & (q_len <= decode_tokens)):
        return
    context = tl.load(seq_lens + seq) - q_len
    tile_token = first_token + q_first
    token, head, live = rows_of_tile(head_tile, q_len - q_first, NUM_HEADS, BLOCK_Q, HEADS, BLOCK_M)
    first_head = head_tile * 0
    q_rows = row_pointers(q, tile_token, first_head, token, head, q_stride_token, q_stride_head)
    if kv is not None:
        kv += first_token.to(tl.int64) * kv_stride
    high = context + tl.minimum(q_first + BLOCK_Q, q_len)
    acc, row_max, row_sum = _attend_query_tile(
        q_rows, live, context + q_first + token, pages, kv, block_table + seq.to(tl.int64) * table_stride, width,
        stride_page, stride_row, kv_stride, 0, high, context, scale,
        HEAD_DIM_V, ROPE_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, SWAP, DIVIDE, HOIST, ALIGNED, BLOCK_Q == 1,
    )  # fmt: skip
    out_rows = row_pointers(out, tile_token, first_head, token, head, out_stride_token, out_stride_head)  # fmt: skip
    lse_rows = None
    if lse is not None:
        lse_rows = row_pointers(lse, tile_token, first_head, token, head, 1, lse_stride_head)
    _store_rows(acc, row_max, row_sum, out_rows, lse_rows, live, HEAD_DIM_V, SWAP)


# Also not on the number of programs, which follows the batch's longest step.
@triton.jit(do_not_specialize=["num_decodes", "decode_tokens", "programs"])
def _mla_decode_kernel(
    q, pages, kv, block_table, seq_lens, cu_seqlens_q, out, lse, partial_out, first_lse,
    num_decodes, decode_tokens, programs, width, scale,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, table_stride, stride_page, stride_row, kv_stride,
    NUM_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, DIVIDE: tl.constexpr, HOIST: tl.constexpr, ALIGNED: tl.constexpr, LEAST: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    head_tile = tl.program_id(0) % HEAD_TILES
    first_head = head_tile * 0
    program = tl.program_id(0) // HEAD_TILES
    batch = (seq_lens, cu_seqlens_q, num_decodes, decode_tokens, None, None)
    size, least, total = stream_k.share(batch, programs, LEAST, COST, BLOCK_Q, BLOCK_N)
    position, stop, turns = stream_k.stretch(program, size, least, total, batch, BLOCK_Q, BLOCK_N)
    for _ in tl.range(0, turns, disable_licm=True):
        seq, tile, _, begin, units = stream_k.locate(position, batch, BLOCK_Q, BLOCK_N)
        low = (position - begin) * BLOCK_N
        high = (tl.minimum(stop, begin + units) - begin) * BLOCK_N
        # Of the query tile this stretch holds the beginning (1), the end (2), both (3) or neither.
        holds = (position == begin).to(tl.int32) + 2 * (stop >= begin + units).to(tl.int32)
        position = begin + units
        q_first = tile * BLOCK_Q
        first_token = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
        context = tl.load(seq_lens + seq) - q_len
        # Registers are short: a zero that the compiler does not know keeps it from working the rows out once for all turns, and what is
        # known of them is not kept through the loop over keys.
        zero = tl.minimum(first_token, 0)
        token, head, live = rows_of_tile(
            head_tile, q_len - q_first, NUM_HEADS, BLOCK_Q, HEADS, BLOCK_M, zero
        )
        q_rows = row_pointers(
            q, first_token + q_first, first_head, token, head, q_stride_token, q_stride_head
        )
        fresh = kv
        if kv is not None:
            fresh += first_token.to(tl.int64) * kv_stride
        high = tl.minimum(high, context + tl.minimum(q_first + BLOCK_Q, q_len))
        acc, row_max, row_sum = _attend_query_tile(
            q_rows, live, context + q_first + token, pages, fresh, block_table + seq.to(tl.int64) * table_stride, width,
            stride_page, stride_row, kv_stride, low, high, context, scale,
            HEAD_DIM_V, ROPE_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, SWAP, DIVIDE, HOIST, ALIGNED, BLOCK_Q == 1,
        )  # fmt: skip
        first_token = tl.load(cu_seqlens_q + seq, volatile=True)
        q_len = tl.load(cu_seqlens_q + seq + 1, volatile=True) - first_token
        zero = tl.minimum(first_token, 0) if HOIST and BLOCK_M == 64 else 0
        token, head, live = rows_of_tile(
            head_tile, q_len - q_first, NUM_HEADS, BLOCK_Q, HEADS, BLOCK_M, zero
        )
        if holds == 3:
            out_rows = row_pointers(out, first_token + q_first, first_head, token, head, out_stride_token, out_stride_head)  # fmt: skip
            lse_rows = None
            if lse is not None:
                lse_rows = row_pointers(lse, first_token + q_first, first_head, token, head, 1, lse_stride_head)  # fmt: skip
            _store_rows(acc, row_max, row_sum, out_rows, lse_rows, live, HEAD_DIM_V, SWAP)
        elif partial_out is not None:
            # A program leaves two at most: of a query tile that others began, and of one that others end.
            part = 2 * program + holds % 2
            part_row = (part.to(tl.int64) * BLOCK_Q + token) * NUM_HEADS + head
            _store_rows(
                acc, row_max, row_sum, partial_out + part_row * HEAD_DIM_V, partial_out + first_lse + part_row, live, HEAD_DIM_V, SWAP
            )  # fmt: skip


def attention(arguments: dict[str, Any]) -> torch.Tensor:
    """Check and launch ``mla_attention(**arguments)``; returns ``out``. Calls that look alike are checked once (``common.launch_cache``)."""
    aligned = launch_cache.at_16_bytes(arguments["pages"], arguments["kv"])
    return launch_cache.run((select_config, aligned), arguments, _prepared)


def _prepared(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    call = check(**arguments)
    return dict(vars(call)), prepare(call, *arch_and_sms(call.q))


def prepare(call: MlaCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches of a checked call; each sequence is computed once, whatever the caller put first (see ``kernels.attention.triton_impl.prepare``).

    Args:
        call: the checked call.
        arch: compute capability as major * 10 + minor.
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


def _shared_arguments(call: MlaCall, config: MlaConfig, arch: int) -> dict[str, Any]:
    """Arguments, constants and options that both attention kernels take."""
    num_heads, head_dim = call.q.shape[1:]
    block_q, heads, head_tiles = tile_heads(num_heads, config.block_m)
    return {
        "q": call.q,
        "pages": call.pages,
        "kv": call.kv,
        "block_table": call.block_table,
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "out": call.out,
        "lse": call.lse,
        "num_decodes": call.num_decodes,
        "width": call.block_table.shape[1],
        "scale": call.softmax_scale * LOG2E.value,
        "q_stride_token": call.q.stride(0),
        "q_stride_head": call.q.stride(1),
        "out_stride_token": call.out.stride(0),
        "out_stride_head": call.out.stride(1),
        "lse_stride_head": 0 if call.lse is None else call.lse.stride(0),
        "table_stride": call.block_table.stride(0),
        "stride_page": call.pages.stride(0),
        "stride_row": call.pages.stride(1),
        "kv_stride": 0 if call.kv is None else call.kv.stride(0),
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
        "ALIGNED": launch_cache.rows_at_16_bytes(call.pages, call.kv),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": min(MAX_REGISTERS, 2048 // config.num_warps // config.per_sm),
    }


def _prepare_prefill(call: MlaCall, arch: int, decode_tokens: int) -> Launch:
    """The launch for all sequences but the first ``num_decodes`` of up to ``decode_tokens`` new tokens."""
    config = select_config(call.q.element_size(), PREFILL_ROWS, arch)
    shared = _shared_arguments(call, config, arch)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // shared["BLOCK_Q"] + call.num_seqs
    return Launch(
        _mla_prefill_kernel,
        (num_tiles * shared["HEAD_TILES"],),
        {
            **shared,
            "num_seqs": call.num_seqs,
            "decode_tokens": decode_tokens,
            "num_tiles": num_tiles,
        },
    )


def _prepare_decode(call: MlaCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches for the first ``num_decodes`` sequences of few new tokens: attention, and the merge where one may be cut."""
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
    split = {
        "partial_out": partial_out,
        "first_lse": first_lse,
        "decode_tokens": max(max_seqlen_q, block_q),
        "programs": plan.programs,
        "LEAST": MIN_SPLIT_KEYS // block_n if plan.workspace_numel else NEVER,
        "COST": 2 * SPLIT_COST * config.block_m // block_n,
    }
    attention = Launch(
        _mla_decode_kernel, (plan.programs * shared["HEAD_TILES"],), {**shared, **split}
    )
    if partial_out is None:
        return [attention]
    more = {
        **dict.fromkeys(("sinks", "cos_sin", "sliding_window", "ratio")),
        **dict.fromkeys(("num_whole", "pieces", "cos_sin_stride"), 0),
        "num_heads": num_heads,
        "SLOTS": False,
        "LINE": True,
        "HEAD_DIM": dim,
        "BLOCK_PARTS": block_parts(plan.programs, dim),
    }
    kernel = compressed_merge_kernel
    arguments = {name: (shared | split | more)[name] for name in kernel.arg_names}
    merging = Launch(kernel, (call.num_decodes * num_heads,), arguments | {"num_warps": 4})
    return [attention, merging]
