"""One query tile of ``compressed_attention``: which keys it sees, how its rows are stored.

A query tile packs tokens of a sequence with query heads (row = token * heads + head), so a tile of
keys is read once for all of them: 64 rows, or 16 or 32 where there are fewer. With ``topk_indices``
every token has keys of its own, and a tile holds heads of one token. `key_tiles` has the loop.

The inverse RoPE is fused into the store: it needs the 64 roped channels of the accumulator as a
tile of their own (a sum over the groups of 64 channels of which all but one are zeroed; 16
registers a thread beside an accumulator of 128). In return the output is rounded once and written
once; a kernel of its own would read and write those 128 bytes of a row again and round them twice.

Source: DeepSeek-V4 report 2.3; FlashAttention-2 (arXiv 2307.08691).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.query_tiles import LOG2E, fold_sink, natural_lse, row_pointers
from .key_tiles import Order, Pages, attend_keys


class QueryTile(NamedTuple):
    """What the rows of a query tile are, all known at compile time.

    Attributes:
        NUM_HEADS: query heads of the layer.
        BLOCK_M: rows of a tile.
        BLOCK_Q, HEADS: tokens and heads of a tile.
        HEAD_TILES: tiles that cover the heads.
    """

    NUM_HEADS: Any
    BLOCK_M: Any
    BLOCK_Q: Any
    HEADS: Any
    HEAD_TILES: Any


class Sequences(NamedTuple):
    """Lengths of the batch's sequences; None with SLOTS.

    Attributes:
        seq_lens: [num_seqs] pointer, tokens of each.
        cu_seqlens_q: [num_seqs + 1] pointer, prefix sums of the new tokens.
    """

    seq_lens: Any
    cu_seqlens_q: Any


class Lists(NamedTuple):
    """What lists of keys tokens have, and how many entries of them count; None = all.

    Attributes:
        topk_indices: [num_tokens, topk] pointer.
        window_lens: [num_lens] pointer, of the window's flat indices (with SLOTS).
        topk_lens: [num_lens] pointer, of ``topk_indices``.
        tokens_per_len: tokens that share an element of these.
    """

    topk_indices: Any
    window_lens: Any
    topk_lens: Any
    tokens_per_len: Any


@triton.jit
def listed_entries(lists, topk, token):
    """Entries of a token's list that count; -1 where ``topk`` is -1, so that there are no lists."""
    num_listed = topk
    if lists.topk_lens is not None:
        num_listed = tl.load(
            lists.topk_lens + token // lists.tokens_per_len, mask=topk >= 0, other=-1
        )
        num_listed = tl.minimum(tl.maximum(num_listed, 0), topk)
    return num_listed


@triton.jit
def _inverse_rope(rope, position, live, cos_sin, ROWS: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Rotate pairs (2i, 2i + 1) of rope [ROWS, ROPE_DIM] fp32 by minus the angles of positions."""
    even, odd = tl.split(tl.reshape(rope, [ROWS, ROPE_DIM // 2, 2]))
    angle = cos_sin.data + position.to(tl.int64)[:, None] * cos_sin.stride_row
    angle += tl.arange(0, ROPE_DIM // 2)[None, :]
    # A padding row (fewer keys than new tokens) has no position; what it sees is nothing.
    known = (live & (position >= 0))[:, None]
    cos = tl.load(angle, mask=known, other=1.0)
    sin = tl.load(angle + ROPE_DIM // 2, mask=known, other=0.0)
    rotated = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    return tl.reshape(rotated, [ROWS, ROPE_DIM])


@triton.jit
def store_rows(
    acc, row_max, row_sum, sink, out_rows, lse_rows, position, live, cos_sin,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EMPTY_LSE: tl.constexpr,
):  # fmt: skip
    """Normalise, fold the sink in, apply the inverse RoPE, and store rows and lse.

    Args:
        cos_sin: ``Matrix``; None: no inverse RoPE.
        EMPTY_LSE: the lse of a row without keys.
    """
    HEAD_DIM: tl.constexpr = KEYS.HEAD_DIM
    ROPE_DIM: tl.constexpr = KEYS.ROPE_DIM
    GROUPS: tl.constexpr = HEAD_DIM // ROPE_DIM
    dtype = out_rows.dtype.element_ty
    factor = fold_sink(row_max, row_sum, sink)
    dim = tl.arange(0, HEAD_DIM)
    stored = dim < HEAD_DIM
    acc = acc * (factor[None, :] if KEYS.SWAP else factor[:, None])
    if cos_sin is not None:
        is_rope = tl.arange(0, GROUPS) == GROUPS - 1
        if KEYS.SWAP:
            groups = tl.reshape(acc, [GROUPS, ROPE_DIM, ROWS])
            rope = tl.trans(tl.sum(tl.where(is_rope[:, None, None], groups, 0.0), 0))
        else:
            groups = tl.reshape(acc, [ROWS, GROUPS, ROPE_DIM])
            rope = tl.sum(tl.where(is_rope[None, :, None], groups, 0.0), 1)
        rope = _inverse_rope(rope, position, live, cos_sin, ROWS, ROPE_DIM)
        channel = HEAD_DIM - ROPE_DIM + tl.arange(0, ROPE_DIM)
        tl.store(out_rows[:, None] + channel[None, :], rope.to(dtype), mask=live[:, None])
        stored = dim < HEAD_DIM - ROPE_DIM
    if KEYS.SWAP:
        pointers = out_rows[None, :] + dim[:, None]
        tl.store(pointers, acc.to(dtype), mask=live[None, :] & stored[:, None])
    else:
        pointers = out_rows[:, None] + dim[None, :]
        tl.store(pointers, acc.to(dtype), mask=live[:, None] & stored[None, :])
    if lse_rows is not None:
        row_lse = natural_lse(row_max, row_sum)
        if EMPTY_LSE > 0:
            row_lse = tl.where(row_sum > 0.0, row_lse, EMPTY_LSE)
        tl.store(lse_rows, row_lse, mask=live)


@triton.jit
def store_output(
    acc, row_max, row_sum, out, lse, sinks, cos_sin, first_token, token, head, position, live,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the rows of a query tile, which starts with ``first_token``, as the call's result."""
    EMPTY_LSE: tl.constexpr = float("inf") if KEYS.SLOTS else float("-inf")
    first_head = first_token * 0
    out_rows = row_pointers(
        out.data, first_token, first_head, token, head, out.stride_token, out.stride_head
    )
    lse_rows = None
    if lse is not None:
        lse_rows = row_pointers(
            lse.data, first_token, first_head, token, head, lse.stride_token, lse.stride_head
        )
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=float("-inf")) * LOG2E
    store_rows(
        acc, row_max, row_sum, sink, out_rows, lse_rows, position, live, cos_sin,
        ROWS, KEYS, EMPTY_LSE,
    )  # fmt: skip


