"""The prefill kernel of paged attention: a program computes query tiles of any sequences.

A sequence has as many query tiles as its new tokens fill. In prefill a `Config` may ask for tensor
descriptors, which copy whole tiles of new rows, and for few programs that take query tiles in
turns. Neither changes a bit of the result. Next: `query_tile`, which walks the keys.
"""

import triton
import triton.language as tl

from ..common.query_tiles import find_query_tile, row_pointers, rows_of_tile
from . import split_kv
from .arguments import KeySplit, QueryTile, Source, Tiles
from .quantized_tile import Scales
from .query_tile import attend_query_tile, store_query_tile


# What changes from step to step is not specialised on: a new batch size must not compile a new
# kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_decodes", "decode_tokens", "num_tiles"])
def prefill_kernel(
    q, k_pages, v_pages, k_new, v_new, k_tiles, v_tiles, block_table, seq_lens, cu_seqlens_q,
    sinks, out, lse, num_seqs, num_decodes, decode_tokens, num_tiles, num_kv_heads, softmax,
    k_scale, v_scale, CONFIG: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Attend for the query tiles of all sequences but decode's.

    Args:
        q, out, lse: ``strided.Rows``; lse may be None.
        k_pages, v_pages: ``strided.Pages``; as bytes if quantized.
        k_new, v_new: ``strided.Rows`` of the step, None if all keys are in pages.
        k_tiles, v_tiles: tensor descriptors of k_new and v_new, or None.
        block_table: ``strided.Table``.
        seq_lens, cu_seqlens_q, sinks: pointers; sinks may be None.
        num_decodes, decode_tokens: the first so many sequences are decode's if they have no more
            new tokens than that.
        num_tiles: a bound of the query tiles of all sequences.
        softmax: ``Softmax``.
        k_scale, v_scale: what CONFIG.SCALES says; ``strided.Pages`` with "rows".
        CONFIG: ``TileConfig``.
        PERSISTENT: whether programs take query tiles in turns.
    """
    GROUP: tl.constexpr = CONFIG.GROUP
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    HEAD_TILES: tl.constexpr = CONFIG.HEAD_TILES
    VALUE_DIM: tl.constexpr = CONFIG.VALUE_DIM
    # Items next to each other share a query tile: its head tiles, and the parts of the values.
    PARTS: tl.constexpr = CONFIG.HEAD_DIM // VALUE_DIM
    num_head_tiles = num_kv_heads * HEAD_TILES
    if PERSISTENT:
        turns = tl.cdiv(num_tiles * num_head_tiles * PARTS, tl.num_programs(0))
    else:
        turns: tl.constexpr = 1
    for turn in tl.range(0, turns, disable_licm=True):
        item = split_kv.item_of_turn(turn)
        part = item % PARTS
        head_index = item // PARTS % num_head_tiles
        kv_head = (head_index // HEAD_TILES).to(tl.int64)
        # Later tiles of a sequence see more keys; they start first, so that no long tile runs
        # alone at the end.
        tile = num_tiles - 1 - item // PARTS // num_head_tiles
        seq, q_first = find_query_tile(cu_seqlens_q, tl.maximum(tile, 0), num_seqs, BLOCK_Q)
        first_token = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
        if (tile >= 0) & (q_first < q_len) & ((seq >= num_decodes) | (q_len > decode_tokens)):
            context = tl.load(seq_lens + seq) - q_len
            tile_token = first_token + q_first
            first_head = kv_head * GROUP
            token, group_head, live = rows_of_tile(
                head_index % HEAD_TILES, q_len - q_first, GROUP, BLOCK_Q,
                CONFIG.HEADS, CONFIG.BLOCK_M,
            )  # fmt: skip
            q_rows = row_pointers(
                q.data, tile_token, first_head, token, group_head, q.stride_token, q.stride_head
            )
            dim = tl.arange(0, CONFIG.HEAD_DIM)
            q_tile = tl.load(q_rows[:, None] + dim[None, :], mask=live[:, None], other=0.0)
            channel = part * VALUE_DIM
            scales = None
            if CONFIG.SCALES == "rows":
                scales = Scales(
                    k_scale.data + kv_head * k_scale.stride_head,
                    v_scale.data + kv_head * v_scale.stride_head,
                    k_scale.stride_page, k_scale.stride_row,
                    v_scale.stride_page, v_scale.stride_row,
                )  # fmt: skip
            pages = Source(
                k_pages.data + kv_head * k_pages.stride_head,
                v_pages.data + (kv_head * v_pages.stride_head + channel),
                k_pages.stride_page, k_pages.stride_row, v_pages.stride_page, v_pages.stride_row,
                block_table.data + seq.to(tl.int64) * block_table.stride_seq, block_table.width,
                scales, None,
            )  # fmt: skip
            new = Source(None, None, 0, 0, 0, 0, None, 1, None, None)
            if k_new is not None:
                row = first_token.to(tl.int64)
                tiles = None
                if k_tiles is not None:
                    k_column = (kv_head * k_new.stride_head).to(tl.int32)
                    v_column = (kv_head * v_new.stride_head).to(tl.int32) + channel
                    tiles = Tiles(k_tiles, v_tiles, first_token, k_column, v_column)
                new = Source(
                    k_new.data + row * k_new.stride_token + kv_head * k_new.stride_head,
                    v_new.data
                    + (row * v_new.stride_token + kv_head * v_new.stride_head + channel),
                    0, k_new.stride_token, 0, v_new.stride_token, None, 1, None, tiles,
                )  # fmt: skip
            q_last = tl.minimum(q_first + BLOCK_Q, q_len) - 1
            acc, row_max, row_sum = attend_query_tile(
                QueryTile(q_tile, q_first + token, q_first, q_last, context), pages, new,
                k_scale, v_scale, KeySplit(0, context + q_len, True), softmax, CONFIG,
            )  # fmt: skip
            out_rows = row_pointers(
                out.data + part * VALUE_DIM, tile_token, first_head, token, group_head,
                out.stride_token, out.stride_head,
            )  # fmt: skip
            lse_rows = None
            if lse is not None:
                lse_rows = row_pointers(
                    lse.data, tile_token, first_head, token, group_head,
                    lse.stride_token, lse.stride_head,
                )  # fmt: skip
            sink_rows = None
            if sinks is not None:
                sink_rows = sinks + first_head + group_head
            store_query_tile(acc, row_max, row_sum, out_rows, lse_rows, sink_rows, live, VALUE_DIM)
