"""The loop of ``compressed_attention`` over its keys: gather a tile of latent rows once, use it as K and as V.

The keys of a query tile are numbered x = 0, 1, ...: first the raw positions low, low + 1, ... (rows of the window's pages, then the step's
fresh rows), then the compressed entries (all of them, or the picks of the indexer). A tile takes BLOCK_N of them, wherever they lie, so
that 127 cached rows, one fresh row and 512 picks are ten tiles of 64, not twelve. Key x is visible to a query at position p if it is born
and not yet dead: a raw position j lives from j to j + sliding_window - 1, entry w from (w + 1) * ratio - 1 for ever.

What finds the rows of the next tile is carried around the loop (the keys' physical rows, and the picks of the tile after it), since copies
of K/V that wait for a load of the same iteration are not pipelined. One int32 a key says it all, which a pool of 2^31 rows (1 TiB) would
overflow: each more is a vector in registers, and an exchange through shared memory when the loop takes it up.

With few rows the products are swapped, S^T = KV Q^T and O^T = KV^T P^T: keys and channels fill the tensor cores' tiles of 64, and the rows
need not be padded to 64. Then accumulators are [HEAD_DIM, ROWS] and scores [BLOCK_N, ROWS].

Source: FlashAttention-2 (arXiv 2307.08691) for the online softmax; DeepSeek-V4 for what is visible.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import latent_pages
from ..common.tiles import update, widen_e4m3

ROW_BYTES = tl.constexpr(latent_pages.ROW_BYTES)
SCALE_BYTES = tl.constexpr(latent_pages.SCALE_BYTES)
NOPE_DIM = tl.constexpr(latent_pages.NOPE_DIM)
GROUP = tl.constexpr(latent_pages.QUANT_GROUP)
FOREVER = tl.constexpr(2**31 - 1)


class Pages(NamedTuple):
    """Where the cached rows of one sequence lie, and its compressed entries; what there is none of is None.

    window, entries: pointers to the first page, and how far apart pages and rows lie. window_list, entry_table: the sequence's block tables,
    or with slots the physical rows of a token. picks: entry of each key from the first on that is no raw position, None = the entries in order;
    with slots physical rows too.
    """

    window: Any
    window_list: Any
    window_width: Any
    window_stride_page: Any
    window_stride_row: Any
    entries: Any
    entry_table: Any
    entry_stride_page: Any
    entry_stride_row: Any
    picks: Any


class Order(NamedTuple):
    """How the keys of a query tile are numbered. low: position of key 0; context: that of fresh row 0; num_raw: keys that are raw positions;
    num_entries: entries that the last row of the tile sees."""

    low: Any
    context: Any
    num_raw: Any
    num_entries: Any


@triton.jit
def _load_quantised(rows, scales, live, HARDWARE_E4M3: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Rows of the 584-byte layout as numbers [BLOCK_N, HEAD_DIM]; rows and scales: [BLOCK_N] pointers to bytes."""
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    dim = tl.arange(0, HEAD_DIM)
    codes = tl.load(
        rows[:, None] + dim[None, :], mask=live[:, None] & (dim < NOPE_DIM)[None, :], other=0
    )
    rope = (rows + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(rope[:, None] + tl.arange(0, GROUP)[None, :], mask=live[:, None], other=0.0)
    # The eight bytes of a row's scales at once; 2^(byte - 127) is the fp32 number with that exponent and no mantissa.
    packed = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=live, other=0)
    group = tl.arange(0, GROUPS)
    exponents = ((packed[:, None] >> (8 * group)[None, :]) & 0xFF).to(tl.int32)
    factors = (exponents << 23).to(tl.float32, bitcast=True)[:, :, None]
    values = tl.reshape(widen_e4m3(codes, tl.float32, HARDWARE_E4M3), [BLOCK_N, GROUPS, GROUP])
    values = (values * factors).to(DTYPE)
    values = tl.where((group == GROUPS - 1)[None, :, None], rope.to(DTYPE)[:, None, :], values)
    return tl.reshape(values, [BLOCK_N, HEAD_DIM])


