"""The prefill kernel of ``compressed_attention``: one program a query tile and tile of heads.

Next: `query_tile`, then the loop in `key_tiles`.
"""

import triton
import triton.language as tl

from ..common.query_tiles import find_query_tile, readable_rows, row_pointers, rows_of_tile
from .key_tiles import Pages
from .query_tile import attend_query_tile, store_output


# Not specialised on what changes from step to step: a new batch size must not compile a kernel.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_decodes", "decode_tokens", "num_tiles", "window_room", "entry_room"
    ]
)  # fmt: skip
def compressed_prefill_kernel(
    q, window_pages, kv, compressed_pages, window_table, compressed_table, topk_indices, lists,
    seq_lens, cu_seqlens_q, sinks, cos_sin, out, lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, window_room, entry_room, mask, scale,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend for the query tile ``num_tiles - 1 - program // HEAD_TILES`` of the batch."""
    BLOCK_M: tl.constexpr = QUERIES.BLOCK_M
    BLOCK_Q: tl.constexpr = QUERIES.BLOCK_Q
    head_tile = tl.program_id(0) % QUERIES.HEAD_TILES
    # Later tiles of a sequence see more keys; they start first, so that no long tile runs alone at
    # the end.
    tile = num_tiles - 1 - tl.program_id(0) // QUERIES.HEAD_TILES
    seq, q_first = find_query_tile(cu_seqlens_q, tile, num_seqs, BLOCK_Q)
    first_token = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    if (q_first >= q_len) | ((seq < num_decodes) & (q_len <= decode_tokens)):
        return
    context = tl.load(seq_lens + seq) - q_len
    tile_token = first_token + q_first
    token, head, live = rows_of_tile(
        head_tile, q_len - q_first, QUERIES.NUM_HEADS, BLOCK_Q, QUERIES.HEADS, BLOCK_M
    )
    if KEYS.PARTS > 1:
        q_token, q_head = readable_rows(token, head, live, head_tile * QUERIES.HEADS)
    else:
        q_token, q_head = token, head
    q_tile = row_pointers(
        q.data, tile_token, head_tile * 0, q_token, q_head, q.stride_token, q.stride_head
    )
    if KEYS.PARTS == 1:
        dim = tl.arange(0, KEYS.HEAD_DIM)
        q_tile = tl.load(q_tile[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    token_topk = None
    num_topk = 0
    if topk_indices is not None:
        token_topk = topk_indices.data + tile_token.to(tl.int64) * topk_indices.stride_seq
        num_topk = topk_indices.width
        if lists.topk_lens is not None:
            num_topk = tl.load(lists.topk_lens + tile_token)
            num_topk = tl.minimum(tl.maximum(num_topk, 0), topk_indices.width)
    oldest = context + q_len - window_room
    new_kv = None
    new_stride = 0
    if kv is not None:
        oldest = context - window_room
        new_kv = kv.data + first_token.to(tl.int64) * kv.stride_row
        new_stride = kv.stride_row
    entry_table = None
    if compressed_table is not None:
        entry_table = compressed_table.data + seq.to(tl.int64) * compressed_table.stride_seq
    pages = Pages(
        window_pages,
        window_table.data + seq.to(tl.int64) * window_table.stride_seq, window_table.width,
        compressed_pages, entry_table, token_topk,
    )  # fmt: skip
    acc, row_max, row_sum = attend_query_tile(
        q_tile, q_first + token, q_first, tl.minimum(q_first + BLOCK_Q, q_len) - 1,
        context, oldest, 0, 1, 1,
        pages, new_kv, new_stride, 0, num_topk, entry_room, mask, scale,
        BLOCK_M, KEYS, BLOCK_Q == 1,
    )  # fmt: skip
    position = context + q_first + token
    store_output(
        acc, row_max, row_sum, out, lse, sinks, cos_sin, tile_token, token, head, position, live,
        BLOCK_M, KEYS,
    )  # fmt: skip
