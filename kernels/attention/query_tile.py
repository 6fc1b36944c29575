"""What one query tile of paged attention does: walk the tiles of its keys, in the pages and among the fresh rows.

Quantised pages hold e4m3 codes. As fp16 a code is exact, and one instruction widens two of them; it takes three more to make them what
queries in bf16 are. So with HALF (`configs.uses_fp16_values`) the products over pages are fp16's: the queries are scaled to fit, row by row and by
powers of two. That is all that is done to each element: the scale of a key's row multiplies its column of the scores, and that of a
value's row its column of the weights, M x N products a tile in place of N x HEAD_DIM. Both are fp32.

Weights that become fp16 have to fit it together with those scales. So the maximum that they are taken against is that of the scores plus
the logarithms of the scales, near enough: what is rounded to fp16 is relative to the largest product of a weight and a scale, and the sum of
weights is in fp32 and without scales. (It takes a scale 2^112 times all others to push the weights of those out of fp32's range.) One scale
for a whole tensor is a factor of the scores' own scale, and of the sum over the pages before fresh rows are added to it.

Values may come in pairs of codes, as 16-bit numbers: the even channels and the odd ones are then two products with sums of their own. No
load transposes single bytes on their way to the matrix instruction of small tiles (a thread would take them one by one); one does pairs.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.query_tiles import LOG2E, load_page, place_in_pages
from ..common.tiles import halve_e4m3

# Weights of quantised values reach up to 2^HEADROOM: fp16 holds those down to 2^-(14 + HEADROOM) of the largest with all of its digits.
HEADROOM = tl.constexpr(14)
# Scales below 2^-90, whose bits these are, count as that where maxima are taken: weights reach 2^90 times what they are with scales of 1.
LEAST_SCALE = tl.constexpr((127 - 90) << 23)


class Scales(NamedTuple):
    """Pointers to one head's scales of quantised keys and of values, fp32, and how far apart they lie."""

    k: Any
    v: Any
    k_stride_page: Any
    k_stride_row: Any
    v_stride_page: Any
    v_stride_row: Any


class Tiles(NamedTuple):
    """Tensor descriptors of tiles of all fresh keys and values, the sequence's first row there, and the head's first columns."""

    k: Any
    v: Any
    first_token: Any
    k_column: Any
    v_column: Any


class Source(NamedTuple):
    """Where the keys and values of one head lie: in pages, or as fresh rows of one sequence.

    k, v: pointers to the first page or row, and how far apart pages and rows lie. table, width: the sequence's block table, None
    for fresh rows. scales: ``Scales`` of each row, or None. tiles: ``Tiles``, or None. By them whole tiles are copied, the others by pointers:
    a descriptor's masks are the tensor's edges, and a row past the sequence's is another's, which may be NaN.
    """

    k: Any
    v: Any
    k_stride_page: Any
    k_stride_row: Any
    v_stride_page: Any
    v_stride_row: Any
    table: Any
    width: Any
    scales: Any
    tiles: Any


class Span(NamedTuple):
    """Keys [low, high) of a source, of which every row of the query tile sees [open_low, open_high)."""

    low: Any
    high: Any
    open_low: Any
    open_high: Any


@triton.jit
def _softcapped(scores, inner_scale, outer_scale):
    """outer_scale * tanh(inner_scale * scores), to fp32 accuracy everywhere.

    tanh by exp2 is right at both infinities but loses its digits to cancellation near 0, where its series takes over (to x^9).
    """
    x = inner_scale * scores
    square = x * x
    series = 1.0 + square * (
        -1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))
    )
    by_exp = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return outer_scale * tl.where(square < 0.0625, x * series, by_exp)


@triton.jit
def _weigh(
    row_max, row_sum, scores, key_scales, value_scales, visible, inner_scale, outer_scale, HALF: tl.constexpr, FIT: tl.constexpr
):  # fmt: skip
    """Weights [BLOCK_M, BLOCK_N] of a tile of keys, the factor of what has been summed up so far, and the new maxima and sums.

    visible: [BLOCK_M, BLOCK_N] or None if all is; scales: [BLOCK_N] or None; inner_scale: a number, with HALF one for each row [BLOCK_M].
    FIT: the weights, times the scales of their values, are to fit fp16: the largest is about 2^HEADROOM. Else the maxima are those of scores.
    """
    if key_scales is not None:
        scores = scores * key_scales[None, :]
    row_scale = inner_scale
    scale = inner_scale[:, None] if HALF else inner_scale
    if outer_scale is not None:
        scores = _softcapped(scores, scale, outer_scale)
        row_scale = 1.0
        scale = 1.0
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    if FIT and value_scales is not None:
        # The bits of a positive number, as an integer, are its log2 to 0.09: (log2 + 127) * 2^23.
        bits = tl.maximum(value_scales.to(tl.int32, bitcast=True), LEAST_SCALE)
        logs = bits.to(tl.float32) * 2.0**-23 - (127.0 + HEADROOM)
        highest = tl.max(scores * scale + logs[None, :], 1)
    else:
        highest = tl.max(scores, 1) * row_scale - (HEADROOM if FIT else 0.0)
    new_max = tl.maximum(row_max, highest)
    base = new_max
    if visible is not None:
        # A row that has seen nothing yet: subtracting its -inf would give NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    if value_scales is not None:
        weights = weights * value_scales[None, :]
    return weights, decay, new_max, row_sum


