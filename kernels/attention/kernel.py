"""Paged attention, full and sliding-window, prefill and split-KV decode: one kernel.

    out_i = sum_j softmax_j(cap(softmax_scale * q_i . k_j)) v_j
            over the keys j <= p_i (and p_i - j < sliding_window)

A sink, one logit per head, joins the denominator only; lse leaves it out.

A program walks the keys of one query tile: first those in pages, then the step's new rows, in one
online softmax (exp2 domain, fp32 sums). Rows of the query tile are tokens x heads of one KV head
(row = token * HEADS + head). Of each source, the K/V tiles that every row sees whole run first,
without masks; then both edges:

    K/V tiles of a source    [ first edge | interior ... interior | last edge ]
                               masks        no masks                masks

Source: FlashAttention-2 (arXiv 2307.08691); PagedAttention (arXiv 2309.06180); FlashDecoding.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import query_tiles, split_kv
from ..common.bits import widen
from ..common.query_tiles import LOG2E, RECOMPUTE_INVARIANTS
from ..common.strided import Pages

# e4m3 K and V are multiplied in fp16 (with fp32 queries in fp32): it holds e4m3 exactly, sm_89+
# converts e4m3 to it in one instruction, and softmax weights keep 11 bits, not the 8 of bf16.
# In fp16, weights (times v_scale, if rows have one) are scaled to at most 2^HEADROOM, a factor 4
# below the largest fp16 number. So those above 2^-28 of the largest are normal, with all 11 bits.
HEADROOM = tl.constexpr(14)
# A smaller v_scale counts as this in maxima: weights alone stay finite, at most 2^(90 + 14).
LEAST_SCALE = tl.constexpr(2.0**-90)


class TileShape(NamedTuple):
    """Compile-time constants of a launch, one ``tl.constexpr`` argument."""

    HEAD_DIM: Any  # channels of a row
    VALUE_DIM: Any  # channels of an accumulator: HEAD_DIM, or half of it where one would spill
    GROUP: Any  # query heads of one KV head
    BLOCK_Q: Any  # tokens of a query tile
    HEADS: Any  # heads of a query tile
    HEAD_TILES: Any  # query tiles that cover the heads of one KV head
    BLOCK_SIZE: Any  # rows of a page
    BLOCK_M: Any  # rows of a query tile, at least BLOCK_Q * HEADS
    BLOCK_N: Any  # keys of a K/V tile
    SCALES: Any  # "none" (pages are not e4m3), "number", "tensor" (of one number) or "rows"
    WIDENS_E4M3: Any  # whether the GPU has an instruction from e4m3 to fp16
    NEW_KV: Any  # whether pages hold only the keys before the step (k_new, or context_only)
    DECODE: Any  # whether a program has a KV split of a decode sequence, not a prefill tile


class Scoring(NamedTuple):
    """Parameters of the scores: visible keys, scale and softcap."""

    sliding_window: Any  # keys that a query sees, its own included; None: all before it
    inner_scale: Any  # of q . k: softmax_scale * log2(e), or softmax_scale / softcap
    outer_scale: Any  # softcap * log2(e), or None


class KeySource(NamedTuple):
    """K and V rows of one KV head: in pages, or one after another (table None)."""

    k: Any  # ``Pages`` that start at the head
    v: Any
    k_scale: Any  # ``Pages`` of fp32 row scales, or None
    v_scale: Any
    table: Any  # block table of the sequence; with a window, block b is at entry b % width
    width: Any  # its entries; past its end a linear table repeats the last
    offset: Any  # position of row 0 in the sequence


@triton.jit
def _load_page(source, tile, exists, WINDOW: tl.constexpr, SHAPE: tl.constexpr):
    """Page id of a tile, or [BLOCK_N] ids of its rows' pages if BLOCK_SIZE is no multiple of
    BLOCK_N; 0 for a tile that does not exist, or without a table. Stale ids are of masked rows."""
    if source.table is None:
        page = 0
    else:
        block = tile * SHAPE.BLOCK_N
        if SHAPE.BLOCK_SIZE % SHAPE.BLOCK_N != 0:
            block += tl.arange(0, SHAPE.BLOCK_N)
        block //= SHAPE.BLOCK_SIZE
        block = block % source.width if WINDOW else tl.minimum(block, source.width - 1)
        # Not ``exists`` itself: in Triton 3.9's interpreter a scalar is no mask of a vector.
        mask = block < tl.where(exists, source.width, 0)
        page = tl.load(source.table + block, mask=mask, other=0)
    return page


@triton.jit
def _starts(pages, page, tile, PAGED: tl.constexpr, SHAPE: tl.constexpr):
    """Pointers [BLOCK_N] to the rows of a tile: 64 bits to a page, 32 bits within it."""
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    offs_n = tl.arange(0, BLOCK_N)
    if not PAGED:
        rows = pages.data + (tile * BLOCK_N).to(tl.int64) * pages.stride_row
    elif BLOCK_SIZE % BLOCK_N == 0:
        first = tile * BLOCK_N % BLOCK_SIZE
        rows = pages.data + (page.to(tl.int64) * pages.stride_page + first * pages.stride_row)
    else:
        rows = pages.data + page.to(tl.int64) * pages.stride_page
        offs_n = (tile * BLOCK_N + offs_n) % BLOCK_SIZE
    return rows + offs_n * pages.stride_row


@triton.jit
def _load(cells, mask):
    """Cells of a tile, 0 where masked: a NaN there, times a weight of 0, would reach the output."""
    return tl.load(cells) if mask is None else tl.load(cells, mask=mask, other=0.0)


@triton.jit
def _softmax_step(
    row_max, row_sum, scores, k_scale, v_scale, visible, scale, outer_scale,
    FP16_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Scale, cap and mask scores, and add them to the online softmax.

    scale: scalar, or [BLOCK_M, 1] for queries raised to fp16 by row. FP16_WEIGHTS: weights times
    v_scale become fp16. Returns them, decay, row_max (in fp16 not quite the maximum), row_sum.
    """
    if k_scale is not None:
        scores = scores * k_scale[None, :]
    if outer_scale is None:
        scores = scores * scale
    else:
        scores = query_tiles.softcapped(scores, scale, outer_scale)
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    highest = scores
    if FP16_WEIGHTS and v_scale is not None:
        highest = scores + tl.log2(tl.maximum(v_scale, LEAST_SCALE))[None, :]
    new_max = tl.maximum(row_max, tl.max(highest, 1) - (HEADROOM if FP16_WEIGHTS else 0.0))
    base = new_max
    if visible is not None:
        # A row that has seen nothing yet: subtracting its -inf would give NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    if v_scale is not None:
        weights = weights * v_scale[None, :]
    return weights, decay, new_max, row_sum


