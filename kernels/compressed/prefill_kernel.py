"""The prefill kernel of ``compressed_attention``: one program a query tile and tile of heads.

Next: `query_tile`, then the loop in `key_tiles`.
"""

import triton
import triton.language as tl

from ..common.query_tiles import find_query_tile, row_pointers, rows_of_tile
from .key_tiles import Pages
from .query_tile import attend_query_tile, listed_entries, store_output


# Not specialised on what changes from step to step: a new batch size must not compile a kernel.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_decodes", "decode_tokens", "num_tiles", "window_room", "entry_room",
        "entry_rows", "table_stride", "topk", "topk_stride", "ratio",
    ]
)  # fmt: skip
def compressed_prefill_kernel(
    q, window_pages, kv, compressed_pages, window_table, compressed_table, lists, sequences,
    sinks, cos_sin, out, lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, window_room, entry_room, entry_rows,
    table_stride, topk, topk_stride, ratio, softmax,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend for the query tile ``num_tiles - 1 - program // HEAD_TILES`` of the batch."""
    BLOCK_M: tl.constexpr = QUERIES.BLOCK_M
    BLOCK_Q: tl.constexpr = QUERIES.BLOCK_Q
    head_tile = tl.program_id(0) % QUERIES.HEAD_TILES
    # Later tiles of a sequence see more keys; they start first, so that no long tile runs alone at
    # the end.
    tile = num_tiles - 1 - tl.program_id(0) // QUERIES.HEAD_TILES
    seq, q_first = find_query_tile(sequences.cu_seqlens_q, tile, num_seqs, BLOCK_Q)
    first_token = tl.load(sequences.cu_seqlens_q + seq)
    q_len = tl.load(sequences.cu_seqlens_q + seq + 1) - first_token
    if (q_first >= q_len) | ((seq < num_decodes) & (q_len <= decode_tokens)):
        return
    context = tl.load(sequences.seq_lens + seq) - q_len
    tile_token = first_token + q_first
    token, head, live = rows_of_tile(
        head_tile, q_len - q_first, QUERIES.NUM_HEADS, BLOCK_Q, QUERIES.HEADS, BLOCK_M
    )
    q_rows = row_pointers(
        q.data, tile_token, head_tile * 0, token, head, q.stride_token, q.stride_head
    )
    dim = tl.arange(0, KEYS.HEAD_DIM)
    q_tile = tl.load(q_rows[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    num_listed = listed_entries(lists, topk, tile_token)
    # Of the rows in pages a later one has overwritten those before.
    oldest = (context if kv is not None else context + q_len) - window_room
    pages = Pages(
        window_pages, window_table, compressed_pages, compressed_table, table_stride, entry_rows,
        lists.topk_indices, topk_stride,
    )  # fmt: skip
    acc, row_max, row_sum = attend_query_tile(
        q_tile, q_first + token, seq, first_token, q_first,
        tl.minimum(q_first + BLOCK_Q, q_len) - 1, context, oldest, 0, 1, 1,
        pages, kv, 0, num_listed, entry_room, ratio, softmax,
        BLOCK_M, KEYS, BLOCK_Q == 1,
    )  # fmt: skip
    position = context + q_first + token
    store_output(
        acc, row_max, row_sum, out, lse, sinks, cos_sin, tile_token, token, head, position, live,
        BLOCK_M, KEYS,
    )  # fmt: skip
