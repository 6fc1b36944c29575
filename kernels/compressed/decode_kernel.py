"""The decode kernel of ``compressed_attention``: the keys of a query tile may be split (split-KV).

Where keys are bounded, the host decides how many programs share a query tile (``num_splits``);
where they grow with the context, programs divide the keys of all query tiles evenly
(``common.stream_k``). A split leaves its rows and their lse in ``partial_out``: [parts, BLOCK_Q,
num_heads, head_dim] fp32, then the lse; ``compressed_merge_kernel`` merges them.

Next: `query_tile`, then the loop in `key_tiles`.

Source: FlashDecoding (split-KV); Stream-K (arXiv 2301.03598).
"""

import triton
import triton.language as tl

from ..common import stream_k
from ..common.query_tiles import readable_rows, row_pointers, rows_of_tile
from .key_tiles import Pages
from .query_tile import attend_query_tile, store_output, store_rows


# Not specialised on what changes from step to step: a new batch size must not compile a kernel.
@triton.jit(
    do_not_specialize=[
        "num_unsplit", "num_decodes", "decode_tokens", "num_splits", "programs",
        "window_room", "entry_room", "cost",
    ]
)  # fmt: skip
def compressed_decode_kernel(
    q, window_pages, kv, compressed_pages, window_table, compressed_table, topk_indices, lists,
    seq_lens, cu_seqlens_q, sinks, cos_sin, out, lse, partial_out, first_lse,
    num_unsplit, num_decodes, decode_tokens, num_splits, programs, window_room, entry_room,
    cost, mask, scale,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    STREAM_K: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Attend for decode sequences: for a query tile, a split of one, or a stretch of several."""
    BLOCK_M: tl.constexpr = QUERIES.BLOCK_M
    BLOCK_Q: tl.constexpr = QUERIES.BLOCK_Q
    BLOCK_N: tl.constexpr = KEYS.BLOCK_N
    head_tile = tl.program_id(0) % QUERIES.HEAD_TILES
    item = tl.program_id(0) // QUERIES.HEAD_TILES
    seq_tiles = tl.cdiv(decode_tokens, BLOCK_Q)
    if STREAM_K:
        batch = (
            seq_lens, cu_seqlens_q, num_decodes, decode_tokens, mask.sliding_window, mask.ratio
        )  # fmt: skip
        size, least, total = stream_k.share(batch, programs, LEAST, cost, BLOCK_Q, BLOCK_N)
        position, high, turns = stream_k.stretch(item, size, least, total, batch, BLOCK_Q, BLOCK_N)
    else:
        turns: tl.constexpr = 1
    for _ in tl.range(0, turns, disable_licm=True):
        if STREAM_K:
            seq, tile, _, begin, units = stream_k.locate(position, batch, BLOCK_Q, BLOCK_N)
            split = position - begin
            split_stop = tl.minimum(high - begin, units)
            position = begin + units
        else:
            beyond = tl.maximum(item - num_unsplit * seq_tiles, 0)
            tile = item - beyond + beyond // num_splits
            seq = tile // seq_tiles
            tile = tile % seq_tiles
            units = tl.where(seq < num_unsplit, 1, num_splits)
            split = beyond % num_splits
            split_stop = split + 1
        q_first = tile * BLOCK_Q
        first_token = seq
        q_len = 1
        context = 0
        if not KEYS.SLOTS:
            first_token = tl.load(cu_seqlens_q + seq)
            q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
            context = tl.load(seq_lens + seq) - q_len
        if (q_first < q_len) & (q_len <= decode_tokens):
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
            window_len = window_table.width
            if lists.window_lens is not None:
                window_len = tl.load(lists.window_lens + tile_token // lists.tokens_per_len)
                window_len = tl.minimum(tl.maximum(window_len, 0), window_table.width)
            token_topk = None
            num_topk = 0
            if topk_indices is not None:
                token_topk = topk_indices.data + tile_token.to(tl.int64) * topk_indices.stride_seq
                num_topk = topk_indices.width
                if lists.topk_lens is not None:
                    num_topk = tl.load(lists.topk_lens + tile_token // lists.tokens_per_len)
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
                context, oldest, split, split_stop, units,
                pages, new_kv, new_stride, window_len, num_topk, entry_room, mask, scale,
                BLOCK_M, KEYS, BLOCK_Q == 1,
            )  # fmt: skip
            if STREAM_K:
                # Computed again: kept through the loop over keys, it would spill below Hopper.
                first_token = tl.load(cu_seqlens_q + seq, volatile=True)
                q_len = tl.load(cu_seqlens_q + seq + 1, volatile=True) - first_token
                context = tl.load(seq_lens + seq, volatile=True) - q_len
                tile_token = first_token + q_first
                token, head, live = rows_of_tile(
                    head_tile, q_len - q_first, QUERIES.NUM_HEADS, BLOCK_Q, QUERIES.HEADS, BLOCK_M
                )
            if split_stop - split == units:
                store_output(
                    acc, row_max, row_sum, out, lse, sinks, cos_sin, tile_token, token, head,
                    context + q_first + token, live, BLOCK_M, KEYS,
                )  # fmt: skip
            elif partial_out is not None:
                if STREAM_K:
                    # A program leaves two parts at most: of a query tile that others began, and of
                    # one that others end.
                    part = 2 * item + (split == 0).to(tl.int32)
                else:
                    part = item - num_unsplit * seq_tiles
                row = (part.to(tl.int64) * BLOCK_Q + token) * QUERIES.NUM_HEADS + head
                store_rows(
                    acc, row_max, row_sum, float("-inf"),
                    partial_out + row * KEYS.HEAD_DIM, partial_out + first_lse + row, token, live,
                    None, BLOCK_M, KEYS, float("-inf"),
                )  # fmt: skip
