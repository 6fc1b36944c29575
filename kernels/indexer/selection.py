"""An exact, deterministic top-k of each row of scores: radix select over blocks and levels (``plan``).

A program finds the k-th largest of a block, a digit of 8 bits at a time from counts of the digits,
in the order of fp32 as integers. All above it are taken, and of its equals the first. Prefix sums
give their positions in ascending order of id. A row of one block is final; others leave their
candidates to the next level, padded with -inf. NaN counts as infinity.

Source: radix selection (Alabi et al., Fast k-selection algorithms for graphics processing units).
"""

import triton
import triton.language as tl

from ..common.bits import ordered

DIGITS = tl.constexpr(256)
# Sequences whose ends a program looks at together.
CHUNK = tl.constexpr(128)


@triton.jit
def find_sequence(token, cu_seqlens_q, num_seqs):
    """The sequence of a token: how many sequences end at it or before.

    ``num_seqs`` for a token behind the last.
    """
    found = tl.zeros([], tl.int32)
    for start in range(0, num_seqs, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        end = tl.load(cu_seqlens_q + 1 + seq, mask=seq < num_seqs, other=2147483647)
        found += tl.sum((end <= token).to(tl.int32), 0)
    return found


@triton.jit
def visible_entries(seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio):
    """Entries that a token of sequence ``seq`` sees; 0 for tokens behind the last sequence."""
    real = seq < num_seqs
    last = tl.load(cu_seqlens_q + seq + 1, mask=real, other=0)
    seq_len = tl.load(seq_lens + seq, mask=real, other=0)
    tokens = tl.maximum(seq_len - last + token + 1, 0)
    return tl.where(real, tl.minimum(tokens // compress_ratio, num_entries), 0)


@triton.jit
def _load_ordered(cells, entry, last):
    """(scores fp32, the same as uint32 in the order of fp32)."""
    score = tl.load(cells + entry, mask=entry < last, other=float("-inf"))
    return score, ordered(tl.where(score == score, score, float("inf")))


@triton.jit
def _kth_largest(cells, first, last, k, LANES: tl.constexpr):
    """(k-th largest of scores [first, last) as ``ordered``, how many of its equals are among the k
    largest); 0 if there are fewer than k scores."""
    found = tl.zeros([], tl.uint32)
    needed = k
    digit = tl.arange(0, DIGITS)
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([DIGITS], tl.int32)
        for start in range(first, last, LANES):
            entry = start + tl.arange(0, LANES)
            _, number = _load_ordered(cells, entry, last)
            # Numbers with the digits found so far.
            same = (entry < last) & ((((number ^ found) >> shift) >> 8) == 0)
            counts += tl.histogram(((number >> shift) & 255).to(tl.int32), DIGITS, mask=same)
        reached = tl.cumsum(counts, 0, reverse=True)
        best = tl.max(tl.where(reached >= needed, digit, 0), 0)
        needed -= tl.sum(tl.where(digit > best, counts, 0), 0)
        found |= best.to(tl.uint32) << shift
    return found, needed


@triton.jit(
    do_not_specialize=[
        "num_seqs", "first_row", "num_rows", "level", "num_blocks", "next_blocks", "num_entries",
        "row_stride", "candidates", "next_candidates",
    ]
)  # fmt: skip
def index_select_kernel(
    workspace, candidates, next_candidates, out, lens, scores, seq_lens, cu_seqlens_q,
    num_seqs, first_row, num_rows, level, num_blocks, next_blocks, num_entries, topk,
    compress_ratio, row_stride, out_stride, scores_stride,
    BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCK_TOPK: tl.constexpr,
):  # fmt: skip
    """Select from one block of a row: of scores at level 0, else of candidates.

    Args:
        workspace: not read if nothing is scored.
        candidates, next_candidates: first elements of the candidates of the level before, num_rows
            rows, and of this level. The last level leaves none.
        scores: destination of the selected scores, or None.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = first_row + tl.program_id(0)
    seq = find_sequence(token, cu_seqlens_q, num_seqs)
    visible = visible_entries(
        seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio
    )
    own_scores = workspace + row * row_stride
    rank = tl.arange(0, BLOCK_TOPK)
    out_row = out + token.to(tl.int64) * out_stride
    if visible <= topk:
        if (level == 0) & (block == 0):
            tl.store(out_row + rank, tl.where(rank < visible, rank, -1), mask=rank < topk)
            tl.store(lens + token, visible)
            if scores is not None:
                score = tl.load(own_scores + rank, mask=rank < visible, other=float("-inf"))
                told = scores + token.to(tl.int64) * scores_stride + rank
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
    bound, needed = _kth_largest(cells, first, last, topk, LANES)
    kept = workspace + next_candidates + (row * next_blocks + block) * topk
    kept_ids = kept.to(tl.pointer_type(tl.int32)) + num_rows.to(tl.int64) * next_blocks * topk
    seen_above = tl.zeros([], tl.int32)
    seen_equal = tl.zeros([], tl.int32)
    for start in range(first, last, LANES):
        entry = start + tl.arange(0, LANES)
        live = entry < last
        score, number = _load_ordered(cells, entry, last)
        if level > 0:
            entry = tl.load(ids + entry, mask=live, other=0)
        above = live & (number > bound)
        equal = live & (number == bound)
        num_above = seen_above + tl.cumsum(above.to(tl.int32), 0)
        num_equal = seen_equal + tl.cumsum(equal.to(tl.int32), 0)
        taken = above | (equal & (num_equal <= needed))
        position = num_above + tl.minimum(num_equal, needed) - 1
        seen_above += tl.sum(above.to(tl.int32), 0)
        seen_equal += tl.sum(equal.to(tl.int32), 0)
        if size <= BLOCK:
            tl.store(out_row + position, entry, mask=taken)
            if scores is not None:
                score = tl.load(own_scores + entry, mask=taken, other=0.0)
                told = scores + token.to(tl.int64) * scores_stride
                tl.store(told + position, score, mask=taken)
        else:
            tl.store(kept + position, score, mask=taken)
            tl.store(kept_ids + position, entry, mask=taken)
    if size <= BLOCK:
        tl.store(lens + token, topk)
    else:
        # The last block may have fewer than topk. Padding follows all scores of the row, so it is
        # never among the topk of a row.
        unused = (rank >= seen_above + tl.minimum(seen_equal, needed)) & (rank < topk)
        tl.store(kept + rank, float("-inf"), mask=unused)
