"""The loop of ``compressed_attention`` over its keys: gather a tile of rows, use it as K and as V.

The keys of a query tile are numbered x = 0, 1, ...: first the raw positions low, low + 1, ... (rows
of the window's pages, then the step's own rows), then the compressed entries (all of them, or those
that ``topk_indices`` names). A tile takes BLOCK_N of them, wherever they lie: 127 cached rows, one
new row and 512 top-k entries are ten tiles of 64, not twelve. Key x is visible to a query at
position p if it is born and not yet dead: a raw position j lives from j to j + sliding_window - 1,
entry w from (w + 1) * ratio - 1 for ever.

All layers of DeepSeek-V4 take this loop: with a window alone there are no entries, and whether these
are listed, as how many rows a page of theirs has, is known at run time. Then the list's load is
masked, or not; where there is no list no byte of it is fetched.

What finds the rows of the next tile is carried around the loop (the addresses of its keys, and the
top-k entries of the tile after it), since copies of K/V that wait for a load of the same iteration
are not pipelined. A thread carries the address of one key, and gets those of the rows that it
copies through shared memory: all that finds a row is computed once for a key, not by all of the
threads that copy it. An address of 0 stands for a key that is nowhere.

With few rows the products are swapped, S^T = KV Q^T and O^T = KV^T P^T: keys and channels fill the
tensor cores' tiles of 64, and the rows need not be padded to 64. Then accumulators are
[HEAD_DIM, ROWS] and scores [BLOCK_N, ROWS].

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


class KeyTile(NamedTuple):
    """What a tile of keys is, all known at compile time.

    Attributes:
        HEAD_DIM, ROPE_DIM: channels of a row, and the trailing ones that are roped.
        BLOCK_N: keys of a tile.
        WINDOW_ROWS: rows of a page of the window.
        SLOTS: the keys come as lists of flat indices; whatever they name is visible.
        HARDWARE_E4M3: convert e4m3 by an instruction.
        SWAP, DIVIDE, HOIST: as in ``common.tiles.update``.
        ALIGNED: pages and new rows start at multiples of 16 bytes, which Triton 3.9 forgets of a
            pointer that is chosen from two.
    """

    HEAD_DIM: Any
    ROPE_DIM: Any
    BLOCK_N: Any
    WINDOW_ROWS: Any
    SLOTS: Any
    HARDWARE_E4M3: Any
    SWAP: Any
    DIVIDE: Any
    HOIST: Any
    ALIGNED: Any


class Softmax(NamedTuple):
    """Which raw rows count, and what a score becomes.

    Attributes:
        sliding_window: raw rows that a query sees, its own included.
        scale: factor of q . k, to log2 units.
    """

    sliding_window: Any
    scale: Any


class Pages(NamedTuple):
    """Where the keys lie; of new rows alone all is None.

    Attributes:
        window, entries: ``PagedRows``.
        window_table: ``Table``; with SLOTS flat indices, page * rows of a page + row, of tokens.
        entry_table, table_stride: the table of entries, and elements from one sequence to the next.
        entry_rows: rows of a page of entries.
        topk_indices, topk_stride: lists of entries, and elements from one token to the next; with
            SLOTS flat indices too.
    """

    window: Any
    window_table: Any
    entries: Any
    entry_table: Any
    table_stride: Any
    entry_rows: Any
    topk_indices: Any
    topk_stride: Any


class Order(NamedTuple):
    """Whose keys these are, and how they are numbered.

    Attributes:
        seq: the sequence.
        token: whose list counts, the tile's first.
        first_token: of the sequence's step.
        low: position of key 0.
        num_paged: keys, the first ones, that are older than the step.
        num_raw: keys that are raw positions; the entries follow.
        num_entries: entries that the last row of the tile sees.
        num_listed: entries of the token's list; -1: there is none, and all are seen in order.
    """

    seq: Any
    token: Any
    first_token: Any
    low: Any
    num_paged: Any
    num_raw: Any
    num_entries: Any
    num_listed: Any


@triton.jit
def _load_quantized(rows, scales, live, DTYPE: tl.constexpr, KEYS: tl.constexpr):
    """Rows of the 584-byte layout as numbers [BLOCK_N, HEAD_DIM].

    Args:
        rows, scales: [BLOCK_N] pointers to the bytes of values and of scales.
    """
    HEAD_DIM: tl.constexpr = KEYS.HEAD_DIM
    BLOCK_N: tl.constexpr = KEYS.BLOCK_N
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    dim = tl.arange(0, HEAD_DIM)
    # The eight bytes of a row's scales at once; 2^(byte - 127) is the fp32 number with that exponent
    # and no mantissa.
    quantized = tl.load(
        rows[:, None] + dim[None, :], mask=live[:, None] & (dim < NOPE_DIM)[None, :], other=0
    )
    rope = (rows + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(rope[:, None] + tl.arange(0, GROUP)[None, :], mask=live[:, None], other=0.0)
    packed = tl.load(scales, mask=live, other=0)
    group = tl.arange(0, GROUPS)
    exponents = ((packed[:, None] >> (8 * group)[None, :]) & 0xFF).to(tl.int32)
    factors = (exponents << 23).to(tl.float32, bitcast=True)[:, :, None]
    values = widen_e4m3(quantized, tl.float32, KEYS.HARDWARE_E4M3)
    values = (tl.reshape(values, [BLOCK_N, GROUPS, GROUP]) * factors).to(DTYPE)
    values = tl.where((group == GROUPS - 1)[None, :, None], rope.to(DTYPE)[:, None, :], values)
    return tl.reshape(values, [BLOCK_N, HEAD_DIM])


@triton.jit
def attend_keys(
    acc, row_max, row_sum, q, position, pages, kv, order, first, stop, ratio, softmax,
    KEYS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the keys [first, stop) of a query tile.

    Args:
        q: [ROWS, HEAD_DIM].
        position: [ROWS] int32, of each row.
        pages, order, softmax: ``Pages``, ``Order``, ``Softmax``.
        kv: ``Matrix`` of the step's rows, or None.
        ratio: raw tokens of an entry.
        KEYS: ``KeyTile``.
        ONE_TOKEN: all rows are of one token, which sees all keys.
    """
    BLOCK_N: tl.constexpr = KEYS.BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, KEYS.HEAD_DIM)
    FP8: tl.constexpr = pages.window is not None and pages.window.data.dtype.element_ty == tl.uint8
    LISTS: tl.constexpr = ONE_TOKEN and pages.window is not None and not KEYS.SLOTS
    x = first + offs_n
    entry = _load_entry(x, pages, order, LISTS)
    address, scale_address = _find_rows(x, stop, entry, pages, kv, order, FP8, KEYS)
    entry = _load_entry(x + BLOCK_N, pages, order, LISTS)
    for start in tl.range(first, stop, BLOCK_N, disable_licm=not KEYS.HOIST):
        x = start + offs_n
        raw = x < order.num_raw
        if pages.window is not None:
            address = tl.gather(address, offs_n, 0)
            scale_address = tl.gather(scale_address, offs_n, 0) if FP8 else scale_address
            live = address != 0
            rows = address.to(pages.window.data.dtype)
            if KEYS.ALIGNED:
                rows = tl.multiple_of(rows, 16)
            scales = scale_address.to(tl.pointer_type(tl.int64))
        else:
            live = x < stop
            rows = _new_rows(x, kv, order)
        # The next rows are found behind products whose masks differ from row to row, else ahead of
        # them.
        next_x = x + BLOCK_N
        if ONE_TOKEN:
            address, scale_address = _find_rows(next_x, stop, entry, pages, kv, order, FP8, KEYS)
            entry = _load_entry(next_x + BLOCK_N, pages, order, LISTS)
        if FP8:
            tile = _load_quantized(rows, scales, live, q.dtype, KEYS)
        else:
            # What lies in rows that are not live may be NaN: 0 * NaN would reach the output.
            tile = tl.load(rows[:, None] + dim[None, :], mask=live[:, None], other=0.0)
        if ONE_TOKEN:
            visible = live[:, None] if KEYS.SWAP else live[None, :]
        else:
            # ``topk_indices`` belong to one token, so the entries are those in order here.
            birth = order.low + x
            death = birth + (softmax.sliding_window - 1)
            if pages.window is not None:
                birth = tl.where(raw, birth, (x - order.num_raw + 1) * ratio - 1)
                death = tl.where(raw, death, FOREVER)
            if KEYS.SWAP:
                visible = live[:, None] & (birth[:, None] <= position[None, :])
                visible &= death[:, None] >= position[None, :]
            else:
                visible = live[None, :] & (birth[None, :] <= position[:, None])
                visible &= death[None, :] >= position[:, None]
        acc, row_max, row_sum = update(
            acc, row_max, row_sum, q, tile, None, None, visible, softmax.scale, start < stop,
            KEYS.SWAP, KEYS.DIVIDE, KEYS.HOIST,
        )  # fmt: skip
        if not ONE_TOKEN:
            address, scale_address = _find_rows(next_x, stop, entry, pages, kv, order, FP8, KEYS)
            entry = _load_entry(next_x + BLOCK_N, pages, order, LISTS)
    return acc, row_max, row_sum


