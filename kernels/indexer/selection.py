"""An exact top-k of each row of scores, by bisection (``plan``: blocks and levels).

A program holds one block of a row in registers, as unsigned integers of the same order, and counts
how many reach the middle of what may be the topk-th largest, until that is found or exactly topk
reach a number. Exact, no atomics, the same on every run, and 32 counts at most. What is above that
number is taken, of what equals it the first; a prefix sum gives both their positions in ascending
order of id. A row of one block is final; others leave their candidates, padded with the value 0, to
the next level.
"""

import triton
import triton.language as tl

from ..common.ordering import ordered, threshold
from ..common.tiles import find_sequence
from .scores import visible_entries


@triton.jit(
    do_not_specialize=[
        "candidates", "next_candidates", "num_seqs", "num_rows", "first_row", "num_entries",
        "level", "num_blocks", "next_blocks",
    ]
)  # fmt: skip
def index_select_kernel(
    workspace, candidates, next_candidates, out, lens, scores, seq_lens, cu_seqlens_q,
    num_seqs, num_rows, first_row, num_entries, level, num_blocks, next_blocks, topk,
    compress_ratio, scores_stride, out_stride, told_stride,
    BLOCK: tl.constexpr, BLOCK_TOPK: tl.constexpr,
):  # fmt: skip
    """Select from one block of a row: of scores, or of the candidates of the level before.

    Args:
        candidates, next_candidates: elements of the workspace where those that the level before
            kept begin, ``num_rows`` rows of them, and where this level's go. Level 0 reads scores,
            and the last level leaves none. None: there is one level only.
        scores: where the scores of what is selected go; None: nowhere.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = first_row + tl.program_id(0)
    seq = find_sequence(token, cu_seqlens_q, num_seqs)
    visible = visible_entries(
        seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio
    )
    rank = tl.arange(0, BLOCK_TOPK)
    out_row = out + token.to(tl.int64) * out_stride
    if visible <= topk:
        if (level == 0) & (block == 0):
            tl.store(out_row + rank, tl.where(rank < visible, rank, -1), mask=rank < topk)
            tl.store(lens + token, visible)
            if scores is not None:
                told = scores + token.to(tl.int64) * told_stride + rank
                score = tl.full([BLOCK_TOPK], float("-inf"), tl.float32)
                if workspace is not None:
                    cells = workspace + row * scores_stride + rank
                    score = tl.load(cells, mask=rank < visible, other=float("-inf"))
                tl.store(told, score, mask=rank < topk)
        return
    # Without a workspace no query sees more than topk.
    if workspace is not None:
        size = visible
        for _ in range(0, level):
            # A row of one block was final at that level.
            size = tl.where(size > BLOCK, (size + BLOCK - 1) // BLOCK * topk, 0)
        if block * BLOCK >= size:
            return

        entry = block * BLOCK + tl.arange(0, BLOCK)
        live = entry < size
        if candidates is None or level == 0:
            score = tl.load(workspace + row * scores_stride + entry, mask=live, other=0.0)
            value = tl.where(live, ordered(score), 0)
        else:
            cells = workspace + candidates + row * num_blocks * topk + entry
            value = tl.load(cells, mask=live, other=0.0).to(tl.uint32, bitcast=True)
            cells += num_rows.to(tl.int64) * num_blocks * topk
            entry = tl.load(cells, mask=live, other=0.0).to(tl.int32, bitcast=True)
        bound = threshold(value, topk, BLOCK_TOPK)
        # 0 is no score: what is past the end, and what a block of fewer than topk left unused.
        above = value > bound
        equal = (value == bound) & (value > 0)
        needed = topk - tl.sum(above.to(tl.int32), 0)
        # One scan for two counts: those above in the high half, the equal ones in the low half.
        counts = tl.cumsum((above.to(tl.int32) << 16) + equal.to(tl.int32), 0)
        num_equal = counts & 0xFFFF
        position = (counts >> 16) + tl.minimum(num_equal, needed) - 1
        taken = above | (equal & (num_equal <= needed))
        if size <= BLOCK:
            tl.store(out_row + position, entry, mask=taken)
            tl.store(lens + token, topk)
            if scores is not None:
                score = tl.load(workspace + row * scores_stride + entry, mask=taken, other=0.0)
                told = scores + token.to(tl.int64) * told_stride
                tl.store(told + position, score, mask=taken)
        elif next_candidates is not None:
            kept = workspace + next_candidates + (row * next_blocks + block) * topk
            tl.store(kept + position, value.to(tl.float32, bitcast=True), mask=taken)
            # The last block may have fewer than topk.
            unused = (rank >= tl.sum(taken.to(tl.int32), 0)) & (rank < topk)
            tl.store(kept + rank, 0.0, mask=unused)
            kept += num_rows.to(tl.int64) * next_blocks * topk
            tl.store(kept + position, entry.to(tl.float32, bitcast=True), mask=taken)
