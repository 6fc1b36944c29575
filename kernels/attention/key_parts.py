"""The loop over keys of paged attention with queries and keys in parts of their channels.

Where registers hold neither the rows of queries nor those of keys, both are read and multiplied in
parts, the queries again for every tile. Nothing is masked but the scores: keys outside of the span
are its first or last one again, and rows that are not live those of one that is. Values are widened
to what the queries are.
"""

import triton
import triton.language as tl

from ..common.tiles import score_parts, widen_e4m3
from .weights import weigh


@triton.jit
def attend_in_parts(
    acc, row_max, row_sum, q_rows, source, span, inner_scale, outer_scale, CONFIG: tl.constexpr
):
    """Run the online softmax over all tiles of a span of a source.

    Args:
        acc, row_max, row_sum, inner_scale, outer_scale: as of ``weights.weigh``.
        q_rows: [BLOCK_M] pointers to rows of queries, which all may be read.
        source, span: ``Source``, ``Span``.
        CONFIG: ``TileConfig``.
    """
    BLOCK_SIZE: tl.constexpr = CONFIG.BLOCK_SIZE
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    QUANTIZED: tl.constexpr = source.k.dtype.element_ty == tl.uint8
    dtype: tl.constexpr = q_rows.dtype.element_ty
    offs_v = tl.arange(0, CONFIG.VALUE_DIM)
    first = span.low // BLOCK_N
    stop = tl.where(span.low < span.high, tl.cdiv(span.high, BLOCK_N), first)
    for tile in tl.range(first, stop, disable_licm=True):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = key[None, :] <= span.row_high[:, None]
        if span.row_low is not None:
            visible &= key[None, :] >= span.row_low[:, None]
        key = tl.minimum(tl.maximum(key, span.low), span.high - 1)
        if source.table is None:
            k_rows = source.k + key.to(tl.int64) * source.k_stride_row
            v_rows = source.v + key.to(tl.int64) * source.v_stride_row
        else:
            row = key % BLOCK_SIZE
            if BLOCK_SIZE % BLOCK_N == 0:
                block = tile * BLOCK_N // BLOCK_SIZE
            else:
                block = key // BLOCK_SIZE
            if CONFIG.WRAP == "never":
                entry = tl.minimum(block, source.width - 1)
            else:
                entry = block % source.width
            page = tl.load(source.table + entry).to(tl.int64)
            k_rows = source.k + (page * source.k_stride_page + row * source.k_stride_row)
            v_rows = source.v + (page * source.v_stride_page + row * source.v_stride_row)
        key_scales = None
        value_scales = None
        if source.scales is not None:
            cells = source.scales
            key_scales = tl.load(cells.k + (page * cells.k_stride_page + row * cells.k_stride_row))
            value_scales = tl.load(
                cells.v + (page * cells.v_stride_page + row * cells.v_stride_row)
            )
        # 0, of which only that 16 divides it is to be known: see `score_parts`.
        again = q_rows + 16 * tl.minimum(stop - tile, 0)
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = score_parts(
            again, k_rows, scores, CONFIG.HEAD_DIM, CONFIG.KEY_PARTS, False, CONFIG.HARDWARE_E4M3
        )
        weights, decay, row_max, row_sum = weigh(
            row_max, row_sum, scores, key_scales, value_scales, visible, inner_scale, outer_scale,
            False, QUANTIZED and dtype == tl.float16,
        )  # fmt: skip
        values = tl.load(v_rows[:, None] + offs_v[None, :])
        if QUANTIZED:
            values = widen_e4m3(values, dtype, CONFIG.HARDWARE_E4M3)
        acc = tl.dot(weights.to(dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, row_max, row_sum
