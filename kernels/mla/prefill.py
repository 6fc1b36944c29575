"""The prefill kernel of ``mla_attention``: one program a query tile and tile of heads."""

import triton
import triton.language as tl

from ..common.query_tiles import find_query_tile, row_pointers, rows_of_tile
from .query_tile import attend_query_tile, store_rows


# Not specialised on what changes from step to step: a new batch size must not compile a new kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_decodes", "decode_tokens", "num_tiles"])
def mla_prefill_kernel(
    q, pages, kv, block_table, seq_lens, cu_seqlens_q, out, lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, width, scale,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, table_stride, stride_page, stride_row, kv_stride,
    NUM_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, DIVIDE: tl.constexpr, HOIST: tl.constexpr, ALIGNED: tl.constexpr,
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
    if kv is not None:
        kv += first_token.to(tl.int64) * kv_stride
    high = context + tl.minimum(q_first + BLOCK_Q, q_len)
    acc, row_max, row_sum = attend_query_tile(
        q_rows, live, context + q_first + token, pages, kv, block_table + seq.to(tl.int64) * table_stride, width,
        stride_page, stride_row, kv_stride, 0, high, context, scale,
        HEAD_DIM_V, ROPE_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, SWAP, DIVIDE, HOIST, ALIGNED, BLOCK_Q == 1,
    )  # fmt: skip
    out_rows = row_pointers(out, tile_token, first_head, token, head, out_stride_token, out_stride_head)  # fmt: skip
    lse_rows = None
    if lse is not None:
        lse_rows = row_pointers(lse, tile_token, first_head, token, head, 1, lse_stride_head)
    store_rows(acc, row_max, row_sum, out_rows, lse_rows, live, HEAD_DIM_V, SWAP)
