"""The decode kernel of ``mla_attention``: programs divide the keys of all query tiles evenly.

A program that has only a part of a query tile's keys leaves its rows and their lse in
``partial_out``: [2 * programs, BLOCK_Q, num_heads, head_dim_v] fp32, then the lse;
``compressed_merge_kernel`` merges them. Next: `query_tile`, the loop over the keys.

Source: Stream-K (arXiv 2301.03598); ``common.stream_k``.
"""

import triton
import triton.language as tl

from ..common import stream_k
from ..common.query_tiles import row_pointers, rows_of_tile
from .query_tile import attend_query_tile, store_output, store_rows


# Not specialised on what changes from step to step, the number of programs included, which follows
# the longest step of the batch.
@triton.jit(do_not_specialize=["num_decodes", "decode_tokens", "programs", "cost"])
def mla_decode_kernel(
    q, pages, kv, block_table, seq_lens, cu_seqlens_q, out, lse, partial_out, first_lse,
    num_decodes, decode_tokens, programs, cost, scale,
    NUM_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, DIVIDE: tl.constexpr,
    HOIST: tl.constexpr, ALIGNED: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Attend for the query tiles that lie in this program's stretch, whole or in part."""
    head_tile = tl.program_id(0) % HEAD_TILES
    first_head = head_tile * 0
    program = tl.program_id(0) // HEAD_TILES
    batch = (seq_lens, cu_seqlens_q, num_decodes, decode_tokens, None, None)
    size, least, total = stream_k.share(batch, programs, LEAST, cost, BLOCK_Q, BLOCK_N)
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
        # Registers are short: a zero that the compiler does not know keeps it from computing the
        # rows once for all turns, and what is known of them is not kept through the loop over keys.
        zero = tl.minimum(first_token, 0)
        token, head, live = rows_of_tile(
            head_tile, q_len - q_first, NUM_HEADS, BLOCK_Q, HEADS, BLOCK_M, zero
        )
        q_rows = row_pointers(
            q.data,
            first_token + q_first,
            first_head,
            token,
            head,
            q.stride_token,
            q.stride_head,
        )
        new_kv = None
        new_stride = 0
        if kv is not None:
            new_kv = kv.data + first_token.to(tl.int64) * kv.stride_row
            new_stride = kv.stride_row
        high = tl.minimum(high, context + tl.minimum(q_first + BLOCK_Q, q_len))
        acc, row_max, row_sum = attend_query_tile(
            q_rows, live, context + q_first + token, pages, new_kv, new_stride,
            block_table.data + seq.to(tl.int64) * block_table.stride_seq, block_table.width,
            low, high, context, scale,
            HEAD_DIM_V, ROPE_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, SWAP, DIVIDE, HOIST, ALIGNED,
            BLOCK_Q == 1,
        )  # fmt: skip
        first_token = tl.load(cu_seqlens_q + seq, volatile=True)
        q_len = tl.load(cu_seqlens_q + seq + 1, volatile=True) - first_token
        zero = tl.minimum(first_token, 0) if HOIST and BLOCK_M == 64 else 0
        token, head, live = rows_of_tile(
            head_tile, q_len - q_first, NUM_HEADS, BLOCK_Q, HEADS, BLOCK_M, zero
        )
        if holds == 3:
            store_output(
                acc, row_max, row_sum, out, lse, first_token + q_first, token, head, live,
                HEAD_DIM_V, SWAP,
            )  # fmt: skip
        elif partial_out is not None:
            # A program leaves two parts at most: of a query tile that others began, and of one
            # that others end.
            part = 2 * program + holds % 2
            part_row = (part.to(tl.int64) * BLOCK_Q + token) * NUM_HEADS + head
            store_rows(
                acc, row_max, row_sum,
                partial_out + part_row * HEAD_DIM_V, partial_out + first_lse + part_row, live,
                HEAD_DIM_V, SWAP,
            )  # fmt: skip
