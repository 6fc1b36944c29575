"""The prefill kernel of ``mla_attention``: one program a query tile and tile of heads.

Next: `query_tile`, the loop over the keys.
"""

import triton
import triton.language as tl

from ..common.query_tiles import find_query_tile, row_pointers, rows_of_tile
from .query_tile import attend_query_tile, store_output


# Not specialised on what changes from step to step: a new batch size must not compile a kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_decodes", "decode_tokens", "num_tiles"])
def mla_prefill_kernel(
    q, pages, kv, block_table, seq_lens, cu_seqlens_q, out, lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, scale,
    NUM_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, DIVIDE: tl.constexpr,
    HOIST: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Attend for the query tile ``num_tiles - 1 - program // HEAD_TILES`` of the batch."""
    head_tile = tl.program_id(0) % HEAD_TILES
    # Later tiles of a sequence see more keys; they start first, so that no long tile runs alone at
    # the end.
    tile = num_tiles - 1 - tl.program_id(0) // HEAD_TILES
    seq, q_first = find_query_tile(cu_seqlens_q, tile, num_seqs, BLOCK_Q)
    first_token = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    if (q_first >= q_len) | ((seq < num_decodes) & (q_len <= decode_tokens)):
        return
    context = tl.load(seq_lens + seq) - q_len
    tile_token = first_token + q_first
    token, head, live = rows_of_tile(head_tile, q_len - q_first, NUM_HEADS, BLOCK_Q, HEADS, BLOCK_M)
    q_rows = row_pointers(
        q.data, tile_token, head_tile * 0, token, head, q.stride_token, q.stride_head
    )
    new_kv = None
    new_stride = 0
    if kv is not None:
        new_kv = kv.data + first_token.to(tl.int64) * kv.stride_row
        new_stride = kv.stride_row
    high = context + tl.minimum(q_first + BLOCK_Q, q_len)
    acc, row_max, row_sum = attend_query_tile(
        q_rows, live, context + q_first + token, pages, new_kv, new_stride,
        block_table.data + seq.to(tl.int64) * block_table.stride_seq, block_table.width,
        0, high, context, scale,
        HEAD_DIM_V, ROPE_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, SWAP, DIVIDE, HOIST, ALIGNED,
        BLOCK_Q == 1,
    )  # fmt: skip
    store_output(acc, row_max, row_sum, out, lse, tile_token, token, head, live, HEAD_DIM_V, SWAP)
