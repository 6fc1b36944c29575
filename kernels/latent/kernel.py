"""Attention over latent rows, keys and values at once: one kernel for MLA and DeepSeek-V4.

    out_i = R(-p_i) sum_j softmax_j(softmax_scale * q_i . row_j) row_j[:VALUE_DIM]

A program walks the keys of one query tile (row = token * HEADS + head), source by source. It has
one online softmax (exp2 domain, fp32 sums). A loop copies one tile of rows, and uses it as K and V:

    MLA            [ pages ............... | new rows ]    keys have SCORE_DIM channels more
    DeepSeek-V4    [ window pages | entries | new rows ]   all entries, or a list of them

Page ids are loaded one tile ahead, indices of a list two tiles ahead: Triton does not pipeline
copies of rows whose addresses are loaded in the same iteration. Rows of DeepSeek-V4 are rotated by
their own positions; R(-p_i) rotates the trailing ROPE_DIM channels of the output back by the
query's. MLA has no R.

Source: DeepSeek-V2 (arXiv 2405.04434) 2.1; DeepSeek-V4 report 2.3; FlashAttention-2, FlashDecoding.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import latent_pages, query_tiles, split_kv
from ..common.bits import widen
from ..common.query_tiles import LOG2E
from ..common.strided import PagedMatrix

# Quantized rows, 584 bytes: ROW_BYTES hold the values. SCALE_BYTES are behind all rows of the page.
ROW_BYTES = tl.constexpr(latent_pages.ROW_BYTES)
SCALE_BYTES = tl.constexpr(latent_pages.SCALE_BYTES)
NOPE_DIM = tl.constexpr(latent_pages.NOPE_DIM)
QUANT_ROPE_DIM = tl.constexpr(latent_pages.ROPE_DIM)
QUANT_GROUP = tl.constexpr(latent_pages.QUANT_GROUP)
NO_LIMIT = tl.constexpr(2**31 - 1)  # above every index of a row


class TileShape(NamedTuple):
    """Compile-time constants of a launch, one ``tl.constexpr`` argument."""

    VALUE_DIM: Any  # channels of a value, the first of a row
    SCORE_DIM: Any  # channels behind those, which only score
    ROPE_DIM: Any  # trailing channels of an output row that ``cos_sin`` rotates
    NUM_HEADS: Any  # query heads
    BLOCK_Q: Any  # tokens of a query tile; 1 where every token has a list of its own
    HEADS: Any  # heads of a query tile
    HEAD_TILES: Any  # query tiles that cover the heads
    BLOCK_M: Any  # rows of a query tile, at least BLOCK_Q * HEADS
    BLOCK_N: Any  # keys of a tile
    PAGE_ROWS: Any  # rows of a page
    ENTRY_ROWS: Any  # rows of a page of entries
    # Tables are lists of flat row indices of each token: no seq_lens, new rows or window; BLOCK_Q
    # is 1.
    SLOTS: Any
    WIDENS_E4M3: Any  # whether the GPU has an instruction from e4m3 to fp16
    NEW_KV: Any  # whether the pages hold only the keys before the step
    DECODE: Any  # whether a program has a KV split of a decode sequence, not a prefill tile


class KeySource(NamedTuple):
    """Rows of one sequence: in pages, or one after another (table and indices None)."""

    rows: Any  # ``strided.PagedMatrix``; quantized: bytes
    table: Any  # block table of the sequence
    width: Any  # its entries
    indices: Any  # the token's list of rows of the table or, without one, of flat indices
    offset: Any  # position of row 0 in the sequence
    ratio: Any  # raw tokens of a row; None: rows are raw


@triton.jit
def _load_indices(source, x, high):
    """Rows that a list names; -1 behind its end."""
    LISTED: tl.constexpr = source.indices is not None
    return tl.load(source.indices + x, mask=x < high, other=-1) if LISTED else x


@triton.jit
def _load_page(source, start, high, index, live, window, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page id of a tile that lies in one page, from its first row ``start``; otherwise [BLOCK_N]
    page ids, one for each row ``index``. Rows that are not live have page 0."""
    if source.table is None:
        page = 0 if source.indices is None else tl.maximum(index, 0) // ROWS
    else:
        if source.indices is None and ROWS % BLOCK_N == 0:
            block = start // ROWS
            live = start < high
        else:
            block = tl.maximum(index, 0) // ROWS
        RING: tl.constexpr = window is not None and source.ratio is None  # or a linear table
        block = block % source.width if RING else tl.minimum(block, source.width - 1)
        page = tl.load(source.table + block, mask=live, other=0)
    return page