@triton.jit
def _to_half(q, HARDWARE_E4M3: tl.constexpr):
    """Rows of two-byte queries as fp16, their largest values moved to [2^14, 2^15) by powers of two, and the factors [rows] back.

    Exact for all values down to 2^-29 of the largest of a row. Without HARDWARE_E4M3 the factors make good what ``halve_e4m3`` leaves out.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True)
    # Of the exponent alone, within what leaves both factors normal numbers.
    exponent = tl.maximum(largest >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    if not HARDWARE_E4M3:
        down *= 256.0
    return (q.to(tl.float32) * up[:, None]).to(tl.float16), down


@triton.jit
def _halve(codes, HARDWARE_E4M3: tl.constexpr, PTX: tl.constexpr):
    """As ``halve_e4m3``; with PTX several codes at once, through a type of Triton's whose exponent has the bias of fp16's."""
    if PTX and not HARDWARE_E4M3:
        values = codes.to(tl.float8e4b15, bitcast=True).to(tl.float16)
    else:
        values = halve_e4m3(codes, HARDWARE_E4M3)
    return values


@triton.jit
def _widen(codes, dtype: tl.constexpr, HARDWARE_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Codes as numbers of ``dtype``, exactly."""
    values = _halve(codes, HARDWARE_E4M3, PTX).to(tl.float32)
    if not HARDWARE_E4M3:
        values *= 256.0
    return values.to(dtype)


@triton.jit
def _halve_pairs(pairs, HARDWARE_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Even and odd channels of values that lie in pairs, as ``halve_e4m3``.

    With PTX two pairs of two rows at once: so does the matrix instruction take them, and the compiler packs bytes one by one.
    """
    if PTX and HARDWARE_E4M3:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 a, b;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 a, first;
            cvt.rn.f16x2.e4m3x2 b, second;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            }""", "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX:
        # Sign to the top, the other seven bits behind one that is 0: `halve_e4m3` on both halves of a register.
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, rest;
            shl.b32 sign, $2, 8;
            shl.b32 rest, $2, 7;
            and.b32 rest, rest, 0x3f803f80;
            lop3.b32 $0, sign, 0x80008000, rest, 0xea;
            shr.b32 rest, $2, 1;
            and.b32 rest, rest, 0x3f803f80;
            lop3.b32 $1, $2, 0x80008000, rest, 0xea;
            }""", "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even = halve_e4m3(pairs.to(tl.uint8), HARDWARE_E4M3)
        odd = halve_e4m3((pairs >> 8).to(tl.uint8), HARDWARE_E4M3)
    return even, odd


@triton.jit
def _load_scales(scales, page, tile, live, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scales [BLOCK_N] of keys and of values of a tile, whose page is one or each row's; 0 for rows not ``live`` (None: all are)."""
    page = page.to(tl.int64)
    if BLOCK_SIZE % BLOCK_N == 0:
        # One address for all: less is kept, and worked out, for each row.
        first = tile * BLOCK_N % BLOCK_SIZE
        row = tl.arange(0, BLOCK_N)
    else:
        first = 0
        _, row = place_in_pages(tile * BLOCK_N, BLOCK_SIZE, BLOCK_N)
    k_cells = scales.k + (page * scales.k_stride_page + first * scales.k_stride_row)
    v_cells = scales.v + (page * scales.v_stride_page + first * scales.v_stride_row)
    k_cells += row * scales.k_stride_row
    v_cells += row * scales.v_stride_row
    if live is None:
        found = tl.load(k_cells), tl.load(v_cells)
    else:
        found = tl.load(k_cells, mask=live, other=0.0), tl.load(v_cells, mask=live, other=0.0)
    return found


