"""The scores of the lightning indexer over paged index keys.

A program multiplies tiles of keys with the heads of BLOCK_T tokens: keys on the rows of the matrix
instruction, heads on its columns, so that few tokens waste nothing and the sum over heads stays
within four lanes. With PAIR it has the heads of BLOCK_T more tokens beside them, which decode, where
a program takes one token, jumps over: a tile that is on chip serves twice as many, and one kernel
both. Every score is the same chain of operations, so decode and prefill agree to the bit. Page ids of the next tile are carried around the loop (see
``kernels.attention.kernel``). Quantized keys become fp16, the shortest way from e4m3 to a
matrix instruction, and two-byte queries with them, each scaled by a power of two to fit.

Source: DeepSeek-V4, lightning indexer.
"""

import triton
import triton.language as tl

from ..common.tiles import find_sequence, halve_e4m3, widen_e4m3


@triton.jit
def visible_entries(seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio):
    """Entries that a token of sequence ``seq`` sees; 0 for tokens behind the last sequence."""
    real = seq < num_seqs
    last = tl.load(cu_seqlens_q + seq + 1, mask=real, other=0)
    seq_len = tl.load(seq_lens + seq, mask=real, other=0)
    tokens = tl.maximum(seq_len - last + token + 1, 0)
    return tl.where(real, tl.minimum(tokens // compress_ratio, num_entries), 0)


@triton.jit
def _load_page(table, entry, high, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page id of the tile that begins at ``entry``; 0 for what is not read.

    Where a page is no multiple of a tile: the page id of each key of the tile.
    """
    if ROWS % BLOCK_N != 0:
        entry = entry + tl.arange(0, BLOCK_N)
    return tl.load(table + entry // ROWS, mask=entry < high, other=0)


@triton.jit
def _to_half(q):
    """Columns of two-byte queries as fp16, and the factors [1, columns] that undo their scaling.

    Powers of two move the largest value of a column to [2^14, 2^15). Exact for all values down to
    2^-29 of the largest of a column.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 0).to(tl.int32, bitcast=True)
    # Of the exponent alone, within what leaves both factors normal numbers; the bits of 2^x are
    # (x + 127) << 23.
    exponent = tl.maximum(largest >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)[None, :]
    return (q.to(tl.float32) * up).to(tl.float16), down


@triton.jit
def _load_queries(
    q, weights, first_token, stop_token, q_stride_token, q_stride_head, weights_stride,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_T: tl.constexpr,
    HALF: tl.constexpr, HARDWARE_FP8: tl.constexpr,
):  # fmt: skip
    """Heads of BLOCK_T tokens as columns, and their weights [1, columns]; those from stop_token on
    are zeros."""
    column = tl.arange(0, BLOCK_T * BLOCK_HEADS)
    token = first_token + column // BLOCK_HEADS
    head = column % BLOCK_HEADS
    live = (head < HEADS) & (token < stop_token)
    dim = tl.arange(0, INDEX_DIM)
    rows = q + token.to(tl.int64) * q_stride_token + head * q_stride_head
    tile = tl.load(rows[None, :] + dim[:, None], mask=live[None, :], other=0.0)
    rows = weights + token.to(tl.int64) * weights_stride + head
    weight = tl.load(rows, mask=live, other=0.0)[None, :]
    if HALF:
        tile, factor = _to_half(tile)
        weight *= factor if HARDWARE_FP8 else factor * 256.0
    return tile, weight


@triton.jit
def _scored_entries(
    seq, token, stop_token, topk, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio
):
    """Entries that are scored for each token: 0 of another sequence, and where all are taken."""
    visible = visible_entries(
        seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio
    )
    own = (token >= tl.load(cu_seqlens_q + seq)) & (token < tl.load(cu_seqlens_q + seq + 1))
    return tl.where(own & (token < stop_token) & (visible > topk), visible, 0)


@triton.jit
def _write_scores(
    out, tile, scale, q_tile, weight, entries, visible,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of keys for BLOCK_T tokens, whose rows begin at ``out``."""
    products = tl.dot(tile, q_tile, input_precision="ieee")  # [BLOCK_N, BLOCK_T * BLOCK_HEADS]
    products = tl.maximum(products, 0.0) * weight
    score = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_T, BLOCK_HEADS]), 2)
    if scale is not None:
        score *= scale[:, None]
    tl.store(out[None, :] + entries[:, None], score, mask=entries[:, None] < visible[None, :])


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "first_row",
        "last_row",
        "num_entries",
        "entries_per_program",
        "topk",
        "tokens",
    ]
)
def index_scores_kernel(
    q, weights, keys, block_table, seq_lens, cu_seqlens_q, workspace,
    num_seqs, first_row, last_row, num_entries, entries_per_program, topk, tokens, compress_ratio,
    q_stride_token, q_stride_head, weights_stride, table_stride, stride_page, stride_row,
    scores_stride,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, PAIR: tl.constexpr, BLOCK_N: tl.constexpr, HARDWARE_FP8: tl.constexpr,
):  # fmt: skip
    """Score the entries of one range for the tokens of one tile.

    tokens: of a tile, up to BLOCK_T, or twice as many with PAIR.
    """
    first_token = first_row + tl.program_id(0) * tokens
    stop_token = tl.minimum(first_token + tokens, last_row)
    QUANTIZED: tl.constexpr = keys.dtype.element_ty == tl.uint8
    HALF: tl.constexpr = QUANTIZED and q.dtype.element_ty != tl.float32
    token = first_token + tl.arange(0, BLOCK_T)
    out = workspace + (token - first_row).to(tl.int64) * scores_stride
    q_tile, weight = _load_queries(
        q, weights, first_token, stop_token, q_stride_token, q_stride_head, weights_stride,
        HEADS, BLOCK_HEADS, INDEX_DIM, BLOCK_T, HALF, HARDWARE_FP8,
    )  # fmt: skip
    if PAIR:
        token_b = token + BLOCK_T
        out_b = workspace + (token_b - first_row).to(tl.int64) * scores_stride
        q_tile_b, weight_b = _load_queries(
            q, weights, first_token + BLOCK_T, stop_token, q_stride_token, q_stride_head,
            weights_stride, HEADS, BLOCK_HEADS, INDEX_DIM, BLOCK_T, HALF, HARDWARE_FP8,
        )  # fmt: skip

    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, INDEX_DIM)
    key_offsets = (offs_n * stride_row)[:, None] + dim[None, :]
    first_seq = find_sequence(first_token, cu_seqlens_q, num_seqs)
    last_seq = tl.minimum(find_sequence(stop_token - 1, cu_seqlens_q, num_seqs), num_seqs - 1)
    # Tokens of several sequences share a tile at their borders only; each sequence is then a loop
    # of its own.
    for seq in range(first_seq, last_seq + 1):
        visible = _scored_entries(
            seq, token, stop_token, topk, seq_lens, cu_seqlens_q, num_seqs, num_entries,
            compress_ratio,
        )  # fmt: skip
        most = tl.max(visible, 0)
        if PAIR:
            visible_b = _scored_entries(
                seq, token_b, stop_token, topk, seq_lens, cu_seqlens_q, num_seqs, num_entries,
                compress_ratio,
            )  # fmt: skip
            most_b = tl.max(visible_b, 0)
            most = tl.maximum(most, most_b)
        low = tl.program_id(1) * entries_per_program
        high = tl.minimum(most, low + entries_per_program)
        table = block_table + (tl.zeros([], tl.int64) + seq) * table_stride
        page = _load_page(table, low, high, ROWS, BLOCK_N)
        for entry in tl.range(low, high, BLOCK_N, disable_licm=True):
            entries = entry + offs_n
            page_id = page.to(tl.int64)
            if ROWS % BLOCK_N == 0:
                row = entry % ROWS
                pointers = keys + (page_id * stride_page + row * stride_row) + key_offsets
                row_ids = row + offs_n
            else:
                row_ids = entries % ROWS
                rows = keys + (page_id * stride_page + row_ids * stride_row)
                pointers = rows[:, None] + dim[None, :]
            # Past the end these are other rows of real pages: their scores are not stored, so they
            # may hold anything.
            tile = tl.load(pointers)
            scale = None
            if QUANTIZED:
                # The scales of a page lie behind its keys.
                scales = (keys + ROWS * stride_row).to(tl.pointer_type(tl.float32))
                scale = tl.load(scales + page_id * (stride_page // 4) + row_ids)
                if HALF:
                    tile = halve_e4m3(tile, HARDWARE_FP8)
                else:
                    tile = widen_e4m3(tile, tl.float32, HARDWARE_FP8)
            _write_scores(
                out, tile, scale, q_tile, weight, entries, tl.minimum(visible, high),
                BLOCK_N, BLOCK_T, BLOCK_HEADS,
            )  # fmt: skip
            if PAIR:
                end_b = tl.minimum(visible_b, high)
                if entry < most_b:
                    _write_scores(
                        out_b, tile, scale, q_tile_b, weight_b, entries, end_b,
                        BLOCK_N, BLOCK_T, BLOCK_HEADS,
                    )  # fmt: skip
            page = _load_page(table, entry + BLOCK_N, high, ROWS, BLOCK_N)