@triton.jit
def _skip_gap(tile, gap_at, gap):
    """Index of a tile where the ``gap`` tiles from ``gap_at`` on are left out."""
    return tile + tl.where(tile >= gap_at, gap, 0)


@triton.jit
def _attend_tiles(
    state, q, position, source, low, high, first, count, gap_at, gap, scale, scoring,
    SHAPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Walk ``count`` tiles of a source from tile ``first`` on, and skip the ``gap`` tiles at
    ``gap_at`` (0: none). MASKED: apply [low, high), causality and window."""
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    VALUE_DIM: tl.constexpr = SHAPE.VALUE_DIM
    # Of this source: new rows are never e4m3.
    E4M3: tl.constexpr = source.k.data.dtype.element_ty == tl.uint8
    PAGED: tl.constexpr = source.table is not None
    WINDOW: tl.constexpr = scoring.sliding_window is not None
    acc, acc_2, row_max, row_sum = state
    dim = tl.arange(0, SHAPE.HEAD_DIM)[None, :]
    value_dim = tl.arange(0, VALUE_DIM)[None, :]
    tile = _skip_gap(first, gap_at, gap)
    page = _load_page(source, tile, count > 0, WINDOW, SHAPE)
    # Invariants recomputed in the loop free registers (`query_tiles`); the masked loop is short.
    for i in tl.range(0, count, disable_licm=RECOMPUTE_INVARIANTS or MASKED):
        k_rows = _starts(source.k, page, tile, PAGED, SHAPE)[:, None]
        v_rows = _starts(source.v, page, tile, PAGED, SHAPE)[:, None]
        in_range, row_mask, visible = None, None, None
        if MASKED:
            row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            key = (row + source.offset)[None, :]
            in_range = (row >= low) & (row < high)
            row_mask = in_range[:, None]
            visible = in_range[None, :] & (key <= position[:, None])
            if WINDOW:
                visible &= key > position[:, None] - scoring.sliding_window
        keys = _load(k_rows + dim, row_mask)
        values = _load(v_rows + value_dim, row_mask)
        if VALUE_DIM < SHAPE.HEAD_DIM:
            values_2 = _load(v_rows + VALUE_DIM + value_dim, row_mask)
        k_scale, v_scale = None, None
        if source.k_scale is not None:
            k_cells = _starts(source.k_scale, page, tile, PAGED, SHAPE)
            v_cells = _starts(source.v_scale, page, tile, PAGED, SHAPE)
            k_scale = _load(k_cells, in_range)
            v_scale = _load(v_cells, in_range)
        if E4M3:
            keys = widen(keys, q.dtype, SHAPE.WIDENS_E4M3)
            values = widen(values, q.dtype, SHAPE.WIDENS_E4M3)
            if VALUE_DIM < SHAPE.HEAD_DIM:
                values_2 = widen(values_2, q.dtype, SHAPE.WIDENS_E4M3)
        # "ieee": fp32 is not rounded to TF32.
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        weights, decay, row_max, row_sum = _softmax_step(
            row_max, row_sum, scores, k_scale, v_scale, visible, scale, scoring.outer_scale,
            E4M3 and q.dtype == tl.float16,
        )  # fmt: skip
        weights = weights.to(values.dtype)
        acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")
        if VALUE_DIM < SHAPE.HEAD_DIM:
            acc_2 = tl.dot(weights, values_2, acc_2 * decay[:, None], input_precision="ieee")
        # Loaded one tile ahead: else Triton keeps one K/V tile in flight, whatever num_stages is.
        tile = _skip_gap(first + i + 1, gap_at, gap)
        page = _load_page(source, tile, i + 1 < count, WINDOW, SHAPE)
    return acc, acc_2, row_max, row_sum


@triton.jit
def _attend_source(
    state, q, position, first_position, last_position, source, low, high, scale, scoring,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Attend to the rows [low, high) of a source that queries at positions [first_position,
    last_position] see: first the interior, without masks, then both edges in one masked loop."""
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    # Some query of the tile sees rows [any_low, any_high); every query sees [all_low, all_high).
    any_low, all_low = low, low
    if scoring.sliding_window is not None:
        reach = scoring.sliding_window - 1 + source.offset
        any_low = tl.maximum(low, first_position - reach)
        all_low = tl.maximum(low, last_position - reach)
    any_high = tl.minimum(high, last_position + 1 - source.offset)
    all_high = tl.minimum(high, first_position + 1 - source.offset)
    first = any_low // BLOCK_N
    stop = tl.maximum(tl.cdiv(any_high, BLOCK_N), first)
    all_first = tl.minimum(tl.cdiv(all_low, BLOCK_N), stop)
    all_stop = tl.maximum(all_high // BLOCK_N, all_first)
    interior = all_stop - all_first
    state = _attend_tiles(
        state, q, position, source, any_low, any_high, all_first, interior, all_stop, 0, scale,
        scoring, SHAPE, False,
    )  # fmt: skip
    return _attend_tiles(
        state, q, position, source, any_low, any_high, first, stop - first - interior, all_first,
        interior, scale, scoring, SHAPE, True,
    )  # fmt: skip


@triton.jit
def _pages_of_head(pages, head):
    """Move the start of ``pages`` to a KV head; the stride of heads is no longer needed."""
    return Pages(pages.data + head * pages.stride_head, pages.stride_page, pages.stride_row, 0)


@triton.jit
def _rows_of_head(rows, first, head):
    """``strided.Rows`` of a KV head from row ``first`` on, as one page."""
    data = rows.data + first.to(tl.int64) * rows.stride_token + head * rows.stride_head
    return Pages(data, 0, rows.stride_token, 0)


@triton.jit
def _store(rows, acc, acc_2, factor, live, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Store accumulators times ``factor`` [BLOCK_M] at row pointers."""
    cells = rows[:, None] + tl.arange(0, VALUE_DIM)[None, :]
    dtype: tl.constexpr = rows.dtype.element_ty
    tl.store(cells, (acc * factor[:, None]).to(dtype), mask=live[:, None])
    if VALUE_DIM < HEAD_DIM:
        tl.store(cells + VALUE_DIM, (acc_2 * factor[:, None]).to(dtype), mask=live[:, None])


# Triton compiles anew for an integer that becomes 1 or a multiple of 16. Sizes that change from
# step to step must not do that.
@triton.jit(
    do_not_specialize=["num_seqs", "num_decodes", "decode_tokens", "num_tiles", "target_splits"]
)
def attention_kernel(
    q, k_pages, v_pages, k_new, v_new, k_scale, v_scale, block_table, seq_lens, cu_seqlens_q, sinks,
    out, lse, partial_out, first_lse, num_seqs, num_decodes, decode_tokens, num_tiles,
    target_splits, num_kv_heads, scoring, SHAPE: tl.constexpr,
):  # fmt: skip
    """Attend for one query tile (prefill), or for one KV split of a decode sequence.

    Args as in ``paged_attention``, those with strides as `strided` tuples, and:
        k_pages, v_pages: bytes if e4m3. k_scale, v_scale: of the kind SHAPE.SCALES.
        k_new, v_new: rows of the step; None: attend to no keys but those in pages.
        partial_out: fp32 results of KV splits, without sinks, then from first_lse on lse; or None.
        num_decodes, decode_tokens: sequences < num_decodes with at most decode_tokens new tokens
            belong to the decode launch, all others to prefill.
        num_tiles: bound of all query tiles (prefill). target_splits: as in `split_kv` (decode).
    """
    BLOCK_Q: tl.constexpr = SHAPE.BLOCK_Q
    BLOCK_M: tl.constexpr = SHAPE.BLOCK_M
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    VALUE_DIM: tl.constexpr = SHAPE.VALUE_DIM
    window = scoring.sliding_window
    head_item = tl.program_id(0) % (num_kv_heads * SHAPE.HEAD_TILES)
    item = tl.program_id(0) // (num_kv_heads * SHAPE.HEAD_TILES)
    kv_head = (head_item // SHAPE.HEAD_TILES).to(tl.int64)
    head_tile = head_item % SHAPE.HEAD_TILES
    # KV split of the query tile, and its number among those that leave partial results.
    split, num_splits, part = 0, 1, 0
    if SHAPE.DECODE:
        batch = split_kv.DecodeBatch(
            seq_lens, cu_seqlens_q, num_decodes, decode_tokens, target_splits, window,
            ratio=None, most_entries=0,  # no compressed entries: latent attention has them
        )  # fmt: skip
        seq, query_tile, split, num_splits, part = split_kv.find_split(
            item, batch, partial_out is not None, SHAPE.NEW_KV, BLOCK_Q
        )
        if seq >= num_decodes:
            return
        q_first = query_tile * BLOCK_Q
    else:
        # Later tiles of a sequence see more keys: they start first.
        item = num_tiles - 1 - item
        seq, q_first = query_tiles.find_query_tile(cu_seqlens_q, item, num_seqs, BLOCK_Q)
    seq_start = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - seq_start
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - q_len  # negative in a padding sequence, of length 0
    is_decode = (seq < num_decodes) & (q_len <= decode_tokens)
    # There is no such query tile, or the other launch has it.
    if (q_first >= q_len) | (is_decode != SHAPE.DECODE):
        return

    first_token = seq_start + q_first
    first_head = kv_head * SHAPE.GROUP
    token, head, live = query_tiles.rows_of_tile(
        head_tile, q_len - q_first, SHAPE.GROUP, BLOCK_Q, SHAPE.HEADS, BLOCK_M
    )
    q_rows = query_tiles.row_pointers(q, first_token, first_head, token, head)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    queries = tl.load(q_rows[:, None] + dim, mask=live[:, None], other=0.0)
    first_position = context + q_first
    position = first_position + token
    last_position = context + tl.minimum(q_first + BLOCK_Q, q_len) - 1
    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # The second accumulator is of the second half of the channels, if VALUE_DIM is a half.
    state = (acc, acc, row_max, tl.zeros([BLOCK_M], tl.float32))

    low, high = split_kv.paged_range(seq_len, q_len, window, SHAPE.NEW_KV)
    if SHAPE.DECODE:
        low, high = split_kv.split_range(low, high, split, num_splits, SHAPE.BLOCK_N)
    row_k_scale, row_v_scale = None, None
    if SHAPE.SCALES == "rows":
        row_k_scale = _pages_of_head(k_scale, kv_head)
        row_v_scale = _pages_of_head(v_scale, kv_head)
    table = block_table.data + seq.to(tl.int64) * block_table.stride_seq
    pages = KeySource(
        _pages_of_head(k_pages, kv_head), _pages_of_head(v_pages, kv_head), row_k_scale,
        row_v_scale, table, block_table.width, 0,
    )  # fmt: skip
    scale = scoring.inner_scale
    if SHAPE.SCALES == "number":
        scale, value_scale = scale * k_scale, v_scale
    elif SHAPE.SCALES == "tensor":
        scale, value_scale = scale * tl.load(k_scale), tl.load(v_scale)
    paged_queries = queries
    if SHAPE.SCALES != "none" and queries.dtype == tl.bfloat16:
        paged_queries, row_scale = query_tiles.to_fp16(queries)
        scale = (row_scale * scale)[:, None]
    acc, acc_2, row_max, row_sum = _attend_source(
        state, paged_queries, position, first_position, last_position, pages, low, high, scale,
        scoring, SHAPE,
    )  # fmt: skip
    if SHAPE.SCALES == "number" or SHAPE.SCALES == "tensor":
        acc *= value_scale
        acc_2 *= value_scale
    if k_new is not None:
        new = KeySource(
            _rows_of_head(k_new, seq_start, kv_head), _rows_of_head(v_new, seq_start, kv_head),
            k_scale=None, v_scale=None, table=None, width=1, offset=context,
        )  # fmt: skip
        # The last split takes the new rows. In a padding sequence -context is q_len: it has none.
        low = tl.maximum(-context, 0)
        high = tl.where(split == num_splits - 1, q_len, low)
        acc, acc_2, row_max, row_sum = _attend_source(
            (acc, acc_2, row_max, row_sum), queries, position, first_position, last_position, new,
            low, high, scoring.inner_scale, scoring, SHAPE,
        )  # fmt: skip

    if num_splits == 1:
        sink = float("-inf")
        if sinks is not None:
            sink = tl.load(sinks + first_head + head, mask=live, other=float("-inf")) * LOG2E
        factor = query_tiles.fold_sink(row_max, row_sum, sink)
        row_lse = query_tiles.natural_lse(row_max, row_sum)
        query_tiles.store_lse(lse, row_lse, first_token, first_head, token, head, live)
        out_rows = query_tiles.row_pointers(out, first_token, first_head, token, head)
        _store(out_rows, acc, acc_2, factor, live, HEAD_DIM, VALUE_DIM)
    # Not `else`: decode knows num_splits on the device only, and partial_out may be None.
    elif partial_out is not None:
        row = (part.to(tl.int64) * BLOCK_Q + token) * (num_kv_heads * SHAPE.GROUP)
        rows, factor = query_tiles.partial_rows(  # stores lse, too
            partial_out, first_lse, row + first_head + head, row_max, row_sum, live, HEAD_DIM
        )
        _store(rows, acc, acc_2, factor, live, HEAD_DIM, VALUE_DIM)
