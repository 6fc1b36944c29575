"""What one query tile of paged attention does: walk the tiles of its keys, in pages and new K/V."""

import triton
import triton.language as tl

from ..common.query_tiles import LOG2E, fold_sink, load_page, natural_lse, place_in_pages
from .arguments import Span, Walk
from .quantized_tile import halve, halve_pairs, load_scales, to_half, widen
from .weights import weigh


@triton.jit
def _attend_tiles(
    acc, row_max, row_sum, q, source, span, walk, inner_scale, outer_scale,
    CONFIG: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the tiles of a ``Walk`` through a source.

    Without MASKED every row sees them whole, and the source's tensor descriptors copy them if it
    has any.
    """
    QUANTIZED: tl.constexpr = source.k.dtype.element_ty == tl.uint8
    PAIRS: tl.constexpr = source.v.dtype.element_ty == tl.uint16
    HALF: tl.constexpr = CONFIG.HALF and QUANTIZED
    HEAD_DIM: tl.constexpr = CONFIG.HEAD_DIM
    VALUE_DIM: tl.constexpr = CONFIG.VALUE_DIM
    BLOCK_SIZE: tl.constexpr = CONFIG.BLOCK_SIZE
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    DIVIDE: tl.constexpr = CONFIG.DIVIDE
    WRAP: tl.constexpr = CONFIG.WRAP
    HARDWARE_E4M3: tl.constexpr = CONFIG.HARDWARE_E4M3
    PTX: tl.constexpr = CONFIG.PTX
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    if PAIRS:
        offs_v = tl.arange(0, VALUE_DIM // 2)
        acc, acc_odd = tl.split(tl.reshape(acc, [acc.shape[0], VALUE_DIM // 2, 2]))
    else:
        offs_v = tl.arange(0, VALUE_DIM)
        acc_odd = 0
    # 32 bits within a page or a tile of new rows, where they reach (checks.check_pages); 64 bits
    # from there on.
    k_offsets = (offs_n * source.k_stride_row)[:, None] + offs_d[None, :]
    if CONFIG.EQUAL_STRIDES and VALUE_DIM == HEAD_DIM and not PAIRS:
        v_offsets = k_offsets  # one set of registers
    else:
        v_offsets = (offs_n * source.v_stride_row)[:, None] + offs_v[None, :]
    if source.table is not None:
        tile = walk.first + tl.where(walk.head_count > 0, 0, walk.gap)
        page = load_page(
            source.table, source.width, tile, walk.count > 0, WRAP, BLOCK_SIZE, BLOCK_N
        )
    # Left to LICM, addresses of every later loop would be kept in registers through this one. Where
    # half of the values leave room for them, so may the queries be copied into shared memory once:
    # Triton 3.9 keeps them in registers else, and spills.
    for i in tl.range(
        0, walk.count, disable_licm=not HALF and (not DIVIDE or VALUE_DIM == HEAD_DIM)
    ):
        tile = walk.first + i + tl.where(i < walk.head_count, 0, walk.gap)
        key = tile * BLOCK_N + offs_n
        if source.table is None:
            first_row = (tile * BLOCK_N).to(tl.int64)
            k_ptrs = source.k + first_row * source.k_stride_row + k_offsets
            v_ptrs = source.v + first_row * source.v_stride_row + v_offsets
        elif BLOCK_SIZE % BLOCK_N == 0:
            page_id = page.to(tl.int64)
            first_row = tile * BLOCK_N % BLOCK_SIZE
            k_ptrs = (
                source.k
                + (page_id * source.k_stride_page + first_row * source.k_stride_row)
                + k_offsets
            )
            v_ptrs = (
                source.v
                + (page_id * source.v_stride_page + first_row * source.v_stride_row)
                + v_offsets
            )
        else:
            page_ids = page.to(tl.int64)
            _, row = place_in_pages(tile * BLOCK_N, BLOCK_SIZE, BLOCK_N)
            k_rows = source.k + (page_ids * source.k_stride_page + row * source.k_stride_row)
            v_rows = source.v + (page_ids * source.v_stride_page + row * source.v_stride_row)
            k_ptrs = k_rows[:, None] + offs_d[None, :]
            v_ptrs = v_rows[:, None] + offs_v[None, :]
        if source.tiles is not None and not MASKED:
            first_row = source.tiles.first_token + tile * BLOCK_N
            keys = source.tiles.k.load([first_row, source.tiles.k_column])
            values = source.tiles.v.load([first_row, source.tiles.v_column])
            visible = None
        elif MASKED:
            # Rows outside may be NaN: 0 * NaN would reach the output through V.
            live = ((key >= span.low) & (key < span.high))[:, None]
            keys = tl.load(k_ptrs, mask=live, other=0.0)
            values = tl.load(v_ptrs, mask=live, other=0.0)
            visible = key[None, :] <= span.row_high[:, None]
            if span.row_low is not None:
                visible &= key[None, :] >= span.row_low[:, None]
        else:
            keys = tl.load(k_ptrs)
            values = tl.load(v_ptrs)
            visible = None
        key_scales = None
        value_scales = None
        if source.scales is not None:
            scaled_live = None
            if MASKED:
                scaled_live = (key >= span.low) & (key < span.high)
            key_scales, value_scales = load_scales(
                source.scales, page, tile, scaled_live, BLOCK_SIZE, BLOCK_N
            )
        if HALF:
            keys = halve(keys, HARDWARE_E4M3, PTX)
            if PAIRS:
                values, odd = halve_pairs(values, HARDWARE_E4M3, PTX)
            else:
                values = halve(values, HARDWARE_E4M3, PTX)
        elif QUANTIZED:
            keys = widen(keys, q.dtype, HARDWARE_E4M3, PTX)
            values = widen(values, q.dtype, HARDWARE_E4M3, PTX)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        weights = tl.zeros_like(scores).to(values.dtype)
        decay = tl.zeros_like(row_max)
        # With DIVIDE behind a condition that always holds but must not be known to: see
        # `common.tiles.update`.
        if i < walk.count if DIVIDE else True:
            new_weights, decay, row_max, row_sum = weigh(
                row_max, row_sum, scores, key_scales, value_scales, visible, inner_scale, outer_scale,
                HALF, QUANTIZED and values.dtype == tl.float16,
            )  # fmt: skip
            weights = new_weights.to(values.dtype)
        acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")
        if PAIRS:
            acc_odd = tl.dot(weights, odd, acc_odd * decay[:, None], input_precision="ieee")
        if source.table is not None:
            tile = walk.first + i + 1 + tl.where(i + 1 < walk.head_count, 0, walk.gap)
            more = i + 1 < walk.count
            page = load_page(source.table, source.width, tile, more, WRAP, BLOCK_SIZE, BLOCK_N)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [acc.shape[0], VALUE_DIM])
    return acc, row_max, row_sum


@triton.jit
def _attend_source(
    acc, row_max, row_sum, q, source, span, inner_scale, outer_scale, CONFIG: tl.constexpr
):
    """Attend to a span of one source: the tiles that all rows see whole, then those at the
    edges."""
    first = span.low // CONFIG.BLOCK_N
    stop = tl.maximum((span.high + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N, first)
    if CONFIG.MASK_ALL:
        open_first = stop
        open_stop = stop
    else:
        open_first = (span.open_low + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N
        open_first = tl.minimum(tl.maximum(open_first, first), stop)
        open_stop = tl.minimum(tl.maximum(span.open_high // CONFIG.BLOCK_N, open_first), stop)
        num_open = open_stop - open_first
        walk = Walk(open_first, num_open, num_open, 0)
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, q, source, span, walk, inner_scale, outer_scale, CONFIG, False
        )
    head_count = open_first - first
    edges = Walk(first, head_count + stop - open_stop, head_count, open_stop - open_first)
    return _attend_tiles(
        acc, row_max, row_sum, q, source, span, edges, inner_scale, outer_scale, CONFIG, True
    )


@triton.jit
def attend_query_tile(tile, pages, new, k_scale, v_scale, split, softmax, CONFIG: tl.constexpr):
    """Attend for one query tile to a split of the paged keys and, in the last, to the new K/V rows.

    Args:
        tile: ``QueryTile``.
        pages, new: ``Source`` of each; new.k None: all keys are in pages.
        k_scale, v_scale: of quantized pages, what CONFIG.SCALES says: "number": numbers; "tensor":
            pointers to a number. With "rows" those of ``pages`` serve.
        split: ``KeySplit``.
        softmax: ``Softmax``.
        CONFIG: ``TileConfig``.

    Returns:
        (acc [BLOCK_M, VALUE_DIM] unnormalised, row_max [BLOCK_M] in log2 units, row_sum [BLOCK_M]).
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    VALUE_DIM: tl.constexpr = CONFIG.VALUE_DIM
    q_first, q_last, token, context = tile.first, tile.last, tile.token, tile.context
    sliding_window = softmax.sliding_window
    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    paged_high = context + q_last + 1
    paged_open_high = context + q_first + 1
    row_high = context + token
    if CONFIG.PAGED_CONTEXT:
        paged_high = context
        paged_open_high = context
        row_high = context - 1 + token * 0
    paged_low = split.low
    paged_open_low = split.low
    row_low = None
    if sliding_window is not None:
        row_low = context + token - sliding_window + 1
        paged_low = tl.maximum(context + q_first - sliding_window + 1, split.low)
        paged_open_low = tl.maximum(context + q_last - sliding_window + 1, split.low)
    paged_high = tl.maximum(tl.minimum(paged_high, split.high), 0)
    paged_scale = softmax.inner_scale
    if CONFIG.SCALES == "tensor":
        paged_scale = softmax.inner_scale * tl.load(k_scale)
    elif CONFIG.SCALES == "number":
        paged_scale = softmax.inner_scale * k_scale
    paged_q = tile.q
    if CONFIG.HALF:
        paged_q, factor = to_half(tile.q, CONFIG.HARDWARE_E4M3)
        paged_scale = paged_scale * factor
    paged_open_high = tl.minimum(paged_open_high, paged_high)
    span = Span(paged_low, paged_high, paged_open_low, paged_open_high, row_low, row_high)
    acc, row_max, row_sum = _attend_source(
        acc, row_max, row_sum, paged_q, pages, span, paged_scale, softmax.outer_scale, CONFIG
    )
    if CONFIG.SCALES == "tensor":
        acc = acc * tl.load(v_scale)
    elif CONFIG.SCALES == "number":
        acc = acc * v_scale
    if CONFIG.HALF and not CONFIG.HARDWARE_E4M3:
        acc = acc * 256.0

    if new.k is not None:
        # New key r is key context + r; in a padding row (seq_len < q_len) the first of them do not
        # exist.
        new_low = tl.maximum(-context, 0)
        new_open_low = new_low
        new_row_low = new_low + token * 0
        if sliding_window is not None:
            new_low = tl.maximum(q_first - sliding_window + 1, new_low)
            new_open_low = tl.maximum(q_last - sliding_window + 1, new_open_low)
            new_row_low = tl.maximum(token - sliding_window + 1, new_row_low)
        new_high = tl.where(split.is_last, q_last + 1, new_low)
        span = Span(new_low, new_high, new_open_low, q_first + 1, new_row_low, token)
        acc, row_max, row_sum = _attend_source(
            acc, row_max, row_sum, tile.q, new, span,
            softmax.inner_scale, softmax.outer_scale, CONFIG,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def store_query_tile(acc, row_max, row_sum, out_rows, lse_rows, sinks, live, DIM: tl.constexpr):
    """Normalise, fold the sinks in and store output rows and lse.

    Args:
        acc, row_max, row_sum: as ``attend_query_tile`` returns them.
        out_rows, lse_rows, sinks: [BLOCK_M] pointers of each row; lse_rows and sinks may be None.
        live: [BLOCK_M], whether a row is one.
        DIM: channels of acc.
    """
    if sinks is not None:
        sink = tl.load(sinks, mask=live, other=float("-inf")) * LOG2E
    else:
        sink = float("-inf")
    factor = fold_sink(row_max, row_sum, sink)
    dim = tl.arange(0, DIM)
    rows = (acc * factor[:, None]).to(out_rows.dtype.element_ty)
    tl.store(out_rows[:, None] + dim[None, :], rows, mask=live[:, None])
    if lse_rows is not None:
        tl.store(lse_rows, natural_lse(row_max, row_sum), mask=live)