@triton.jit
def attend_query_tile(
    q, token, seq, first_token, q_first, q_last, context, oldest, split, split_stop, num_splits,
    pages, kv, window_len, num_listed, entry_room, ratio, softmax,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Attend for one query tile to the KV splits [split, split_stop) of ``num_splits``.

    Args:
        q: as in ``attend_keys``.
        token: [ROWS] token of each row in its sequence's step; q_first, q_last: the tile's first
            and last.
        seq, first_token: as in ``Order``.
        context: tokens of the sequence before the step.
        oldest: position of the first raw row that no later one has overwritten.
        window_len: keys of the window that come as a list, with SLOTS.
        num_listed: entries of the token's list; -1: there is none.
        entry_room: entries that the table has room for.
        pages, kv, ratio, softmax, KEYS, ONE_TOKEN: as in ``attend_keys``.
    """
    # One tile cannot hold quantized rows and plain ones: the new rows take a loop of their own.
    SEPARATE: tl.constexpr = kv is not None and pages.window.data.dtype.element_ty == tl.uint8
    BLOCK_N: tl.constexpr = KEYS.BLOCK_N
    HEAD_DIM: tl.constexpr = KEYS.HEAD_DIM
    if KEYS.SWAP:
        acc = tl.zeros([HEAD_DIM, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    position = context + token
    low = 0
    num_entries = 0
    if KEYS.SLOTS:
        num_raw = window_len
    else:
        low = tl.maximum(tl.maximum(context + q_first - softmax.sliding_window + 1, oldest), 0)
        raw_stop = context + q_last + 1
        if SEPARATE:
            raw_stop = tl.minimum(raw_stop, context)
        num_raw = tl.maximum(raw_stop - low, 0)
        num_entries = tl.minimum(tl.maximum(context + q_last + 1, 0) // ratio, entry_room)
    num_keys = num_raw + tl.where(num_listed >= 0, num_listed, num_entries)
    num_tiles = ((num_keys + BLOCK_N - 1) // BLOCK_N).to(tl.int64)
    first = (num_tiles * split // num_splits).to(tl.int32) * BLOCK_N
    stop = tl.minimum((num_tiles * split_stop // num_splits).to(tl.int32) * BLOCK_N, num_keys)
    order = Order(
        seq, first_token + q_first, first_token, low, context - low, num_raw, num_entries, num_listed
    )  # fmt: skip
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q, position, pages, None if SEPARATE else kv, order, first, stop,
        ratio, softmax, KEYS, ONE_TOKEN,
    )  # fmt: skip
    if SEPARATE:
        low = tl.maximum(low, context)
        num_raw = tl.where(split_stop == num_splits, tl.maximum(context + q_last + 1 - low, 0), 0)
        nowhere = Pages(None, None, None, None, None, None, None, None)
        order = Order(seq, first_token + q_first, first_token, low, context - low, num_raw, 0, 0)
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q, position, nowhere, kv, order, 0, num_raw,
            ratio, softmax, KEYS, ONE_TOKEN,
        )  # fmt: skip
    return acc, row_max, row_sum
