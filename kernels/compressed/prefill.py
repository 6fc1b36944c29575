"""The prefill kernel of ``compressed_attention``: one program a query tile and tile of heads."""

import triton
import triton.language as tl

from ..common.query_tiles import find_query_tile, row_pointers, rows_of_tile
from .key_tiles import Pages
from .query_tile import attend_query_tile, store_output


# Not specialised on what changes from step to step: a new batch size must not compile a new kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_decodes", "decode_tokens", "num_tiles", "window_room", "entry_room"])  # fmt: skip
def compressed_prefill_kernel(
    q, window_pages, kv, compressed_pages, window_table, compressed_table, topk_indices, topk_lens, seq_lens, cu_seqlens_q, sinks, cos_sin, out, lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, window_width, window_room, entry_room, topk, sliding_window, ratio, scale,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, cos_sin_stride, kv_stride,
    window_table_stride, compressed_table_stride, topk_stride,
    window_stride_page, window_stride_row, compressed_stride_page, compressed_stride_row,
    NUM_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, DIVIDE: tl.constexpr, HOIST: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Attend for the query tile ``num_tiles - 1 - program // HEAD_TILES`` of the batch."""
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
    num_topk = topk
    if topk_indices is not None:
        topk_indices += tile_token.to(tl.int64) * topk_stride
        if topk_lens is not None:
            num_topk = tl.minimum(tl.maximum(tl.load(topk_lens + tile_token), 0), topk)
    oldest = context + q_len - window_room
    if kv is not None:
        oldest = context - window_room
        kv += first_token.to(tl.int64) * kv_stride
    if compressed_table is not None:
        compressed_table += seq.to(tl.int64) * compressed_table_stride
    pages = Pages(
        window_pages, window_table + seq.to(tl.int64) * window_table_stride, window_width, window_stride_page, window_stride_row,
        compressed_pages, compressed_table, compressed_stride_page, compressed_stride_row, topk_indices,
    )  # fmt: skip
    acc, row_max, row_sum = attend_query_tile(
        q_tile, q_first + token, q_first, tl.minimum(q_first + BLOCK_Q, q_len) - 1, context, oldest, 0, 1, 1, pages, kv, kv_stride, 0, num_topk, entry_room,
        sliding_window, ratio, scale,
        WINDOW_ROWS, ENTRY_ROWS, False, HARDWARE_E4M3, HEAD_DIM, BLOCK_M, BLOCK_N, SWAP, BLOCK_Q == 1, DIVIDE, HOIST, ALIGNED,
    )  # fmt: skip
    store_output(
        acc, row_max, row_sum, out, lse, sinks, cos_sin, tile_token, token, head, context + q_first + token, live,
        out_stride_token, out_stride_head, lse_stride_head, cos_sin_stride, HEAD_DIM, ROPE_DIM, BLOCK_M, SWAP, False,
    )  # fmt: skip
