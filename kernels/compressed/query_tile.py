"""One query tile of ``compressed_attention``: which keys it attends to, and how its rows are stored.

A query tile packs tokens of a sequence with query heads (row = token * heads + head), so a tile of
keys is read once for all of them: 64 rows, or 16 or 32 where there are fewer. With ``topk_indices``
every token has keys of its own, and a tile holds heads of one token.

The inverse RoPE is fused into the store: it needs the 64 roped channels of the accumulator as a
tile of their own (a sum over the groups of 64 channels of which all but one are zeroed; 16
registers a thread beside an accumulator of 128). In return the output is rounded once and written
once; a kernel of its own would read and write those 128 bytes of a row again and round them twice.

Source: DeepSeek-V4 report 2.3; FlashAttention-2 (arXiv 2307.08691).
"""

import triton
import triton.language as tl

from ..common.query_tiles import LOG2E, fold_sink, natural_lse, row_pointers
from .key_tiles import Order, Pages, attend_keys


@triton.jit
def _inverse_rope(rope, position, live, cos_sin, cos_sin_stride, ROWS: tl.constexpr, ROPE_DIM: tl.constexpr):  # fmt: skip
    """Rotate pairs (2i, 2i + 1) of rope [ROWS, ROPE_DIM] fp32 by minus the angles of each position."""
    even, odd = tl.split(tl.reshape(rope, [ROWS, ROPE_DIM // 2, 2]))
    angle = cos_sin + position.to(tl.int64)[:, None] * cos_sin_stride + tl.arange(0, ROPE_DIM // 2)[None, :]  # fmt: skip
    # A padding row (fewer keys than new tokens) has no position; what it sees is nothing.
    known = (live & (position >= 0))[:, None]
    cos = tl.load(angle, mask=known, other=1.0)
    sin = tl.load(angle + ROPE_DIM // 2, mask=known, other=0.0)
    rotated = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    return tl.reshape(rotated, [ROWS, ROPE_DIM])


@triton.jit
def store_rows(
    acc, row_max, row_sum, sink, out_rows, lse_rows, position, live, cos_sin, cos_sin_stride,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Normalise, fold the sink in, apply the inverse RoPE, and store rows and lse.

    cos_sin None: no inverse RoPE. The lse of a row without keys is -inf, with SLOTS +inf.
    """
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
        rope = _inverse_rope(rope, position, live, cos_sin, cos_sin_stride, ROWS, ROPE_DIM)
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
def store_output(
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
    store_rows(
        acc, row_max, row_sum, sink, out_rows, lse_rows, position, live, cos_sin, cos_sin_stride, HEAD_DIM, ROPE_DIM, ROWS, SWAP, SLOTS
    )  # fmt: skip


@triton.jit
def attend_query_tile(
    q, token, q_first, q_last, context, oldest, split, split_stop, num_splits, pages, new_kv, new_stride, window_len, num_topk, entry_room,
    sliding_window, ratio, scale,
    WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, SLOTS: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, ONE_TOKEN: tl.constexpr,
    DIVIDE: tl.constexpr, HOIST: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Attend for one query tile to the KV splits [split, split_stop) of ``num_splits``.

    Args:
        q: [BLOCK_M, HEAD_DIM].
        token: [BLOCK_M] token of each row in its sequence's step; q_first, q_last: the tile's
            first and last.
        oldest: position of the first raw row that no later one has overwritten.
        window_len, num_topk: keys that come as lists.
        entry_room: entries that the table has room for.
        pages, new_kv, new_stride, SLOTS, ALIGNED: as in ``attend_keys``.
    """
    # One tile cannot hold quantised rows and plain ones: the new rows take a loop of their own.
    SEPARATE: tl.constexpr = new_kv is not None and pages.window.dtype.element_ty == tl.uint8
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
    if pages.topk_indices is not None:
        num_keys = num_raw + num_topk
    num_tiles = ((num_keys + BLOCK_N - 1) // BLOCK_N).to(tl.int64)
    first = (num_tiles * split // num_splits).to(tl.int32) * BLOCK_N
    stop = tl.minimum((num_tiles * split_stop // num_splits).to(tl.int32) * BLOCK_N, num_keys)
    order = Order(low, context, num_raw, num_entries)
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q, position, pages, None if SEPARATE else new_kv, new_stride, order, first, stop, sliding_window, ratio, scale,
        WINDOW_ROWS, ENTRY_ROWS, SLOTS, HARDWARE_E4M3, HEAD_DIM, BLOCK_N, SWAP, ONE_TOKEN, DIVIDE, HOIST, ALIGNED,
    )  # fmt: skip
    if SEPARATE:
        low = tl.maximum(low, context)
        num_raw = tl.where(split_stop == num_splits, tl.maximum(context + q_last + 1 - low, 0), 0)
        nowhere = Pages(None, None, 1, 0, 0, None, None, 0, 0, None)
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, position, nowhere, new_kv, new_stride, Order(low, context, num_raw, 0), 0, num_raw, sliding_window, 1, scale,
            1, 1, False, HARDWARE_E4M3, HEAD_DIM, BLOCK_N, SWAP, ONE_TOKEN, DIVIDE, HOIST, ALIGNED,
        )  # fmt: skip
    return acc, row_max, row_sum
