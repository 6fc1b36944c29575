"""Attention of DeepSeek-V4 over window, fresh rows and compressed entries: one kernel body for prefill and for split-KV decode.

    out_i = R(-p_i) sum_j softmax_j(softmax_scale * q_i . c_j) c_j   over the keys j that query i sees (``query_tile``), one sink a head

A query tile packs tokens of a sequence with query heads (row = token * heads + head), so a tile of keys is read once for all of them: 64
rows, or 16 or 32 where there are fewer. With picks every token has keys of its own, and a tile holds heads of one token.

The inverse RoPE R(-p) is fused: it needs the 64 roped channels of the accumulator as a tile of their own (a sum over the groups of 64
channels of which all but one are zeroed; 16 registers a thread beside an accumulator of 128), and in return the output is rounded once
and written once. A kernel of its own would read and write those 128 bytes of a row again and round them twice.

Layout: q, out [num_tokens, num_heads, head_dim]; pages as in ``common.latent_pages``; cos_sin [max_position, rope_dim] fp32, cosines then sines. Decode
partials, fp32: [parts, BLOCK_Q, num_heads, head_dim], then their lse.

Source: DeepSeek-V4 report 2.3; FlashAttention-2 (arXiv 2307.08691); FlashDecoding.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..common import launch_cache, stream_k
from ..common.decode_plans import SPLIT_COST
from ..common.launching import Launch, arch_and_sms, partials
from ..common.merging import block_parts, compressed_merge_kernel
from ..common.query_tiles import (
    LOG2E,
    find_query_tile,
    fold_sink,
    natural_lse,
    row_pointers,
    rows_of_tile,
)
from ..common.tile_shapes import MAX_REGISTERS, tile_heads, tile_rows
from ..common.tiles import hoists
from .call import CompressedCall, check
from .configs import MIN_SPLIT_KEYS, CompressedConfig, plan_decode, select_config
from .query_tile import Order, Pages, attend_keys

# The first architecture with an instruction that widens e4m3.
E4M3_ARCH = 89


@triton.jit
def _turned_back(rope, position, live, cos_sin, cos_sin_stride, ROWS: tl.constexpr, ROPE_DIM: tl.constexpr):  # fmt: skip
    """Pairs (2i, 2i + 1) of rope [ROWS, ROPE_DIM] fp32, turned by minus the angles of each row's position."""
    even, odd = tl.split(tl.reshape(rope, [ROWS, ROPE_DIM // 2, 2]))
    angle = cos_sin + position.to(tl.int64)[:, None] * cos_sin_stride + tl.arange(0, ROPE_DIM // 2)[None, :]  # fmt: skip
    # A padding row (fewer keys than new tokens) has no position; what it sees is nothing.
    known = (live & (position >= 0))[:, None]
    cos = tl.load(angle, mask=known, other=1.0)
    sin = tl.load(angle + ROPE_DIM // 2, mask=known, other=0.0)
    turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    return tl.reshape(turned, [ROWS, ROPE_DIM])


@triton.jit
def _store_rows(
    acc, row_max, row_sum, sink, out_rows, lse_rows, position, live, cos_sin, cos_sin_stride,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Normalise, fold the sink in, turn the roped channels back (cos_sin None: leave them) and store rows and lse (without keys -inf, with SLOTS +inf)."""
    GROUPS: tl.constexpr = HEAD_DIM // ROPE_DIM
    dtype = out_rows.dtype.element_ty
    factor = fold_sink(row_max, row_sum, sink)
    dim = tl.arange(0, HEAD_DIM)
    stored = dim < HEAD_DIM
    acc = acc * (factor[None, :] if SWAP else factor[:, None])
    if cos_sin is not None:
        is_rope = tl.arange(0, GROUPS) == GROUPS - 1
        if SWAP:
            groups = tl.reshape(acc, [GROUPS, ROPE_DIM, ROWS])
            rope = tl.trans(tl.sum(tl.where(is_rope[:, None, None], groups, 0.0), 0))
        else:
            groups = tl.reshape(acc, [ROWS, GROUPS, ROPE_DIM])
            rope = tl.sum(tl.where(is_rope[None, :, None], groups, 0.0), 1)
        rope = _turned_back(rope, position, live, cos_sin, cos_sin_stride, ROWS, ROPE_DIM)
        channel = HEAD_DIM - ROPE_DIM + tl.arange(0, ROPE_DIM)
        tl.store(out_rows[:, None] + channel[None, :], rope.to(dtype), mask=live[:, None])
        stored = dim < HEAD_DIM - ROPE_DIM
    if SWAP:
        tl.store(out_rows[None, :] + dim[:, None], acc.to(dtype), mask=live[None, :] & stored[:, None])  # fmt: skip
    else:
        tl.store(out_rows[:, None] + dim[None, :], acc.to(dtype), mask=live[:, None] & stored[None, :])  # fmt: skip
    if lse_rows is not None:
        row_lse = natural_lse(row_max, row_sum)
        if SLOTS:
            row_lse = tl.where(row_sum > 0.0, row_lse, float("inf"))
        tl.store(lse_rows, row_lse, mask=live)


@triton.jit
def _store_output(
    acc, row_max, row_sum, out, lse, sinks, cos_sin, first_token, token, head, position, live,
    out_stride_token, out_stride_head, lse_stride_head, cos_sin_stride,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Store the rows of a query tile, which starts with ``first_token``, as the call's result."""
    first_head = first_token * 0
    out_rows = row_pointers(out, first_token, first_head, token, head, out_stride_token, out_stride_head)  # fmt: skip
    lse_rows = None
    if lse is not None:
        lse_rows = row_pointers(lse, first_token, first_head, token, head, 1, lse_stride_head)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=float("-inf")) * LOG2E
    _store_rows(
        acc, row_max, row_sum, sink, out_rows, lse_rows, position, live, cos_sin, cos_sin_stride, HEAD_DIM, ROPE_DIM, ROWS, SWAP, SLOTS
    )  # fmt: skip


@triton.jit
def _attend_query_tile(
    q, token, q_first, q_last, context, oldest, piece, piece_stop, pieces, pages, fresh, fresh_stride, window_len, num_picks, entry_room,
    sliding_window, ratio, scale,
    WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, SLOTS: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, ONE_TOKEN: tl.constexpr,
    DIVIDE: tl.constexpr, HOIST: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Attend for one query tile to some pieces of its keys, of ``pieces`` in all.

    q: [BLOCK_M, HEAD_DIM]; token [BLOCK_M]: each row's token in its sequence's step; q_first, q_last: the tile's first and last.
    oldest: position of the first raw row that no later one has overwritten. window_len, num_picks: keys that come as lists. entry_room: entries
    that the table has room for. pages, fresh, fresh_stride, SLOTS, ALIGNED: as in ``attend_keys``.
    """
    # Quantised rows and plain ones are no tile.
    SEPARATE: tl.constexpr = fresh is not None and pages.window.dtype.element_ty == tl.uint8
    if SWAP:
        acc = tl.zeros([HEAD_DIM, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    position = context + token
    low = 0
    num_entries = 0
    if SLOTS:
        num_raw = window_len
        num_keys = window_len
    else:
        low = tl.maximum(tl.maximum(context + q_first - sliding_window + 1, oldest), 0)
        raw_stop = context + q_last + 1
        if SEPARATE:
            raw_stop = tl.minimum(raw_stop, context)
        num_raw = tl.maximum(raw_stop - low, 0)
        num_keys = num_raw
        if pages.entries is not None:
            num_entries = tl.minimum(tl.maximum(context + q_last + 1, 0) // ratio, entry_room)
            num_keys += num_entries
    if pages.picks is not None:
        num_keys = num_raw + num_picks
    num_tiles = ((num_keys + BLOCK_N - 1) // BLOCK_N).to(tl.int64)
    first = (num_tiles * piece // pieces).to(tl.int32) * BLOCK_N
    stop = tl.minimum((num_tiles * piece_stop // pieces).to(tl.int32) * BLOCK_N, num_keys)
    order = Order(low, context, num_raw, num_entries)
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q, position, pages, None if SEPARATE else fresh, fresh_stride, order, first, stop, sliding_window, ratio, scale,
        WINDOW_ROWS, ENTRY_ROWS, SLOTS, HARDWARE_E4M3, HEAD_DIM, BLOCK_N, SWAP, ONE_TOKEN, DIVIDE, HOIST, ALIGNED,
    )  # fmt: skip
    if SEPARATE:
        low = tl.maximum(low, context)
        num_raw = tl.where(piece_stop == pieces, tl.maximum(context + q_last + 1 - low, 0), 0)
        nowhere = Pages(None, None, 1, 0, 0, None, None, 0, 0, None)
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, position, nowhere, fresh, fresh_stride, Order(low, context, num_raw, 0), 0, num_raw, sliding_window, 1, scale,
            1, 1, False, HARDWARE_E4M3, HEAD_DIM, BLOCK_N, SWAP, ONE_TOKEN, DIVIDE, HOIST, ALIGNED,
        )  # fmt: skip
    return acc, row_max, row_sum


# What changes from step to step is not specialised on: a new batch size must not compile a new kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_decodes", "decode_tokens", "num_tiles", "window_room", "entry_room"])  # fmt: skip
def _compressed_prefill_kernel(
    q, window_pages, kv, compressed_pages, window_list, compressed_table, picks, pick_lens, seq_lens, cu_seqlens_q, sinks, cos_sin, out, lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, window_width, window_room, entry_room, topk, sliding_window, ratio, scale,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, cos_sin_stride, kv_stride,
    window_list_stride, compressed_table_stride, picks_stride,
    window_stride_page, window_stride_row, compressed_stride_page, compressed_stride_row,
    NUM_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, DIVIDE: tl.constexpr, HOIST: tl.constexpr,
    ALIGNED: tl.constexpr,
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
    q_tile = tl.load(
        q_rows[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=live[:, None], other=0.0
    )
    num_picks = topk
    if picks is not None:
        picks += tile_token.to(tl.int64) * picks_stride
        if pick_lens is not None:
            num_picks = tl.minimum(tl.maximum(tl.load(pick_lens + tile_token), 0), topk)
    oldest = context + q_len - window_room
    if kv is not None:
        oldest = context - window_room
        kv += first_token.to(tl.int64) * kv_stride
    if compressed_table is not None:
        compressed_table += seq.to(tl.int64) * compressed_table_stride
    pages = Pages(
        window_pages, window_list + seq.to(tl.int64) * window_list_stride, window_width, window_stride_page, window_stride_row,
        compressed_pages, compressed_table, compressed_stride_page, compressed_stride_row, picks,
    )  # fmt: skip
    acc, row_max, row_sum = _attend_query_tile(
        q_tile, q_first + token, q_first, tl.minimum(q_first + BLOCK_Q, q_len) - 1, context, oldest, 0, 1, 1, pages, kv, kv_stride, 0, num_picks, entry_room,
        sliding_window, ratio, scale,
        WINDOW_ROWS, ENTRY_ROWS, False, HARDWARE_E4M3, HEAD_DIM, BLOCK_M, BLOCK_N, SWAP, BLOCK_Q == 1, DIVIDE, HOIST, ALIGNED,
    )  # fmt: skip
    _store_output(
        acc, row_max, row_sum, out, lse, sinks, cos_sin, tile_token, token, head, context + q_first + token, live,
        out_stride_token, out_stride_head, lse_stride_head, cos_sin_stride, HEAD_DIM, ROPE_DIM, BLOCK_M, SWAP, False,
    )  # fmt: skip


# Also not on numbers of pieces and programs, which follow the batch.
@triton.jit(do_not_specialize=["num_whole", "num_decodes", "decode_tokens", "pieces", "programs", "window_room", "entry_room"])  # fmt: skip
def _compressed_decode_kernel(
    q, window_pages, kv, compressed_pages, window_list, compressed_table, picks, window_lens, pick_lens, seq_lens, cu_seqlens_q, sinks, cos_sin, out, lse,
    partial_out, first_lse,
    num_whole, num_decodes, decode_tokens, pieces, programs, tokens_per_len, window_width, window_room, entry_room, topk, sliding_window, ratio, scale,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, cos_sin_stride, kv_stride,
    window_list_stride, compressed_table_stride, picks_stride,
    window_stride_page, window_stride_row, compressed_stride_page, compressed_stride_row,
    NUM_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, SLOTS: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, DIVIDE: tl.constexpr, HOIST: tl.constexpr,
    ALIGNED: tl.constexpr, LINE: tl.constexpr, LEAST: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    head_tile = tl.program_id(0) % HEAD_TILES
    item = tl.program_id(0) // HEAD_TILES
    seq_tiles = tl.cdiv(decode_tokens, BLOCK_Q)
    if LINE:
        batch = (seq_lens, cu_seqlens_q, num_decodes, decode_tokens, sliding_window, ratio)
        size, least, total = stream_k.share(batch, programs, LEAST, COST, BLOCK_Q, BLOCK_N)
        position, high, turns = stream_k.stretch(item, size, least, total, batch, BLOCK_Q, BLOCK_N)
    else:
        turns: tl.constexpr = 1
    for _ in tl.range(0, turns, disable_licm=True):
        if LINE:
            seq, tile, _, begin, units = stream_k.locate(position, batch, BLOCK_Q, BLOCK_N)
            piece = position - begin
            piece_stop = tl.minimum(high - begin, units)
            position = begin + units
        else:
            beyond = tl.maximum(item - num_whole * seq_tiles, 0)
            tile = item - beyond + beyond // pieces
            seq = tile // seq_tiles
            tile = tile % seq_tiles
            units = tl.where(seq < num_whole, 1, pieces)
            piece = beyond % pieces
            piece_stop = piece + 1
        q_first = tile * BLOCK_Q
        first_token = seq
        q_len = 1
        context = 0
        if not SLOTS:
            first_token = tl.load(cu_seqlens_q + seq)
            q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
            context = tl.load(seq_lens + seq) - q_len
        if (q_first < q_len) & (q_len <= decode_tokens):
            tile_token = first_token + q_first
            token, head, live = rows_of_tile(
                head_tile, q_len - q_first, NUM_HEADS, BLOCK_Q, HEADS, BLOCK_M
            )
            first_head = head_tile * 0
            q_rows = row_pointers(q, tile_token, first_head, token, head, q_stride_token, q_stride_head)  # fmt: skip
            q_tile = tl.load(
                q_rows[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=live[:, None], other=0.0
            )
            window_len = window_width
            if window_lens is not None:
                window_len = tl.load(window_lens + tile_token // tokens_per_len)
                window_len = tl.minimum(tl.maximum(window_len, 0), window_width)
            num_picks = topk
            token_picks = picks
            if picks is not None:
                token_picks += tile_token.to(tl.int64) * picks_stride
                if pick_lens is not None:
                    num_picks = tl.load(pick_lens + tile_token // tokens_per_len)
                    num_picks = tl.minimum(tl.maximum(num_picks, 0), topk)
            fresh = kv
            oldest = context + q_len - window_room
            if kv is not None:
                oldest = context - window_room
                fresh += first_token.to(tl.int64) * kv_stride
            table = compressed_table
            if compressed_table is not None:
                table += seq.to(tl.int64) * compressed_table_stride
            pages = Pages(
                window_pages, window_list + seq.to(tl.int64) * window_list_stride, window_width, window_stride_page, window_stride_row,
                compressed_pages, table, compressed_stride_page, compressed_stride_row, token_picks,
            )  # fmt: skip
            acc, row_max, row_sum = _attend_query_tile(
                q_tile, q_first + token, q_first, tl.minimum(q_first + BLOCK_Q, q_len) - 1, context, oldest, piece, piece_stop, units,
                pages, fresh, kv_stride, window_len, num_picks, entry_room, sliding_window, ratio, scale,
                WINDOW_ROWS, ENTRY_ROWS, SLOTS, HARDWARE_E4M3, HEAD_DIM, BLOCK_M, BLOCK_N, SWAP, BLOCK_Q == 1, DIVIDE, HOIST, ALIGNED,
            )  # fmt: skip
            if LINE:
                # Rather than keep what is known of the rows through the loop, which would spill below Hopper, work it out again.
                first_token = tl.load(cu_seqlens_q + seq, volatile=True)
                q_len = tl.load(cu_seqlens_q + seq + 1, volatile=True) - first_token
                context = tl.load(seq_lens + seq, volatile=True) - q_len
                tile_token = first_token + q_first
                token, head, live = rows_of_tile(
                    head_tile, q_len - q_first, NUM_HEADS, BLOCK_Q, HEADS, BLOCK_M
                )
            if piece_stop - piece == units:
                _store_output(
                    acc, row_max, row_sum, out, lse, sinks, cos_sin, tile_token, token, head, context + q_first + token, live,
                    out_stride_token, out_stride_head, lse_stride_head, cos_sin_stride, HEAD_DIM, ROPE_DIM, BLOCK_M, SWAP, SLOTS,
                )  # fmt: skip
            elif partial_out is not None:
                if LINE:
                    # A program leaves two at most: of a query tile that others began, and of one that others end.
                    part = 2 * item + (piece == 0).to(tl.int32)
                else:
                    part = item - num_whole * seq_tiles
                row = (part.to(tl.int64) * BLOCK_Q + token) * NUM_HEADS + head
                _store_rows(
                    acc, row_max, row_sum, float("-inf"), partial_out + row * HEAD_DIM, partial_out + first_lse + row, token, live, None, 0,
                    HEAD_DIM, ROPE_DIM, BLOCK_M, SWAP, False,
                )  # fmt: skip


def attention(arguments: dict[str, Any]) -> torch.Tensor:
    """Check and launch ``compressed_attention(**arguments)``; returns ``out``. Calls that look alike are checked once (``common.launch_cache``)."""
    pages = arguments["window_pages"], arguments["compressed_pages"]
    aligned = launch_cache.at_16_bytes(*pages, arguments["kv"])
    return launch_cache.run((select_config, aligned), arguments, _prepared)


def _prepared(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    call = check(**arguments)
    return dict(vars(call)), prepare(call, *arch_and_sms(call.q))


def attend_slots(
    arguments: dict[str, Any],
    checked: Callable[..., CompressedCall],
    returned: Callable[[CompressedCall, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    """Check and launch a call of ``flash_mla_with_kvcache``.

    arguments: of ``checked``; after the call what is ``returned`` of it is among them.
    """

    def prepared(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
        call = checked(**arguments)
        return arguments | returned(call, arguments["q"]), prepare(call, *arch_and_sms(call.q))

    aligned = launch_cache.at_16_bytes(arguments["window_pages"], arguments["compressed_pages"])
    launch_cache.run((select_config, "slots", aligned), arguments, prepared)


def prepare(call: CompressedCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches of a checked call.

    In a mixed batch the host does not know how many new tokens the decode sequences have: the decode kernel takes those of up to
    ``decode_tokens`` and the prefill kernel all others, so each sequence is computed once whatever the caller put first.

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
    if call.picked:
        block_q = 1
    window, entries, table, picks = call.window_pages, call.compressed_pages, call.compressed_table, call.topk_indices  # fmt: skip
    entry_strides = (0, 0) if entries is None else entries.data.stride()
    return {
        "q": call.q,
        "window_pages": window.data,
        "kv": call.kv,
        "compressed_pages": None if entries is None else entries.data,
        "window_list": call.window_table,
        "compressed_table": table,
        "picks": picks,
        "pick_lens": call.topk_lens,
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
        "topk": None if picks is None else picks.shape[1],
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
        "window_list_stride": call.window_table.stride(0),
        "compressed_table_stride": 0 if table is None else table.stride(0),
        "picks_stride": 0 if picks is None else picks.stride(0),
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
    rows = tile_rows(num_heads, 1 if call.picked else tokens)
    return select_config(head_dim, call.q.element_size(), call.window_pages.fp8, arch, rows=rows)


def _prepare_prefill(call: CompressedCall, arch: int, decode_tokens: int) -> Launch:
    """The launch for all sequences but the first ``num_decodes`` of up to ``decode_tokens`` new tokens."""
    shared = _shared_arguments(call, _config(call, arch, 64), arch)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // shared["BLOCK_Q"] + call.num_seqs
    return Launch(
        _compressed_prefill_kernel,
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
    """The launches for the first ``num_decodes`` sequences: attention, and the merge where a sequence may be cut into pieces."""
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
    # With few query tiles a program leaves about one piece of them, with many two.
    pieces_left = 1 if 2 * call.num_decodes * seq_tiles <= plan.programs else 2
    split = {
        "window_lens": call.window_lens,
        "tokens_per_len": call.tokens_per_len,
        "num_whole": plan.num_unsplit,
        "num_decodes": call.num_decodes,
        "decode_tokens": decode_tokens,
        "pieces": plan.num_splits,
        "programs": plan.programs,
        "SLOTS": call.slots,
        "LINE": plan.programs > 0,
        "LEAST": MIN_SPLIT_KEYS // block_n,
        "COST": pieces_left * SPLIT_COST * shared["BLOCK_M"] // block_n,
        "partial_out": partial_out,
        "first_lse": first_lse,
    }
    cut = call.num_decodes - plan.num_unsplit
    items = plan.programs or (plan.num_unsplit + cut * plan.num_splits) * seq_tiles
    attention = Launch(
        _compressed_decode_kernel, (items * shared["HEAD_TILES"],), {**shared, **split}
    )
    if partial_out is None:
        return [attention]
    merge_names = set(compressed_merge_kernel.arg_names)
    arguments = {**shared, **split, "num_heads": num_heads}
    arguments = {name: value for name, value in arguments.items() if name in merge_names}
    most = block_parts(plan.programs or plan.num_splits, head_dim)
    merge = Launch(
        compressed_merge_kernel,
        (cut * num_heads,),
        {**arguments, "BLOCK_PARTS": most, "num_warps": 4},
    )
    return [attention, merge]
