"""The loop of ``compressed_attention`` over its keys: gather a tile of rows, use it as K and as V.

The keys of a query tile are numbered x = 0, 1, ...: first the raw positions low, low + 1, ... (rows
of the window's pages, then the step's own rows), then the compressed entries (all of them, or those
that ``topk_indices`` names). A tile takes BLOCK_N of them, wherever they lie: 127 cached rows, one
new row and 512 top-k entries are ten tiles of 64, not twelve. Key x is visible to a query at
position p if it is born and not yet dead: a raw position j lives from j to j + sliding_window - 1,
entry w from (w + 1) * ratio - 1 for ever.

What finds the rows of the next tile is carried around the loop (the flat indices of its keys, and
the top-k entries of the tile after it), since copies of K/V that wait for a load of the same
iteration are not pipelined. The flat index of a key, page * rows of a page + row, is one int32: two
numbers would be two vectors in registers, each exchanged through shared memory when the loop takes
it up. A pool of 2^31 rows (1 TiB) would overflow it.

With few rows the products are swapped, S^T = KV Q^T and O^T = KV^T P^T: keys and channels fill the
tensor cores' tiles of 64, and the rows need not be padded to 64. Then accumulators are
[HEAD_DIM, ROWS] and scores [BLOCK_N, ROWS].

Source: FlashAttention-2 (arXiv 2307.08691) for the online softmax; DeepSeek-V4 for what is visible.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import latent_pages
from ..common.tiles import multiply, score_parts, update, update_scored, widen_e4m3

ROW_BYTES = tl.constexpr(latent_pages.ROW_BYTES)
SCALE_BYTES = tl.constexpr(latent_pages.SCALE_BYTES)
NOPE_DIM = tl.constexpr(latent_pages.NOPE_DIM)
GROUP = tl.constexpr(latent_pages.QUANT_GROUP)
FOREVER = tl.constexpr(2**31 - 1)


class KeyTile(NamedTuple):
    """What a tile of keys is, all known at compile time.

    Attributes:
        HEAD_DIM, ROPE_DIM: channels of a row, and the trailing ones that are roped.
        BLOCK_N: keys of a tile.
        WINDOW_ROWS, ENTRY_ROWS: rows of a page of the window, and of entries.
        SLOTS: the keys come as lists of flat indices; whatever they name is visible.
        HARDWARE_E4M3: convert e4m3 by an instruction.
        SWAP, DIVIDE, HOIST: as in ``common.tiles.update``.
        ALIGNED: pages and new rows start at multiples of 16 bytes, which Triton 3.9 forgets of a
            pointer that is chosen from two.
        PARTS: parts of the channels that queries and keys are read and multiplied in
            (``common.tiles.score_parts``); 1: the queries stay in registers.
    """

    HEAD_DIM: Any
    ROPE_DIM: Any
    BLOCK_N: Any
    WINDOW_ROWS: Any
    ENTRY_ROWS: Any
    SLOTS: Any
    HARDWARE_E4M3: Any
    SWAP: Any
    DIVIDE: Any
    HOIST: Any
    ALIGNED: Any
    PARTS: Any


class Mask(NamedTuple):
    """Which keys a query sees.

    Attributes:
        sliding_window: raw rows up to its own.
        ratio: raw tokens of an entry; None without entries.
    """

    sliding_window: Any
    ratio: Any


class Pages(NamedTuple):
    """Where the cached rows of one sequence lie, and its compressed entries; None for what is not.

    Attributes:
        window, entries: ``PagedRows``.
        window_table, entry_table: the sequence's block tables; with SLOTS flat indices of a token.
        window_width: entries of the window's table.
        topk_indices: the entries that a token attends to, None = all in order; with SLOTS flat
            indices too.
    """

    window: Any
    window_table: Any
    window_width: Any
    entries: Any
    entry_table: Any
    topk_indices: Any


class Order(NamedTuple):
    """How the keys of a query tile are numbered.

    Attributes:
        low: position of key 0.
        context: position of the step's first row.
        num_raw: keys that are raw positions; the entries follow.
        num_entries: entries that the last row of the tile sees.
    """

    low: Any
    context: Any
    num_raw: Any
    num_entries: Any


@triton.jit
def _load_quantized(rows, scales, live, DTYPE: tl.constexpr, KEYS: tl.constexpr):
    """Rows of the 584-byte layout as numbers [BLOCK_N, HEAD_DIM]; with PARTS all are read.

    Args:
        rows, scales: [BLOCK_N] pointers to the bytes of values and of scales.
    """
    HEAD_DIM: tl.constexpr = KEYS.HEAD_DIM
    BLOCK_N: tl.constexpr = KEYS.BLOCK_N
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    dim = tl.arange(0, HEAD_DIM)
    # The eight bytes of a row's scales at once; 2^(byte - 127) is the fp32 number with that exponent
    # and no mantissa.
    if KEYS.PARTS > 1:
        quantized = tl.load(rows[:, None] + dim[None, :])
        rope = (rows + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
        rope = tl.load(rope[:, None] + tl.arange(0, GROUP)[None, :])
        packed = tl.load(scales.to(tl.pointer_type(tl.int64)))
    else:
        quantized = tl.load(
            rows[:, None] + dim[None, :], mask=live[:, None] & (dim < NOPE_DIM)[None, :], other=0
        )
        rope = (rows + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
        rope = tl.load(rope[:, None] + tl.arange(0, GROUP)[None, :], mask=live[:, None], other=0.0)
        packed = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=live, other=0)
    group = tl.arange(0, GROUPS)
    exponents = ((packed[:, None] >> (8 * group)[None, :]) & 0xFF).to(tl.int32)
    factors = (exponents << 23).to(tl.float32, bitcast=True)[:, :, None]
    values = widen_e4m3(quantized, tl.float32, KEYS.HARDWARE_E4M3)
    values = (tl.reshape(values, [BLOCK_N, GROUPS, GROUP]) * factors).to(DTYPE)
    values = tl.where((group == GROUPS - 1)[None, :, None], rope.to(DTYPE)[:, None, :], values)
    return tl.reshape(values, [BLOCK_N, HEAD_DIM])


@triton.jit
def _score_quantized(q_rows, rows, scales, scores, KEYS: tl.constexpr):
    """``score_parts`` of rows of the 584-byte layout; a part is no more than a group."""
    PARTS: tl.constexpr = KEYS.PARTS
    WIDTH: tl.constexpr = KEYS.HEAD_DIM // PARTS
    DTYPE: tl.constexpr = q_rows.dtype.element_ty
    packed = tl.load(scales.to(tl.pointer_type(tl.int64)))
    for part in tl.static_range(PARTS):
        dim = part * WIDTH + tl.arange(0, WIDTH)
        queries = tl.load(q_rows[:, None] + dim[None, :])
        if part * WIDTH < NOPE_DIM:
            keys = tl.load(rows[:, None] + dim[None, :])
            exponents = ((packed >> (8 * (part * WIDTH // GROUP))) & 0xFF).to(tl.int32)
            factors = (exponents << 23).to(tl.float32, bitcast=True)[:, None]
            keys = (widen_e4m3(keys, tl.float32, KEYS.HARDWARE_E4M3) * factors).to(DTYPE)
        else:
            rope = (rows + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
            keys = tl.load(rope[:, None] + (dim - NOPE_DIM)[None, :]).to(DTYPE)
        scores = multiply(queries, keys, scores, KEYS.SWAP)
    return scores


@triton.jit
def attend_keys(
    acc, row_max, row_sum, q, position, pages, new_kv, new_stride, order, first, stop, mask, scale,
    KEYS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the keys [first, stop) of a query tile.

    Args:
        q: [ROWS, HEAD_DIM]; with PARTS above 1 [ROWS] pointers to rows that all may be read.
        position: [ROWS] int32, of each row.
        pages, order, mask: ``Pages``, ``Order``, ``Mask``.
        new_kv: pointer to the step's rows of the sequence, ``new_stride`` elements apart, or None.
        KEYS: ``KeyTile``.
        ONE_TOKEN: all rows are of one token, which sees all keys.
    """
    BLOCK_N: tl.constexpr = KEYS.BLOCK_N
    WINDOW_ROWS: tl.constexpr = KEYS.WINDOW_ROWS
    ENTRY_ROWS: tl.constexpr = KEYS.ENTRY_ROWS
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, KEYS.HEAD_DIM)
    FP8: tl.constexpr = pages.window is not None and pages.window.data.dtype.element_ty == tl.uint8
    LISTED: tl.constexpr = KEYS.SLOTS or pages.topk_indices is not None
    DTYPE: tl.constexpr = q.dtype.element_ty if KEYS.PARTS > 1 else q.dtype
    ROWS: tl.constexpr = q.shape[0]
    first_cell = order.low // WINDOW_ROWS // pages.window_width * pages.window_width
    x = first + offs_n
    entry = _load_entry(x, stop, order.num_raw, pages.topk_indices, KEYS.SLOTS)
    flat_index = _load_flat_index(x, stop, entry, pages, new_kv, order, first_cell, KEYS)
    entry = _load_entry(x + BLOCK_N, stop, order.num_raw, pages.topk_indices, KEYS.SLOTS)
    for start in tl.range(first, stop, BLOCK_N, disable_licm=not KEYS.HOIST):
        x = start + offs_n
        raw = x < order.num_raw
        key_position = order.low + x
        flat_index = tl.gather(flat_index, offs_n, 0)
        # Without lists every key is somewhere.
        live = flat_index >= 0 if LISTED else x < stop
        if KEYS.PARTS > 1:
            # Nothing is masked: of a key that is not live another row is read.
            flat_index = tl.maximum(flat_index, 0)
            if pages.window is None:
                key_position = order.low + tl.minimum(x, stop - 1)
        # Unsigned, so that dividing by a power of two is a shift.
        flat_index = flat_index.to(tl.uint32)
        if pages.window is not None:
            row = (flat_index % WINDOW_ROWS).to(tl.int32)
            offset = row * (ROW_BYTES if FP8 else pages.window.stride_row)
            first_scale = tl.full([], WINDOW_ROWS * ROW_BYTES, tl.int32)
            page_id = (flat_index // WINDOW_ROWS).to(tl.int64)
            page = pages.window.data + page_id * pages.window.stride_page
            if pages.entries is not None:
                entry_row = (flat_index % ENTRY_ROWS).to(tl.int32)
                row = tl.where(raw, row, entry_row)
                entry_offset = entry_row * (ROW_BYTES if FP8 else pages.entries.stride_row)
                offset = tl.where(raw, offset, entry_offset)
                first_scale = tl.where(raw, first_scale, ENTRY_ROWS * ROW_BYTES)
                entry_page_id = (flat_index // ENTRY_ROWS).to(tl.int64)
                entry_page = pages.entries.data + entry_page_id * pages.entries.stride_page
                page = tl.where(raw, page, entry_page)
                if KEYS.ALIGNED:
                    page = tl.multiple_of(page, 16)
                    offset = tl.multiple_of(offset, 128 // page.dtype.element_ty.primitive_bitwidth)
                    first_scale = tl.multiple_of(first_scale, 16)
            rows = page + offset
            scales = page + (first_scale + row * SCALE_BYTES)
        if new_kv is not None:
            new_rows = new_kv + (key_position - order.context).to(tl.int64) * new_stride
            if pages.window is not None:
                rows = tl.where(raw & (key_position >= order.context), new_rows, rows)
                if KEYS.ALIGNED:
                    rows = tl.multiple_of(rows, 16)
            else:
                rows = new_rows
        if KEYS.PARTS > 1:
            tile = None
        elif FP8:
            tile = _load_quantized(rows, scales, live, DTYPE, KEYS)
        else:
            # What lies in rows that are not live may be NaN: 0 * NaN would reach the output.
            tile = tl.load(rows[:, None] + dim[None, :], mask=live[:, None], other=0.0)
        if ONE_TOKEN:
            visible = live[:, None] if KEYS.SWAP else live[None, :]
        else:
            # ``topk_indices`` belong to one token, so the entries are those in order here.
            birth = key_position
            death = key_position + (mask.sliding_window - 1)
            if pages.entries is not None:
                birth = tl.where(raw, birth, (x - order.num_raw + 1) * mask.ratio - 1)
                death = tl.where(raw, death, FOREVER)
            if KEYS.SWAP:
                visible = live[:, None] & (birth[:, None] <= position[None, :])
                visible &= death[:, None] >= position[None, :]
            else:
                visible = live[None, :] & (birth[None, :] <= position[:, None])
                visible &= death[None, :] >= position[:, None]
        if KEYS.PARTS > 1:
            # 0, of which only that 16 divides it is to be known: see `score_parts`.
            again = q + 16 * tl.minimum(stop - start, 0)
            if KEYS.SWAP:
                scores = tl.zeros([BLOCK_N, ROWS], tl.float32)
            else:
                scores = tl.zeros([ROWS, BLOCK_N], tl.float32)
            if FP8:
                scores = _score_quantized(again, rows, scales, scores, KEYS)
                tile = _load_quantized(rows, scales, live, DTYPE, KEYS)
            else:
                scores = score_parts(again, rows, scores, KEYS.HEAD_DIM, KEYS.PARTS, KEYS.SWAP)
                tile = tl.load(rows[:, None] + dim[None, :])
            # A row that is not live may be NaN: 0 * NaN would reach the output.
            tile = tl.where(live[:, None], tile, 0.0)
            acc, row_max, row_sum = update_scored(
                acc, row_max, row_sum, scores, tile, visible, scale, KEYS.SWAP
            )
        else:
            acc, row_max, row_sum = update(
                acc, row_max, row_sum, q, tile, None, None, visible, scale, start < stop,
                KEYS.SWAP, KEYS.DIVIDE, KEYS.HOIST,
            )  # fmt: skip
        x += BLOCK_N
        flat_index = _load_flat_index(x, stop, entry, pages, new_kv, order, first_cell, KEYS)
        entry = _load_entry(x + BLOCK_N, stop, order.num_raw, pages.topk_indices, KEYS.SLOTS)
    return acc, row_max, row_sum


@triton.jit
def _load_entry(x, stop, num_raw, topk_indices, SLOTS: tl.constexpr):
    """The entry that each key is, -1 or less for raw positions and past the end."""
    if topk_indices is None or SLOTS:
        entry = x - num_raw
    else:
        entry = tl.load(topk_indices + (x - num_raw), mask=(x >= num_raw) & (x < stop), other=-1)
    return entry


@triton.jit
def _load_flat_index(x, stop, entry, pages, new_kv, order, first_cell, KEYS: tl.constexpr):
    """Flat index of each key, page * rows of a page + row; -1 for list entries that name no row.

    That of a new row is never used and may be anything.
    """
    WINDOW_ROWS: tl.constexpr = KEYS.WINDOW_ROWS
    ENTRY_ROWS: tl.constexpr = KEYS.ENTRY_ROWS
    raw = x < order.num_raw
    if KEYS.SLOTS:
        cells = pages.window_table + x
        if pages.topk_indices is not None:
            cells = tl.where(raw, cells, pages.topk_indices + (x - order.num_raw))
        flat_index = tl.load(cells, mask=x < stop, other=-1)
    elif pages.window_table is not None:
        position = order.low + x
        live = x < stop
        if pages.topk_indices is not None:
            live &= raw | ((entry >= 0) & (entry < order.num_entries))
        paged = live
        if new_kv is not None:
            paged = live & (~raw | (position < order.context))
        cell = position // WINDOW_ROWS - first_cell
        cell = tl.where(cell < pages.window_width, cell, cell - pages.window_width)
        cells = pages.window_table + cell
        if pages.entry_table is not None:
            cells = tl.where(raw, cells, pages.entry_table + entry // ENTRY_ROWS)
        page = tl.load(cells, mask=paged, other=0)
        flat_index = page * WINDOW_ROWS + position % WINDOW_ROWS
        if pages.entry_table is not None:
            flat_index = tl.where(raw, flat_index, page * ENTRY_ROWS + entry % ENTRY_ROWS)
        if pages.topk_indices is not None:
            flat_index = tl.where(live, flat_index, -1)
    else:
        flat_index = x * 0
    return flat_index
