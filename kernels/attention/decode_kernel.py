"""The decode kernel of paged attention: a program computes one KV split of one sequence.

Decode sequences have few new tokens, which fit one query tile: next, `query_tile` walks its keys.
`split_kv` says which keys are whose; `merge` merges the splits of a sequence.
"""

import triton
import triton.language as tl

from ..common.query_tiles import row_pointers, rows_of_tile
from . import split_kv
from .arguments import KeySplit, QueryTile, Source
from .quantized_tile import Scales
from .query_tile import attend_query_tile, store_query_tile


@triton.jit(do_not_specialize=["num_decodes", "target_items"])
def decode_kernel(
    q, k_pages, v_pages, k_new, v_new, block_table, seq_lens, cu_seqlens_q, sinks, out, lse,
    partial_out, first_lse, num_decodes, target_items, num_kv_heads, softmax, k_scale, v_scale,
    CONFIG: tl.constexpr, MIN_TOKENS: tl.constexpr,
):  # fmt: skip
    """Attend for one KV split of one decode sequence.

    Args:
        partial_out: fp32 results of the splits of sequences that have several, then from element
            first_lse on their lse; None: no sequence is split.
        target_items: as in `split_kv`.
        MIN_TOKENS: keys of a split, at least.
        others: as in `prefill_kernel`.
    """
    GROUP: tl.constexpr = CONFIG.GROUP
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    HEADS: tl.constexpr = CONFIG.HEADS
    HEAD_TILES: tl.constexpr = CONFIG.HEAD_TILES
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    NEW_KV: tl.constexpr = CONFIG.PAGED_CONTEXT
    sliding_window = softmax.sliding_window
    num_head_tiles = num_kv_heads * HEAD_TILES
    head_index = tl.program_id(0) % num_head_tiles
    kv_head = (head_index // HEAD_TILES).to(tl.int64)
    item = tl.program_id(0) // num_head_tiles
    seq = item
    split = 0
    if partial_out is not None:
        batch = split_kv.Batch(seq_lens, cu_seqlens_q, num_decodes, sliding_window)
        tokens = split_kv.split_tokens(batch, target_items, NEW_KV, MIN_TOKENS)
        seq, first_item = split_kv.find_item(item, batch, tokens, NEW_KV, BLOCK_Q)
        if seq >= num_decodes:
            return
        split = item - first_item
    first_token = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - q_len
    low, high = split_kv.paged_range(seq_len, q_len, sliding_window, NEW_KV)
    if (q_len == 0) | (q_len > BLOCK_Q):
        return
    num_splits = 1
    if partial_out is not None:
        num_splits = split_kv.num_splits(seq_len, q_len, tokens, sliding_window, NEW_KV, BLOCK_Q)
        first_tile = low // BLOCK_N
        num_tiles = (high + BLOCK_N - 1) // BLOCK_N - first_tile
        low = tl.maximum(low, (first_tile + num_tiles * split // num_splits) * BLOCK_N)
        high = tl.minimum(high, (first_tile + num_tiles * (split + 1) // num_splits) * BLOCK_N)

    first_head = kv_head * GROUP
    token, group_head, live = rows_of_tile(
        head_index % HEAD_TILES, q_len, GROUP, BLOCK_Q, HEADS, BLOCK_M
    )
    q_rows = row_pointers(
        q.data, first_token, first_head, token, group_head, q.stride_token, q.stride_head
    )
    q_tile = tl.load(
        q_rows[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=live[:, None], other=0.0
    )
    scales = None
    if CONFIG.SCALES == "rows":
        scales = Scales(
            k_scale.data + kv_head * k_scale.stride_head,
            v_scale.data + kv_head * v_scale.stride_head,
            k_scale.stride_page, k_scale.stride_row, v_scale.stride_page, v_scale.stride_row,
        )  # fmt: skip
    pages = Source(
        k_pages.data + kv_head * k_pages.stride_head,
        v_pages.data + kv_head * v_pages.stride_head,
        k_pages.stride_page, k_pages.stride_row, v_pages.stride_page, v_pages.stride_row,
        block_table.data + seq.to(tl.int64) * block_table.stride_seq, block_table.width,
        scales, None,
    )  # fmt: skip
    new = Source(None, None, 0, 0, 0, 0, None, 1, None, None)
    if k_new is not None:
        row = first_token.to(tl.int64)
        new = Source(
            k_new.data + (row * k_new.stride_token + kv_head * k_new.stride_head),
            v_new.data + (row * v_new.stride_token + kv_head * v_new.stride_head),
            0, k_new.stride_token, 0, v_new.stride_token, None, 1, None, None,
        )  # fmt: skip
    acc, row_max, row_sum = attend_query_tile(
        QueryTile(q_tile, token, 0, q_len - 1, context), pages, new, k_scale, v_scale,
        KeySplit(low, high, split == num_splits - 1), softmax, CONFIG,
    )  # fmt: skip
    if CONFIG.SCALES != "none" and not CONFIG.HARDWARE_E4M3:
        # Bits moved by hand take more registers: rather than keep what is known of the rows, which
        # would spill, work it out again.
        q_len = tl.load(cu_seqlens_q + seq + 1, volatile=True) - first_token
        token, group_head, live = rows_of_tile(
            head_index % HEAD_TILES, q_len, GROUP, BLOCK_Q, HEADS, BLOCK_M
        )
    if num_splits == 1:
        out_rows = row_pointers(
            out.data, first_token, first_head, token, group_head, out.stride_token, out.stride_head
        )
        lse_rows = None
        if lse is not None:
            lse_rows = row_pointers(
                lse.data, first_token, first_head, token, group_head,
                lse.stride_token, lse.stride_head,
            )  # fmt: skip
        sink_rows = None
        if sinks is not None:
            sink_rows = sinks + first_head + group_head
        store_query_tile(acc, row_max, row_sum, out_rows, lse_rows, sink_rows, live, HEAD_DIM)
    elif partial_out is not None:
        num_heads = num_kv_heads * GROUP
        part_row = (item.to(tl.int64) * BLOCK_Q + token) * num_heads + first_head + group_head
        part = partial_out + part_row * HEAD_DIM
        part_lse = partial_out + first_lse + part_row
        store_query_tile(acc, row_max, row_sum, part, part_lse, None, live, HEAD_DIM)