@triton.jit
def attend_keys(
    acc, row_max, row_sum, q, position, pages, fresh, fresh_stride, order, first, stop, sliding_window, ratio, scale,
    WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, SLOTS: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, ONE_TOKEN: tl.constexpr, DIVIDE: tl.constexpr, HOIST: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the keys [first, stop) of a query tile.

    q: [ROWS, HEAD_DIM]; position: [ROWS] int32, of each row. fresh: pointer to the fresh rows of the sequence, ``fresh_stride`` apart, or None.

    SLOTS: the keys come as lists of physical rows; whatever they name is visible. ALIGNED: pages and fresh rows start at multiples of 16 bytes,
    which Triton 3.9 forgets of one that is chosen from two.
    """
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    FP8: tl.constexpr = pages.window is not None and pages.window.dtype.element_ty == tl.uint8
    LISTED: tl.constexpr = SLOTS or pages.picks is not None
    first_cell = order.low // WINDOW_ROWS // pages.window_width * pages.window_width
    x = first + offs_n
    entry = _load_entry(x, stop, order.num_raw, pages.picks, SLOTS)
    place = _load_place(
        x, stop, entry, pages, fresh, order, first_cell, WINDOW_ROWS, ENTRY_ROWS, SLOTS
    )
    entry = _load_entry(x + BLOCK_N, stop, order.num_raw, pages.picks, SLOTS)
    for start in tl.range(first, stop, BLOCK_N, disable_licm=not HOIST):
        x = start + offs_n
        raw = x < order.num_raw
        key_position = order.low + x
        place = tl.gather(place, offs_n, 0)
        # Without lists every key is somewhere.
        live = place >= 0 if LISTED else x < stop
        # Unsigned, so that dividing by a power of two is a shift.
        place = place.to(tl.uint32)
        if pages.window is not None:
            row = (place % WINDOW_ROWS).to(tl.int32)
            offset = row * (ROW_BYTES if FP8 else pages.window_stride_row)
            first_scale = tl.full([], WINDOW_ROWS * ROW_BYTES, tl.int32)
            page = pages.window + (place // WINDOW_ROWS).to(tl.int64) * pages.window_stride_page
            if pages.entries is not None:
                entry_row = (place % ENTRY_ROWS).to(tl.int32)
                row = tl.where(raw, row, entry_row)
                offset = tl.where(
                    raw, offset, entry_row * (ROW_BYTES if FP8 else pages.entry_stride_row)
                )
                first_scale = tl.where(raw, first_scale, ENTRY_ROWS * ROW_BYTES)
                entry_page = (
                    pages.entries + (place // ENTRY_ROWS).to(tl.int64) * pages.entry_stride_page
                )
                page = tl.where(raw, page, entry_page)
                if ALIGNED:
                    page = tl.multiple_of(page, 16)
                    offset = tl.multiple_of(offset, 128 // page.dtype.element_ty.primitive_bitwidth)
                    first_scale = tl.multiple_of(first_scale, 16)
            rows = page + offset
            scales = page + (first_scale + row * SCALE_BYTES)
        if fresh is not None:
            fresh_rows = fresh + (key_position - order.context).to(tl.int64) * fresh_stride
            if pages.window is not None:
                rows = tl.where(raw & (key_position >= order.context), fresh_rows, rows)
                if ALIGNED:
                    rows = tl.multiple_of(rows, 16)
            else:
                rows = fresh_rows
        if FP8:
            tile = _load_quantised(rows, scales, live, HARDWARE_E4M3, HEAD_DIM, BLOCK_N, q.dtype)
        else:
            # What lies in rows that are not live may be NaN: 0 * NaN would reach the output.
            tile = tl.load(rows[:, None] + dim[None, :], mask=live[:, None], other=0.0)
        if ONE_TOKEN:
            visible = live[:, None] if SWAP else live[None, :]
        else:
            # Picks come for one token alone, so the entries are those in order here.
            birth = key_position
            death = key_position + (sliding_window - 1)
            if pages.entries is not None:
                birth = tl.where(raw, birth, (x - order.num_raw + 1) * ratio - 1)
                death = tl.where(raw, death, FOREVER)
            if SWAP:
                visible = live[:, None] & (birth[:, None] <= position[None, :]) & (death[:, None] >= position[None, :])  # fmt: skip
            else:
                visible = live[None, :] & (birth[None, :] <= position[:, None]) & (death[None, :] >= position[:, None])  # fmt: skip
        acc, row_max, row_sum = update(acc, row_max, row_sum, q, tile, None, None, visible, scale, start < stop, SWAP, DIVIDE, HOIST)  # fmt: skip
        x += BLOCK_N
        place = _load_place(
            x, stop, entry, pages, fresh, order, first_cell, WINDOW_ROWS, ENTRY_ROWS, SLOTS
        )
        entry = _load_entry(x + BLOCK_N, stop, order.num_raw, pages.picks, SLOTS)
    return acc, row_max, row_sum


@triton.jit
def _load_entry(x, stop, num_raw, picks, SLOTS: tl.constexpr):
    """The entry that each key is, -1 or less for raw positions and past the end."""
    if picks is None or SLOTS:
        entry = x - num_raw
    else:
        entry = tl.load(picks + (x - num_raw), mask=(x >= num_raw) & (x < stop), other=-1)
    return entry


@triton.jit
def _load_place(
    x, stop, entry, pages, fresh, order, first_cell, WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """Where each key lies: its physical row, page * rows of a page + row; anything for fresh rows. -1 for picks and slots of nothing."""
    raw = x < order.num_raw
    if SLOTS:
        cells = pages.window_list + x
        if pages.picks is not None:
            cells = tl.where(raw, cells, pages.picks + (x - order.num_raw))
        place = tl.load(cells, mask=x < stop, other=-1)
    elif pages.window_list is not None:
        position = order.low + x
        live = x < stop
        if pages.picks is not None:
            live &= raw | ((entry >= 0) & (entry < order.num_entries))
        paged = live
        if fresh is not None:
            paged = live & (~raw | (position < order.context))
        cell = position // WINDOW_ROWS - first_cell
        cell = tl.where(cell < pages.window_width, cell, cell - pages.window_width)
        cells = pages.window_list + cell
        if pages.entry_table is not None:
            cells = tl.where(raw, cells, pages.entry_table + entry // ENTRY_ROWS)
        page = tl.load(cells, mask=paged, other=0)
        place = page * WINDOW_ROWS + position % WINDOW_ROWS
        if pages.entry_table is not None:
            place = tl.where(raw, place, page * ENTRY_ROWS + entry % ENTRY_ROWS)
        if pages.picks is not None:
            place = tl.where(live, place, -1)
    else:
        place = x * 0
    return place