@triton.jit
def _attend_tiles(
    acc, row_max, row_sum, q, row_low, row_high, source, first, count, head_count, gap, key_low, key_high, inner_scale, outer_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WRAP: tl.constexpr, EQUAL_STRIDES: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr, HALF: tl.constexpr, PTX: tl.constexpr, DIVIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over ``count`` tiles of a source from tile ``first`` on, jumping ``gap`` tiles after ``head_count`` of them.

    Without MASKED every row sees them whole, and the source's tensor descriptors copy them if it has any.
    """
    CODES: tl.constexpr = source.k.dtype.element_ty == tl.uint8
    PAIRS: tl.constexpr = source.v.dtype.element_ty == tl.uint16
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    if PAIRS:
        offs_v = tl.arange(0, VALUE_DIM // 2)
        acc, acc_odd = tl.split(tl.reshape(acc, [acc.shape[0], VALUE_DIM // 2, 2]))
    else:
        offs_v = tl.arange(0, VALUE_DIM)
        acc_odd = 0
    # 32 bits within a page or a tile of fresh rows, where they reach (checks.check_pages); 64 bits from there on.
    k_offsets = (offs_n * source.k_stride_row)[:, None] + offs_d[None, :]
    if EQUAL_STRIDES and VALUE_DIM == HEAD_DIM and not PAIRS:
        v_offsets = k_offsets  # one set of registers
    else:
        v_offsets = (offs_n * source.v_stride_row)[:, None] + offs_v[None, :]
    if source.table is not None:
        tile = first + tl.where(head_count > 0, 0, gap)
        page = load_page(source.table, source.width, tile, count > 0, WRAP, BLOCK_SIZE, BLOCK_N)
    # Left to LICM, addresses of every later loop would be kept in registers through this one. Where half of the values leave room for them,
    # so may the queries be copied into shared memory once: Triton 3.9 keeps them in registers else, and spills.
    for i in tl.range(0, count, disable_licm=not HALF and (not DIVIDE or VALUE_DIM == HEAD_DIM)):
        tile = first + i + tl.where(i < head_count, 0, gap)
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
            live = ((key >= key_low) & (key < key_high))[:, None]
            keys = tl.load(k_ptrs, mask=live, other=0.0)
            values = tl.load(v_ptrs, mask=live, other=0.0)
            visible = key[None, :] <= row_high[:, None]
            if row_low is not None:
                visible &= key[None, :] >= row_low[:, None]
        else:
            keys = tl.load(k_ptrs)
            values = tl.load(v_ptrs)
            visible = None
        key_scales = None
        value_scales = None
        if source.scales is not None:
            scaled_live = None
            if MASKED:
                scaled_live = (key >= key_low) & (key < key_high)
            key_scales, value_scales = _load_scales(
                source.scales, page, tile, scaled_live, BLOCK_SIZE, BLOCK_N
            )
        if HALF:
            keys = _halve(keys, HARDWARE_E4M3, PTX)
            if PAIRS:
                values, odd = _halve_pairs(values, HARDWARE_E4M3, PTX)
            else:
                values = _halve(values, HARDWARE_E4M3, PTX)
        elif CODES:
            keys = _widen(keys, q.dtype, HARDWARE_E4M3, PTX)
            values = _widen(values, q.dtype, HARDWARE_E4M3, PTX)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        weights = tl.zeros_like(scores).to(values.dtype)
        decay = tl.zeros_like(row_max)
        # With DIVIDE behind a condition that always holds but must not be known to: see `mla._tiles.update`.
        if i < count if DIVIDE else True:
            new_weights, decay, row_max, row_sum = _weigh(
                row_max, row_sum, scores, key_scales, value_scales, visible, inner_scale, outer_scale,
                HALF, CODES and values.dtype == tl.float16,
            )  # fmt: skip
            weights = new_weights.to(values.dtype)
        acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")
        if PAIRS:
            acc_odd = tl.dot(weights, odd, acc_odd * decay[:, None], input_precision="ieee")
        if source.table is not None:
            tile = first + i + 1 + tl.where(i + 1 < head_count, 0, gap)
            page = load_page(
                source.table, source.width, tile, i + 1 < count, WRAP, BLOCK_SIZE, BLOCK_N
            )
    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [acc.shape[0], VALUE_DIM])
    return acc, row_max, row_sum


@triton.jit
def _attend_source(
    acc, row_max, row_sum, q, row_low, row_high, source, span, inner_scale, outer_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WRAP: tl.constexpr, EQUAL_STRIDES: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr, HALF: tl.constexpr, PTX: tl.constexpr, DIVIDE: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Attend to a span of one source: the tiles that all rows see whole, then those at the edges. row_low, row_high: keys that each row sees."""
    first = span.low // BLOCK_N
    stop = tl.maximum((span.high + BLOCK_N - 1) // BLOCK_N, first)
    if MASK_ALL:
        open_first = stop
        open_stop = stop
    else:
        open_first = tl.minimum(tl.maximum((span.open_low + BLOCK_N - 1) // BLOCK_N, first), stop)
        open_stop = tl.minimum(tl.maximum(span.open_high // BLOCK_N, open_first), stop)
        num_open = open_stop - open_first
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, q, row_low, row_high, source, open_first, num_open, num_open, 0, span.low, span.high, inner_scale, outer_scale,
            HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, WRAP, EQUAL_STRIDES, HARDWARE_E4M3, HALF, PTX, DIVIDE, False,
        )  # fmt: skip
    head_count = open_first - first
    return _attend_tiles(
        acc, row_max, row_sum, q, row_low, row_high, source,
        first, head_count + stop - open_stop, head_count, open_stop - open_first, span.low, span.high, inner_scale, outer_scale,
        HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, WRAP, EQUAL_STRIDES, HARDWARE_E4M3, HALF, PTX, DIVIDE, True,
    )  # fmt: skip


@triton.jit
def attend_query_tile(
    q, token, q_first, q_last, context, pages, fresh, k_scale, v_scale, piece_low, piece_high, last_piece,
    sliding_window, inner_scale, outer_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WRAP: tl.constexpr,
    EQUAL_STRIDES: tl.constexpr, SCALES: tl.constexpr, HARDWARE_E4M3: tl.constexpr, HALF: tl.constexpr, PTX: tl.constexpr, DIVIDE: tl.constexpr,
    MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Attend for one query tile to a piece of the paged keys and, in the last piece, to the fresh rows.

    q: [BLOCK_M, HEAD_DIM]; token [BLOCK_M]: each row's token in its sequence's step; q_first, q_last: the tile's first and last.
    pages, fresh: ``Source`` of each; fresh.k None: all keys are in pages.
    EQUAL_STRIDES: whether rows of keys lie as far apart as rows of values, in the pages and among the fresh rows.
    HALF: whether codes, and the queries with them, become fp16 instead of what the queries are. PTX: whether by more than the interpreter knows.
    SCALES: what there is of scales: "none", "number" (k_scale and v_scale), "tensor" (pointers to a number) or "rows" (those of ``pages``).
    """
    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    paged_high = context + q_last + 1
    paged_open_high = context + q_first + 1
    row_high = context + token
    if fresh.k is not None:
        paged_high = context
        paged_open_high = context
        row_high = context - 1 + token * 0
    paged_low = piece_low
    paged_open_low = piece_low
    row_low = None
    if sliding_window is not None:
        row_low = context + token - sliding_window + 1
        paged_low = tl.maximum(context + q_first - sliding_window + 1, piece_low)
        paged_open_low = tl.maximum(context + q_last - sliding_window + 1, piece_low)
    paged_high = tl.maximum(tl.minimum(paged_high, piece_high), 0)
    paged_scale = inner_scale
    if SCALES == "tensor":
        paged_scale = inner_scale * tl.load(k_scale)
    elif SCALES == "number":
        paged_scale = inner_scale * k_scale
    paged_q = q
    if HALF:
        paged_q, factor = _to_half(q, HARDWARE_E4M3)
        paged_scale = paged_scale * factor
    span = Span(paged_low, paged_high, paged_open_low, tl.minimum(paged_open_high, paged_high))
    acc, row_max, row_sum = _attend_source(
        acc, row_max, row_sum, paged_q, row_low, row_high, pages, span, paged_scale, outer_scale,
        HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, WRAP, EQUAL_STRIDES, HARDWARE_E4M3, HALF, PTX, DIVIDE, MASK_ALL,
    )  # fmt: skip
    if SCALES == "tensor":
        acc = acc * tl.load(v_scale)
    elif SCALES == "number":
        acc = acc * v_scale
    if HALF and not HARDWARE_E4M3:
        acc = acc * 256.0

    if fresh.k is not None:
        # Fresh key r is key context + r; in a padding row (seq_len < q_len) the first of them do not exist.
        fresh_low = tl.maximum(-context, 0)
        fresh_open_low = fresh_low
        fresh_row_low = fresh_low + token * 0
        if sliding_window is not None:
            fresh_low = tl.maximum(q_first - sliding_window + 1, fresh_low)
            fresh_open_low = tl.maximum(q_last - sliding_window + 1, fresh_open_low)
            fresh_row_low = tl.maximum(token - sliding_window + 1, fresh_row_low)
        fresh_high = tl.where(last_piece, q_last + 1, fresh_low)
        span = Span(fresh_low, fresh_high, fresh_open_low, q_first + 1)
        acc, row_max, row_sum = _attend_source(
            acc, row_max, row_sum, q, fresh_row_low, token, fresh, span, inner_scale, outer_scale,
            HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, WRAP, EQUAL_STRIDES, HARDWARE_E4M3, False, PTX, DIVIDE, MASK_ALL,
        )  # fmt: skip
    return acc, row_max, row_sum