@triton.jit
def _load_quantized(rows, scales, live, dtype: tl.constexpr, SHAPE: tl.constexpr):
    """Rows of the 584-byte layout as numbers [BLOCK_N, VALUE_DIM], from [BLOCK_N] pointers to the
    bytes of their values and scales."""
    GROUPS: tl.constexpr = SHAPE.VALUE_DIM // QUANT_GROUP
    dim = tl.arange(0, SHAPE.VALUE_DIM)
    mask = live[:, None] & (dim < NOPE_DIM)[None, :]
    quantized = tl.load(rows[:, None] + dim[None, :], mask=mask, other=0)
    rope = (rows + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
    offs_rope = tl.arange(0, QUANT_ROPE_DIM)[None, :]
    rope = tl.load(rope[:, None] + offs_rope, mask=live[:, None], other=0.0)
    # The eight scale bytes of a row at once; 2^(byte - 127) is the fp32 number with that exponent
    # and no mantissa. The eighth byte is 0, a factor of 0: the roped channels replace its group.
    packed = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=live, other=0)
    group = tl.arange(0, GROUPS)
    exponents = ((packed[:, None] >> (8 * group)[None, :]) & 0xFF).to(tl.int32)
    factors = (exponents << 23).to(tl.float32, bitcast=True)[:, :, None]
    values = widen(quantized, tl.float32, SHAPE.WIDENS_E4M3)
    values = (tl.reshape(values, [SHAPE.BLOCK_N, GROUPS, QUANT_GROUP]) * factors).to(dtype)
    values = tl.where((group == GROUPS - 1)[None, :, None], rope.to(dtype)[:, None, :], values)
    return tl.reshape(values, [SHAPE.BLOCK_N, SHAPE.VALUE_DIM])