@triton.jit
def _load_entry(x, pages, order, LISTS: tl.constexpr):
    """The entry that each key is; below 0 for raw positions and what a list leaves out.

    Without a list this is the key's number among the entries, and nothing is loaded.
    """
    entry = x - order.num_raw
    if LISTS:
        listed = (entry >= 0) & (entry < order.num_listed)
        cells = pages.topk_indices + (order.token.to(tl.int64) * pages.topk_stride + entry)
        entry = tl.load(cells, mask=listed, other=entry)
    return entry


@triton.jit
def _new_rows(x, kv, order):
    """Pointers to rows of the step."""
    row = order.first_token + (x - order.num_paged)
    return kv.data + row.to(tl.int64) * kv.stride_row


@triton.jit
def _find_rows(x, stop, entry, pages, kv, order, FP8: tl.constexpr, KEYS: tl.constexpr):
    """Addresses of each key's row, 0 for those that are nowhere, and of its scales, or of others in
    the pool."""
    address = x.to(tl.int64) * 0
    scale_address = address
    if pages.window is not None:
        WINDOW_ROWS: tl.constexpr = KEYS.WINDOW_ROWS
        # Unsigned, so that dividing by a power of two is a shift.
        entry_rows = pages.entry_rows.to(tl.uint32)
        raw = x < order.num_raw
        window_cells = (
            pages.window_table.data + order.seq.to(tl.int64) * pages.window_table.stride_seq
        )
        if KEYS.SLOTS:
            listed = pages.topk_indices + order.token.to(tl.int64) * pages.topk_stride
            cells = tl.where(raw, window_cells + x, listed + entry)
            flat_index = tl.load(cells, mask=x < stop, other=-1)
            live = flat_index >= 0
            window_index = tl.maximum(flat_index, 0).to(tl.uint32)
            page = tl.where(raw, window_index // WINDOW_ROWS, window_index // entry_rows)
            entry_index = window_index
        else:
            live = (x < stop) & (raw | ((entry >= 0) & (entry < order.num_entries)))
            paged = live
            if kv is not None:
                paged = live & (~raw | (x < order.num_paged))
            # A table may be a ring.
            width = pages.window_table.width
            first_cell = order.low // WINDOW_ROWS // width * width
            window_index = (order.low + x).to(tl.uint32)
            entry_index = entry.to(tl.uint32)
            cell = (window_index // WINDOW_ROWS).to(tl.int32) - first_cell
            cell = tl.where(cell < width, cell, cell - width)
            entry_cells = pages.entry_table + order.seq.to(tl.int64) * pages.table_stride
            entry_cell = (entry_index // entry_rows).to(tl.int32)
            page = tl.load(window_cells + cell, mask=paged & raw, other=0)
            page += tl.load(entry_cells + entry_cell, mask=paged & ~raw, other=0)
        row = tl.where(raw, window_index % WINDOW_ROWS, entry_index % entry_rows).to(tl.int32)
        window_page = pages.window.data + page.to(tl.int64) * pages.window.stride_page
        entry_page = pages.entries.data + page.to(tl.int64) * pages.entries.stride_page
        rows = tl.where(raw, window_page, entry_page)
        if FP8:
            rows += row * ROW_BYTES
            page_rows = tl.where(raw, WINDOW_ROWS, pages.entry_rows)
            scale_bytes = (page_rows - row) * ROW_BYTES + row * SCALE_BYTES
            scale_address = (rows + scale_bytes).to(tl.int64)
        else:
            rows += row * tl.where(raw, pages.window.stride_row, pages.entries.stride_row)
        if kv is not None:
            rows = tl.where(raw & (x >= order.num_paged), _new_rows(x, kv, order), rows)
        address = tl.where(live, rows.to(tl.int64), 0)
    return address, scale_address
