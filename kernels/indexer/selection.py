"""An exact top-k of each row of scores, by counting (``plan``: blocks and levels).

A program passes over one block of a row again and again, and counts how many scores reach each of
three numbers that quarter the range where the topk-th largest may be, until that is found or
exactly topk reach a number. The range is one of integers in the order of fp32, so it is exact after
16 such passes at most, without atomics, and the same on every run. What is above that number is
taken, of what equals it the first; prefix sums give both their positions in ascending order of id.
A row of one block is final; others leave their candidates to the next level, padded with -inf. A
score of NaN counts as infinity.

A pass is a loop over LANES values at a time, so one kernel serves rows of any length: what is short
takes one turn, and where nothing is scored none.
"""

import triton
import triton.language as tl

from ..common.ordering import ordered, score_of
from ..common.tiles import find_sequence
from .scores import visible_entries


@triton.jit
def _bound(cells, first, last, k, LANES: tl.constexpr, GROUPS: tl.constexpr):
    """What the k largest of scores [first, last) reach.

    cells: pointer to fp32. GROUPS: k or more, and divides LANES. So many groups have each a largest
    score; k scores reach the least of these, where the search begins.

    Returns:
        (least, equal, needed): the k largest are those of ``least`` or more, and the first
        ``needed`` of those of ``equal``.
    """
    lane = tl.arange(0, LANES)
    largest = tl.full([LANES], float("-inf"), tl.float32)
    for start in range(first, last, LANES):
        entry = start + lane
        score = tl.load(cells + entry, mask=entry < last, other=float("-inf"))
        largest = tl.maximum(largest, tl.where(score == score, score, float("inf")))
    values = ordered(largest)
    low = tl.min(tl.max(tl.reshape(values, [LANES // GROUPS, GROUPS]), 0), 0)
    high = tl.max(values, 0)
    count = tl.zeros([], tl.int32)  # of scores that reach low, once it is known
    above = tl.zeros([], tl.int32)  # of scores above high
    while (low < high) & (count != k):
        p2 = high - (high - low) // 2
        p1 = p2 - (p2 - low) // 2
        p3 = high - (high - p2) // 2
        s1, s2, s3 = score_of(p1), score_of(p2), score_of(p3)
        # Three counts share 32 bits in a lane, and 64 in their sum: 10 and 21 bits each.
        reached = tl.zeros([LANES], tl.int32)
        for start in range(first, last, LANES):
            entry = start + lane
            score = tl.load(cells + entry, mask=entry < last, other=float("-inf"))
            # NaN is not less than any of them.
            reached += tl.where(
                score < s1, 0, tl.where(score < s2, 0x1, tl.where(score < s3, 0x401, 0x100401))
            )
        sums = (reached & 0x3FF).to(tl.int64) + (((reached >> 10) & 0x3FF).to(tl.int64) << 21)
        sums = tl.sum(sums + ((reached >> 20).to(tl.int64) << 42), 0)
        c1 = (sums & 0x1FFFFF).to(tl.int32)
        c2 = ((sums >> 21) & 0x1FFFFF).to(tl.int32)
        c3 = (sums >> 42).to(tl.int32)
        # The greatest of the three that k scores reach is the new low, the one above it the end.
        end = tl.where(c1 < k, p1, tl.where(c2 < k, p2, p3))
        above = tl.where(c1 < k, c1, tl.where(c2 < k, c2, tl.where(c3 < k, c3, above)))
        high = tl.where(c3 < k, end - 1, high)
        low = tl.where(c3 >= k, p3, tl.where(c2 >= k, p2, tl.where(c1 >= k, p1, low)))
        count = tl.where(c3 >= k, c3, tl.where(c2 >= k, c2, tl.where(c1 >= k, c1, count)))
    # Where exactly k reach low, none needs to be less.
    exact = count == k
    return score_of(tl.where(exact, low, low + 1)), score_of(low), tl.where(exact, 0, k - above)


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
    BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCK_TOPK: tl.constexpr,
):  # fmt: skip
    """Select from one block of a row: of scores, or of the candidates of the level before.

    Args:
        workspace: not read where nothing is scored: no query sees more than ``topk``, and
            ``scores`` are not wanted.
        candidates, next_candidates: elements of the workspace where those that the level before
            kept begin, ``num_rows`` rows of them, and where this level's go. Level 0 reads scores,
            and the last level leaves none.
        scores: where the scores of what is selected go; None: nowhere.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = first_row + tl.program_id(0)
    seq = find_sequence(token, cu_seqlens_q, num_seqs)
    visible = visible_entries(
        seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio
    )
    own_scores = workspace + row * scores_stride
    rank = tl.arange(0, BLOCK_TOPK)
    out_row = out + token.to(tl.int64) * out_stride
    if visible <= topk:
        if (level == 0) & (block == 0):
            tl.store(out_row + rank, tl.where(rank < visible, rank, -1), mask=rank < topk)
            tl.store(lens + token, visible)
            if scores is not None:
                told = scores + token.to(tl.int64) * told_stride + rank
                score = tl.load(own_scores + rank, mask=rank < visible, other=float("-inf"))
                tl.store(told, score, mask=rank < topk)
        return
    size = visible
    for _ in range(0, level):
        # A row of one block was final at that level.
        size = tl.where(size > BLOCK, (size + BLOCK - 1) // BLOCK * topk, 0)
    first = block * BLOCK
    if first >= size:
        return

    last = tl.minimum(first + BLOCK, size)
    cells, ids = own_scores, own_scores.to(tl.pointer_type(tl.int32))
    if level > 0:
        cells = workspace + candidates + row * num_blocks * topk
        ids = cells.to(tl.pointer_type(tl.int32)) + num_rows.to(tl.int64) * num_blocks * topk
    least, equal_to, needed = _bound(cells, first, last, topk, LANES, BLOCK_TOPK)
    kept = workspace + next_candidates + (row * next_blocks + block) * topk
    kept_ids = kept.to(tl.pointer_type(tl.int32)) + num_rows.to(tl.int64) * next_blocks * topk
    seen_above = tl.zeros([], tl.int32)
    seen_equal = tl.zeros([], tl.int32)
    for start in range(first, last, LANES):
        entry = start + tl.arange(0, LANES)
        live = entry < last
        score = tl.load(cells + entry, mask=live, other=float("-inf"))
        if level > 0:
            entry = tl.load(ids + entry, mask=live, other=0)
        value = tl.where(score == score, score, float("inf"))
        above = live & (value >= least)
        equal = live & (value == equal_to)
        # One scan for two counts: those above in the high half, the equal ones in the low half.
        both = (above.to(tl.int32) << 16) + equal.to(tl.int32)
        counts = tl.cumsum(both, 0)
        num_equal = seen_equal + (counts & 0xFFFF)
        position = seen_above + (counts >> 16) + tl.minimum(num_equal, needed) - 1
        taken = above | (equal & (num_equal <= needed))
        total = tl.sum(both, 0)
        seen_above += total >> 16
        seen_equal += total & 0xFFFF
        if size <= BLOCK:
            tl.store(out_row + position, entry, mask=taken)
            if scores is not None:
                told = scores + token.to(tl.int64) * told_stride
                score = tl.load(own_scores + entry, mask=taken, other=0.0)
                tl.store(told + position, score, mask=taken)
        else:
            tl.store(kept + position, score, mask=taken)
            tl.store(kept_ids + position, entry, mask=taken)
    if size <= BLOCK:
        tl.store(lens + token, topk)
    else:
        # The last block may have fewer than topk. What is left of it counts as -inf, and comes behind
        # all scores of that, so that it is never among the topk of a row.
        unused = (rank >= seen_above + tl.minimum(seen_equal, needed)) & (rank < topk)
        tl.store(kept + rank, float("-inf"), mask=unused)
