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
from ..common.query_tiles import row_pointers, rows_of_tile
from .configs import MIN_SPLIT_KEYS
from .key_tiles import Pages
from .query_tile import attend_query_tile, listed_entries, store_output, store_rows

# Units of a program, at least, are so many keys.
LEAST_KEYS = tl.constexpr(MIN_SPLIT_KEYS)


# Not specialised on what changes from step to step or from layer to layer: neither a new batch size
# nor another kind of layer must compile a kernel.
@triton.jit(
    do_not_specialize=[
        "num_unsplit", "num_decodes", "decode_tokens", "num_splits", "programs",
        "window_room", "entry_room", "entry_rows", "table_stride", "topk", "topk_stride", "ratio",
        "cost",
    ]
)  # fmt: skip
def compressed_decode_kernel(
    q, window_pages, kv, compressed_pages, window_table, compressed_table, lists, sequences,
    sinks, cos_sin, out, lse, partial_out, first_lse,
    num_unsplit, num_decodes, decode_tokens, num_splits, programs, window_room, entry_room,
    entry_rows, table_stride, topk, topk_stride, ratio, cost, softmax,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend for decode sequences: for a query tile, a split of one, or a stretch of several."""
    BLOCK_M: tl.constexpr = QUERIES.BLOCK_M
    BLOCK_Q: tl.constexpr = QUERIES.BLOCK_Q
    BLOCK_N: tl.constexpr = KEYS.BLOCK_N
    LEAST: tl.constexpr = LEAST_KEYS // BLOCK_N
    head_tile = tl.program_id(0) % QUERIES.HEAD_TILES
    item = tl.program_id(0) // QUERIES.HEAD_TILES
    seq_tiles = tl.cdiv(decode_tokens, BLOCK_Q)
    batch = (
        sequences.seq_lens, sequences.cu_seqlens_q, num_decodes, decode_tokens,
        softmax.sliding_window, ratio,
    )  # fmt: skip
    if not KEYS.SLOTS and programs > 0:
        size, least, total = stream_k.share(batch, programs, LEAST, cost, BLOCK_Q, BLOCK_N)
        low, high, turns = stream_k.stretch(item, size, least, total, batch, BLOCK_Q, BLOCK_N)
        seq, tile, _, begin, _ = stream_k.locate(low, batch, BLOCK_Q, BLOCK_N)
        split, left = low - begin, high - low
    else:
        # One split of one query tile.
        beyond = tl.maximum(item - num_unsplit * seq_tiles, 0)
        tile = item - beyond + beyond // num_splits
        seq = tile // seq_tiles
        tile = tile % seq_tiles
        split, left, turns = beyond % num_splits, 1, 1
    for _ in tl.range(0, turns, disable_licm=True):
        if not KEYS.SLOTS and programs > 0:
            _, units = stream_k.work(seq, batch, BLOCK_Q, BLOCK_N)
            # A program leaves two parts at most: of a query tile that others began, and of one that
            # others end.
            part = 2 * item + (split == 0).to(tl.int32)
        else:
            units = tl.where(seq < num_unsplit, 1, num_splits)
            part = item - num_unsplit * seq_tiles
        split_stop = tl.minimum(split + left, units)
        left -= split_stop - split
        # Of a query tile that is not split there is no part but the whole.
        part = tl.where(split_stop - split == units, -1, part)
        q_first = tile * BLOCK_Q
        first_token = seq
        q_len = 1
        context = 0
        if not KEYS.SLOTS:
            first_token = tl.load(sequences.cu_seqlens_q + seq)
            q_len = tl.load(sequences.cu_seqlens_q + seq + 1) - first_token
            context = tl.load(sequences.seq_lens + seq) - q_len
        if (q_first < q_len) & (q_len <= decode_tokens):
            tile_token = first_token + q_first
            token, head, live = rows_of_tile(
                head_tile, q_len - q_first, QUERIES.NUM_HEADS, BLOCK_Q, QUERIES.HEADS, BLOCK_M
            )
            q_rows = row_pointers(
                q.data, tile_token, head_tile * 0, token, head, q.stride_token, q.stride_head
            )
            dim = tl.arange(0, KEYS.HEAD_DIM)
            q_tile = tl.load(q_rows[:, None] + dim[None, :], mask=live[:, None], other=0.0)
            window_len = window_table.width
            if lists.window_lens is not None:
                window_len = tl.load(lists.window_lens + tile_token // lists.tokens_per_len)
                window_len = tl.minimum(tl.maximum(window_len, 0), window_table.width)
            num_listed = listed_entries(lists, topk, tile_token)
            # Of the rows in pages a later one has overwritten those before.
            oldest = (context if kv is not None else context + q_len) - window_room
            pages = Pages(
                window_pages, window_table, compressed_pages, compressed_table, table_stride, entry_rows,
                lists.topk_indices, topk_stride,
            )  # fmt: skip
            acc, row_max, row_sum = attend_query_tile(
                q_tile, q_first + token, seq, first_token, q_first,
                tl.minimum(q_first + BLOCK_Q, q_len) - 1, context, oldest, split, split_stop, units,
                pages, kv, window_len, num_listed, entry_room, ratio, softmax,
                BLOCK_M, KEYS, BLOCK_Q == 1,
            )  # fmt: skip
            if not KEYS.SLOTS:
                # Computed again: kept through the loop over keys, it would spill below Hopper.
                first_token = tl.load(sequences.cu_seqlens_q + seq, volatile=True)
                q_len = tl.load(sequences.cu_seqlens_q + seq + 1, volatile=True) - first_token
                context = tl.load(sequences.seq_lens + seq, volatile=True) - q_len
                tile_token = first_token + q_first
                token, head, live = rows_of_tile(
                    head_tile, q_len - q_first, QUERIES.NUM_HEADS, BLOCK_Q, QUERIES.HEADS, BLOCK_M
                )
            if part < 0:
                store_output(
                    acc, row_max, row_sum, out, lse, sinks, cos_sin, tile_token, token, head,
                    context + q_first + token, live, BLOCK_M, KEYS,
                )  # fmt: skip
            else:
                row = (part.to(tl.int64) * BLOCK_Q + token) * QUERIES.NUM_HEADS + head
                store_rows(
                    acc, row_max, row_sum, float("-inf"),
                    partial_out + row * KEYS.HEAD_DIM, partial_out + first_lse + row, token, live,
                    None, BLOCK_M, KEYS, float("-inf"),
                )  # fmt: skip
        split = 0
        if not KEYS.SLOTS and programs > 0:
            seq, tile = stream_k.next_tile(seq, tile, batch, BLOCK_Q, BLOCK_N)