@triton.jit
def _attend(
    state, queries, position, source, low, high, limit, window, scale,
    ROWS: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Attend to rows [low, high) of a source; a page has ROWS of them.

    A source with a list: rows below ``limit`` that elements [low, high) of the list name. There
    ``low`` is a multiple of BLOCK_N.
    """
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    QUANTIZED: tl.constexpr = source.rows.data.dtype.element_ty == tl.uint8
    LISTED: tl.constexpr = source.indices is not None
    acc, row_max, row_sum = state
    q, q_score = queries
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, SHAPE.VALUE_DIM)[None, :]
    first = low // BLOCK_N * BLOCK_N
    x = first + offs_n
    # index and live of the first tile, for its page: the loop derives those of the rows again.
    index = _load_indices(source, x, high)
    live = (x >= low) & (x < high)
    if LISTED:
        index = tl.where(index < limit, index, -1)
        live = index >= 0
    page = _load_page(source, first, high, index, live, window, ROWS, BLOCK_N)
    next_index = _load_indices(source, x + BLOCK_N, high)
    for start in tl.range(first, high, BLOCK_N, disable_licm=True):
        if not LISTED:
            index = start + offs_n
            live = (index >= low) & (index < high)
        else:
            live = index >= 0
            index = tl.maximum(index, 0)
        if source.table is None and not LISTED:
            rows = source.rows.data + index.to(tl.int64) * source.rows.stride_row
        else:
            row = index % ROWS
            pages = source.rows.data + page.to(tl.int64) * source.rows.stride_page
            rows = pages + row * (ROW_BYTES if QUANTIZED else source.rows.stride_row)
        # What lies in rows that are not live may be NaN: 0 * NaN would reach the output.
        if QUANTIZED:  # always in pages
            scales = source.rows.data + ROWS * ROW_BYTES
            scales += page.to(tl.int64) * source.rows.stride_page + row * SCALE_BYTES
            tile = _load_quantized(rows, scales, live, q.dtype, SHAPE)
        else:
            tile = tl.load(rows[:, None] + dim, mask=live[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(tile), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if q_score is not None:
            score_dim = SHAPE.VALUE_DIM + tl.arange(0, SHAPE.SCORE_DIM)[None, :]
            score_tile = tl.load(rows[:, None] + score_dim, mask=live[:, None], other=0.0)
            scores = tl.dot(q_score, tl.trans(score_tile), scores, input_precision="ieee")
        visible = live[None, :]
        if SHAPE.BLOCK_Q > 1:  # else [low, high) and limit are what the one token sees
            if source.ratio is not None:
                visible &= (index[None, :] + 1) * source.ratio <= position[:, None] + 1
            else:
                key = (index + source.offset)[None, :]
                visible &= key <= position[:, None]
                if window is not None:
                    visible &= key > position[:, None] - window
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet: subtracting its -inf would give NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
        acc = tl.dot(weights.to(tile.dtype), tile, acc * decay[:, None], input_precision="ieee")
        # index and live of the next tile, for its page.
        x = start + BLOCK_N + offs_n
        if LISTED:
            # By an operation: Triton pipelines no loop that hands an argument on as it is.
            index = tl.where(next_index < limit, next_index, -1)
            live = index >= 0
            next_index = _load_indices(source, x + BLOCK_N, high)
        else:
            index = x
            live = x < high
        page = _load_page(source, start + BLOCK_N, high, index, live, window, ROWS, BLOCK_N)
    return acc, row_max, row_sum


@triton.jit
def _listed(lens, width, token, tokens_per_len):
    """Number of elements of a token's list that count."""
    count = tl.full([], width, tl.int32)
    if lens is not None:
        count = tl.minimum(tl.maximum(tl.load(lens + token // tokens_per_len), 0), width)
    return count


@triton.jit
def _store(rows, values, live, position, cos_sin, SHAPE: tl.constexpr):
    """Store rows; with ``cos_sin``, trailing pairs (2i, 2i + 1) rotated back by their positions."""
    VALUE_DIM: tl.constexpr = SHAPE.VALUE_DIM
    ROPE_DIM: tl.constexpr = SHAPE.ROPE_DIM
    BLOCK_M: tl.constexpr = SHAPE.BLOCK_M
    dtype: tl.constexpr = rows.dtype.element_ty
    dim = tl.arange(0, VALUE_DIM)
    mask = live[:, None]
    if cos_sin is not None:
        # Take the last group of channels out of the tile: the others are 0 in a sum over groups.
        GROUPS: tl.constexpr = VALUE_DIM // ROPE_DIM
        is_rope = (tl.arange(0, GROUPS) == GROUPS - 1)[None, :, None]
        groups = tl.reshape(values, [BLOCK_M, GROUPS, ROPE_DIM])
        rope = tl.sum(tl.where(is_rope, groups, 0.0), 1)
        even, odd = tl.split(tl.reshape(rope, [BLOCK_M, ROPE_DIM // 2, 2]))
        angle = cos_sin.data + position.to(tl.int64)[:, None] * cos_sin.stride_row
        angle += tl.arange(0, ROPE_DIM // 2)[None, :]
        known = (live & (position >= 0))[:, None]  # negative in a padding sequence
        cos = tl.load(angle, mask=known, other=1.0)
        sin = tl.load(angle + ROPE_DIM // 2, mask=known, other=0.0)
        turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
        turned = tl.reshape(turned, [BLOCK_M, ROPE_DIM]).to(dtype)
        channel = VALUE_DIM - ROPE_DIM + tl.arange(0, ROPE_DIM)
        tl.store(rows[:, None] + channel[None, :], turned, mask=mask)
        mask = mask & (dim < VALUE_DIM - ROPE_DIM)[None, :]
    tl.store(rows[:, None] + dim[None, :], values.to(dtype), mask=mask)


# Triton compiles anew for an integer that becomes 1 or a multiple of 16. Sizes that change from
# step to step must not do that.
@triton.jit(do_not_specialize=[
    "num_seqs", "num_decodes", "decode_tokens", "num_tiles", "target_splits", "page_room",
    "entry_room", "most_entries", "ratio", "tokens_per_len", "list_width", "topk_width",
])  # fmt: skip
def latent_kernel(
    q, pages, kv, entries, table, entry_table, topk_indices, window_lens, topk_lens, seq_lens,
    cu_seqlens_q, sinks, cos_sin, out, lse, partial_out, first_lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, target_splits, page_room, entry_room,
    most_entries, ratio, tokens_per_len, list_width, topk_width, window, scale,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Attend for one query tile (prefill), or for one KV split of one (decode).

    Args, those with strides as `strided` tuples; the others are as in ``compressed_attention``:
        pages, entries: window_pages and compressed_pages; bytes if quantized. entries None: all
            rows are raw.
        table, entry_table: window_table and compressed_table.
        window_lens, topk_lens: elements of a list that count, each for tokens_per_len tokens.
        list_width, topk_width: elements of a list. Not those of the tuples: where ptxas knows that
            only the first of several rows is read, it widens e4m3 wrongly (tests of flash_mla).
        partial_out: fp32 results of KV splits, their lse from element first_lse on; None: no split.
        num_decodes, decode_tokens: sequences < num_decodes with at most decode_tokens new tokens
            belong to the decode launch, all others to prefill.
        num_tiles: bound of all query tiles (prefill). target_splits: as in `split_kv` (decode).
        page_room, entry_room: rows, and entries, that the pages of a sequence hold.
        most_entries: bound of the entries that a query sees.
        ratio, window: raw tokens of an entry; raw rows that a query sees, None: all before it.
        scale: factor of q . k, to log2 units.
    """
    BLOCK_Q: tl.constexpr = SHAPE.BLOCK_Q
    BLOCK_M: tl.constexpr = SHAPE.BLOCK_M
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    VALUE_DIM: tl.constexpr = SHAPE.VALUE_DIM
    head_tile = tl.program_id(0) % SHAPE.HEAD_TILES
    item = tl.program_id(0) // SHAPE.HEAD_TILES
    split, num_splits, part = 0, 1, 0
    if SHAPE.DECODE:
        batch = split_kv.DecodeBatch(
            seq_lens, cu_seqlens_q, num_decodes, decode_tokens, target_splits, window, ratio,
            most_entries,
        )  # fmt: skip
        seq, tile, split, num_splits, part = split_kv.find_split(
            item, batch, partial_out is not None, SHAPE.NEW_KV, BLOCK_Q
        )
        if seq >= num_decodes:
            return
        q_first = tile * BLOCK_Q
    else:
        # Later tiles of a sequence see more keys: they start first.
        item = num_tiles - 1 - item
        seq, q_first = query_tiles.find_query_tile(cu_seqlens_q, item, num_seqs, BLOCK_Q)
    if SHAPE.SLOTS:
        seq_start, q_len, context = seq, 1, 0
    else:
        seq_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - seq_start
        context = tl.load(seq_lens + seq) - q_len  # negative in a padding sequence
        if q_first >= q_len:
            return
        if SHAPE.DECODE:
            if q_len > decode_tokens:
                return
        elif (seq < num_decodes) & (q_len <= decode_tokens):
            return

    first_token = seq_start + q_first
    first_head = tl.zeros([], tl.int32)
    token, head, live = query_tiles.rows_of_tile(
        head_tile, q_len - q_first, SHAPE.NUM_HEADS, BLOCK_Q, SHAPE.HEADS, BLOCK_M
    )
    q_rows = query_tiles.row_pointers(q, first_token, first_head, token, head)[:, None]
    dim = tl.arange(0, VALUE_DIM)[None, :]
    queries = (tl.load(q_rows + dim, mask=live[:, None], other=0.0), None)
    if SHAPE.SCORE_DIM > 0:
        score_dim = VALUE_DIM + tl.arange(0, SHAPE.SCORE_DIM)[None, :]
        # Built again: Triton 3.7 takes no variable that is None into a tuple.
        queries = (queries[0], tl.load(q_rows + score_dim, mask=live[:, None], other=0.0))
    position = context + q_first + token
    last_position = context + tl.minimum(q_first + BLOCK_Q, q_len) - 1
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    state = (tl.zeros([BLOCK_M, VALUE_DIM], tl.float32), row_max, row_sum)

    # Rows and entries of the pages that the query tile sees, then the share of this split: tiles of
    # raw rows come before tiles of entries.
    table_row = table.data + seq.to(tl.int64) * table.stride_seq
    low = tl.zeros([], tl.int32)
    entry_low = tl.zeros([], tl.int32)
    if SHAPE.SLOTS:
        high = _listed(window_lens, list_width, first_token, tokens_per_len)
        raw = KeySource(pages, None, 1, table_row, 0, None)
    else:
        high = last_position + 1
        if window is not None:
            # The ring keeps only the newest page_room rows.
            oldest = (context if SHAPE.NEW_KV else context + q_len) - page_room
            low = tl.maximum(tl.maximum(context + q_first - window + 1, oldest), 0)
        if SHAPE.NEW_KV:
            high = tl.minimum(high, context)
        high = tl.maximum(high, low)
        raw = KeySource(pages, table_row, table.width, None, 0, None)
    entry_high, num_entries = tl.zeros([], tl.int32), entry_room
    if entries is not None:
        if not SHAPE.SLOTS:
            num_entries = tl.minimum(tl.maximum(last_position + 1, 0) // ratio, entry_room)
        entry_high = num_entries
        if topk_indices is not None:
            entry_high = _listed(topk_lens, topk_width, first_token, tokens_per_len)
    if num_splits > 1:
        # As `split_kv.split_range`, over the tiles of both sources one after another.
        raw_tiles = tl.cdiv(high, BLOCK_N) - low // BLOCK_N
        tiles = (raw_tiles + tl.cdiv(entry_high, BLOCK_N)).to(tl.int64)
        begin = (tiles * split // num_splits).to(tl.int32)
        end = (tiles * (split + 1) // num_splits).to(tl.int32)
        entry_low = tl.maximum(begin - raw_tiles, 0) * BLOCK_N
        entry_high = tl.minimum(entry_high, tl.maximum(end - raw_tiles, 0) * BLOCK_N)
        first = low // BLOCK_N
        low = tl.maximum(low, (first + begin) * BLOCK_N)
        high = tl.minimum(high, (first + end) * BLOCK_N)
    state = _attend(
        state, queries, position, raw, low, high, NO_LIMIT, window, scale,
        SHAPE.PAGE_ROWS, SHAPE,
    )  # fmt: skip
    if entries is not None:
        indices, entry_table_row, limit = None, None, NO_LIMIT
        if topk_indices is not None:
            indices = topk_indices.data + first_token.to(tl.int64) * topk_indices.stride_seq
        if not SHAPE.SLOTS:
            entry_table_row = entry_table.data + seq.to(tl.int64) * entry_table.stride_seq
            limit = num_entries
        compressed = KeySource(entries, entry_table_row, entry_table.width, indices, 0, ratio)
        state = _attend(
            state, queries, position, compressed, entry_low, entry_high, limit, window,
            scale, SHAPE.ENTRY_ROWS, SHAPE,
        )  # fmt: skip
    if kv is not None:
        new = KeySource(
            PagedMatrix(kv.data + seq_start.to(tl.int64) * kv.stride_row, 0, kv.stride_row),
            None, 1, None, context, None,
        )  # fmt: skip
        # In a padding sequence (seq_len < q_len) the first new keys do not exist.
        low = tl.maximum(-context, 0)
        if window is not None:
            low = tl.maximum(low, q_first - window + 1)
        high = tl.where(split == num_splits - 1, last_position + 1 - context, low)
        state = _attend(state, queries, position, new, low, high, NO_LIMIT, window, scale, 1, SHAPE)

    acc, row_max, row_sum = state
    if num_splits == 1:
        sink = float("-inf")
        if sinks is not None:
            sink = tl.load(sinks + head, mask=live, other=float("-inf")) * LOG2E
        factor = query_tiles.fold_sink(row_max, row_sum, sink)
        row_lse = query_tiles.natural_lse(row_max, row_sum)
        if SHAPE.SLOTS:  # FlashMLA's convention
            row_lse = tl.where(row_sum > 0.0, row_lse, float("inf"))
        query_tiles.store_lse(lse, row_lse, first_token, first_head, token, head, live)
        out_rows = query_tiles.row_pointers(out, first_token, first_head, token, head)
        _store(out_rows, acc * factor[:, None], live, position, cos_sin, SHAPE)
    # Not `else`: num_splits is no compile-time constant, and partial_out may be None.
    elif partial_out is not None:
        row = (part.to(tl.int64) * BLOCK_Q + token) * SHAPE.NUM_HEADS + head
        rows, factor = query_tiles.partial_rows(
            partial_out, first_lse, row, row_max, row_sum, live, VALUE_DIM
        )
        # The merge rotates the sum back.
        _store(rows, acc * factor[:, None], live, position, None, SHAPE)
