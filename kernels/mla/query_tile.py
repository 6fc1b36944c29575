"""One query tile of ``mla_attention``: the loop over its keys, and how its rows are stored.

A query tile packs the tokens of a sequence with the query heads (row = token * heads + head), so a
tile of latent rows is read once for all of them; its first HEAD_DIM_V channels serve as key and as
value. The keys of a tile come from pages or from the step's own rows, wherever each lies, in one
loop; page ids of the next tile are carried around it (see ``kernels.attention.kernel``).

With few rows in the query tile the products are swapped, S^T = C Q^T and O^T = C^T P^T: keys and
channels fill the 64 rows of a matrix instruction and the heads are its columns, which need no
padding. Then accumulators are [HEAD_DIM_V, BLOCK_M] and scores [BLOCK_N, BLOCK_M].

Source: DeepSeek-V2 (arXiv 2405.04434) 2.1; FlashAttention-2 (arXiv 2307.08691).
"""

import triton
import triton.language as tl

from ..common.query_tiles import fold_sink, load_page, natural_lse, row_pointers
from ..common.tiles import update


@triton.jit
def attend_query_tile(
    q_rows, live, position, pages, new_kv, new_stride, table, table_width,
    low, high, context, scale,
    HEAD_DIM_V: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, DIVIDE: tl.constexpr,
    HOIST: tl.constexpr, ALIGNED: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Attend for one query tile to the keys [low, high); those from ``context`` on are new rows.

    Args:
        q_rows, live, position: [BLOCK_M] pointer, liveness and int32 position of each row.
        pages: ``PagedRows``.
        new_kv: pointer to the step's rows of the sequence, ``new_stride`` elements apart; None: all
            keys are in the pages.
        table, table_width: pointer to the sequence's block table, and its entries.
        low: first key, a multiple of BLOCK_N.
        ALIGNED: pages and new rows start at multiples of 16 bytes, which Triton 3.9 forgets of a
            pointer that is chosen from two.
        ONE_TOKEN: all rows are of one token, which sees all keys.
    """
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM_V)
    rope_dim = HEAD_DIM_V + tl.arange(0, ROPE_DIM)
    q = tl.load(q_rows[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    q_rope = tl.load(q_rows[:, None] + rope_dim[None, :], mask=live[:, None], other=0.0)
    if SWAP:
        acc = tl.zeros([HEAD_DIM_V, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, HEAD_DIM_V], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    paged_high = high
    if new_kv is not None:
        paged_high = tl.minimum(high, context)
    page = load_page(table, table_width, low // BLOCK_N, low < paged_high, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(low, high, BLOCK_N, disable_licm=not HOIST):
        key = start + offs_n
        if HOIST and BLOCK_SIZE < BLOCK_N:
            # Not by a mask: it would be the same in all tiles, and be hoisted into registers that
            # there are not.
            row = key % BLOCK_SIZE
        else:
            # Unsigned, so that dividing by a power of two is a mask.
            row = (key.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        rows = pages.data + (page.to(tl.int64) * pages.stride_page + row * pages.stride_row)
        if new_kv is not None:
            in_pages = key < context
            rows = tl.where(in_pages, rows, new_kv + (key - context).to(tl.int64) * new_stride)
            if ALIGNED:
                rows = tl.multiple_of(rows, 16)
        live_key = key < high
        read = live_key[:, None]
        # What lies in rows that are not live may be NaN: 0 * NaN would reach the output.
        latents = tl.load(rows[:, None] + dim[None, :], mask=read, other=0.0)
        ropes = tl.load(rows[:, None] + rope_dim[None, :], mask=read, other=0.0)
        if ONE_TOKEN:
            visible = read if SWAP else live_key[None, :]
        elif SWAP:
            visible = read & (key[:, None] <= position[None, :])
        else:
            visible = live_key[None, :] & (key[None, :] <= position[:, None])
        acc, row_max, row_sum = update(
            acc, row_max, row_sum, q, latents, q_rope, ropes, visible, scale, start < high,
            SWAP, DIVIDE, HOIST,
        )  # fmt: skip
        more = start + BLOCK_N < paged_high
        page = load_page(table, table_width, start // BLOCK_N + 1, more, BLOCK_SIZE, BLOCK_N)
    return acc, row_max, row_sum


@triton.jit
def store_output(
    acc, row_max, row_sum, out, lse, first_token, token, head, live,
    HEAD_DIM_V: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Store the rows of a query tile, which starts with ``first_token``, as the call's result."""
    first_head = first_token * 0
    out_rows = row_pointers(
        out.data, first_token, first_head, token, head, out.stride_token, out.stride_head
    )
    lse_rows = None
    if lse is not None:
        lse_rows = row_pointers(
            lse.data, first_token, first_head, token, head, lse.stride_token, lse.stride_head
        )
    store_rows(acc, row_max, row_sum, out_rows, lse_rows, live, HEAD_DIM_V, SWAP)


@triton.jit
def store_rows(
    acc, row_max, row_sum, out_rows, lse_rows, live, HEAD_DIM_V: tl.constexpr, SWAP: tl.constexpr
):
    """Normalise and store the rows of a query tile and their lse."""
    factor = fold_sink(row_max, row_sum, float("-inf"))
    dim = tl.arange(0, HEAD_DIM_V)
    dtype = out_rows.dtype.element_ty
    if SWAP:
        values = (acc * factor[None, :]).to(dtype)
        tl.store(out_rows[None, :] + dim[:, None], values, mask=live[None, :])
    else:
        values = (acc * factor[:, None]).to(dtype)
        tl.store(out_rows[:, None] + dim[None, :], values, mask=live[:, None])
    if lse_rows is not None:
        tl.store(lse_rows, natural_lse(row_max, row_sum), mask=live)
