"""Triton helpers of a query tile: which tokens and heads its rows are, where they lie, and how a
softmax ends."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# True to compute invariants in the loop over keys. Hoisted, the addresses of all loops of a program
# are kept in registers at once; but Triton 3.9 spills unless it may hoist the queries.
RECOMPUTE_INVARIANTS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))


@triton.jit
def rows_of_tile(
    head_tile, num_tokens,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Token within the tile, head within the group and liveness of each row of a query tile."""
    row = tl.arange(0, BLOCK_M)
    token = row // HEADS
    head = head_tile * HEADS + row % HEADS
    live = (row < BLOCK_Q * HEADS) & (token < num_tokens) & (head < GROUP)
    return token, head, live


@triton.jit
def row_pointers(rows, first_token, first_head, token, head):
    """Pointer to each row of a query tile in ``strided.Rows``; 64 bits from the scalars on."""
    tile = rows.data + first_token.to(tl.int64) * rows.stride_token
    tile += first_head.to(tl.int64) * rows.stride_head
    return tile + token.to(tl.int64) * rows.stride_token + head.to(tl.int64) * rows.stride_head


@triton.jit
def to_fp16(q):
    """Rows of queries as fp16, and the factor [rows] that undoes their scaling.

    Powers of two move the largest value of each row to [2^14, 2^15): exact down to 2^-29 of it.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True)
    exponent = tl.maximum(largest >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * up[:, None]).to(tl.float16), down


@triton.jit
def softcapped(scores, inner_scale, outer_scale):
    """outer_scale * tanh(inner_scale * scores), to fp32 accuracy everywhere.

    tanh by exp2 loses its digits near 0, where its series takes over (to x^9).
    """
    x = inner_scale * scores
    square = x * x
    series = 1.0 + square * (
        -1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))
    )
    by_exp = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return outer_scale * tl.where(square < 0.0625, x * series, by_exp)


@triton.jit
def fold_sink(row_max, row_sum, sink):
    """Factor from the unnormalised sum over keys to the output, the sink counted; 0 for an empty
    row. All in log2 units."""
    joint = tl.maximum(row_max, sink)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    total = row_sum * tl.exp2(row_max - base) + tl.exp2(sink - base)
    return tl.where(total > 0.0, tl.exp2(row_max - base) / total, 0.0)


@triton.jit
def natural_lse(row_max, row_sum):
    """Natural-log lse of a running maximum (log2 units) and sum; -inf for an empty row."""
    return tl.where(row_sum > 0.0, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))


@triton.jit
def store_lse(lse, values, first_token, first_head, token, head, live):
    """Store lse [BLOCK_M] of the rows of a query tile in ``strided.Rows``; None: nowhere."""
    if lse is not None:
        rows = row_pointers(lse, first_token, first_head, token, head)
        tl.store(rows, values, mask=live)


@triton.jit
def partial_rows(partial_out, first_lse, row, row_max, row_sum, live, DIM: tl.constexpr):
    """Store lse of partial results ``row`` [BLOCK_M], as `merging` takes them; returns pointers to
    the rows and the factor that normalises them."""
    tl.store(partial_out + first_lse + row, natural_lse(row_max, row_sum), mask=live)
    return partial_out + row * DIM, fold_sink(row_max, row_sum, float("-inf"))


@triton.jit
def find_query_tile(cu_seqlens_q, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """Sequence of a query tile and the tile's first token; sequence s starts at tile
    cu[s] // BLOCK_Q + s."""
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        passed = tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle <= tile
        low = tl.where(passed, middle, low)
        high = tl.where(passed, high, middle)
    return low, (tile - tl.load(cu_seqlens_q + low) // BLOCK_Q - low) * BLOCK_Q
