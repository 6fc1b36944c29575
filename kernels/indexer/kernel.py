"""Scores of the lightning indexer over paged index keys, and an exact, deterministic top-k of them.

Scores: a program multiplies tiles of keys (rows) with the heads of BLOCK_T tokens (columns). Decode
and prefill run the same kernel, so a score has the same bits in both. Selection: a radix select, a
digit of 8 bits at a time, of the k-th largest of a block; all above it are taken, and of its equals
the first. Rows of more than BLOCK scores take two launches: the best ``topk`` of each block, then
the best of these candidates. Source: Alabi et al., Fast k-selection algorithms for GPUs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common import launching, strided
from ..common.bits import ordered, widen
from ..common.launching import arch_and_sms
from ..common.tile_shapes import PROGRAMS_PER_SM, next_power_of_2
from ..latent_write import paged_rows

# (keys of a tile, columns of heads, warps) of 16-bit queries, and of fp32 ones.
TILE, FP32_TILE = (64, 64, 4), (16, 64, 8)
# Fewest entries that a program scores.
MIN_SCORED = 512
# Scores that a program of the selection looks at together.
LANES = 2048
DIGITS = tl.constexpr(256)
# Sequences whose ends a program looks at together.
SEQS = tl.constexpr(128)
# Scores that one program selects from.
BLOCK = 8192
# fp32 elements of the workspace that is allocated (64 MiB), unless one query needs more.
WORKSPACE_NUMEL = 1 << 24
# Scores of a query begin at multiples of this.
ROW_ALIGNMENT = 64


class Plan(NamedTuple):
    """Division of a call.

    The workspace has scores [chunk, row_numel] fp32, then, where rows have several blocks, the
    scores and the ids int32 of their candidates, [chunk, num_blocks, topk] each.
    """

    num_entries: int  # most entries of a sequence
    row_numel: int  # elements from the scores of one query to those of the next
    num_blocks: int  # blocks of a row
    query_numel: int  # elements of the workspace for one query; 0 if nothing is scored
    chunk: int  # queries at a time; 0 if the workspace is too small for one


def make_plan(
    num_tokens: int, topk: int, compress_ratio: int, max_seq_len: int, available: int | None = None
) -> Plan:
    """Plan a call; available: elements of the caller's workspace, None = allocated for the call."""
    num_entries = max_seq_len // compress_ratio
    row_numel = -(-num_entries // ROW_ALIGNMENT) * ROW_ALIGNMENT
    num_blocks = max(1, -(-num_entries // BLOCK))
    if num_entries <= topk:
        return Plan(num_entries, row_numel, 1, 0, num_tokens)
    query_numel = row_numel + (2 * topk * num_blocks if num_blocks > 1 else 0)
    if available is None:
        available = max(WORKSPACE_NUMEL, query_numel)
    chunk = min(num_tokens, available // query_numel)
    return Plan(num_entries, row_numel, num_blocks, query_numel, chunk)


@triton.jit
def find_sequence(token, cu_seqlens_q, num_seqs, BLOCK: tl.constexpr):
    """The sequence of a token: how many sequences end at it or before.

    ``num_seqs`` for a token behind the last.
    """
    found = tl.zeros([], tl.int32)
    for start in range(0, num_seqs, BLOCK):
        seq = start + tl.arange(0, BLOCK)
        end = tl.load(cu_seqlens_q + 1 + seq, mask=seq < num_seqs, other=2147483647)
        found += tl.sum((end <= token).to(tl.int32), 0)
    return found


@triton.jit
def _visible_entries(seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio):
    """Entries that a token of sequence ``seq`` sees; 0 for tokens behind the last sequence."""
    real = seq < num_seqs
    last = tl.load(cu_seqlens_q + seq + 1, mask=real, other=0)
    seq_len = tl.load(seq_lens + seq, mask=real, other=0)
    tokens = tl.maximum(seq_len - last + token + 1, 0)
    return tl.where(real, tl.minimum(tokens // compress_ratio, num_entries), 0)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "first_row", "last_row", "num_entries", "entries_per_program", "topk", "tokens",
    ]
)  # fmt: skip
def index_scores_kernel(
    q, weights, keys, block_table, seq_lens, cu_seqlens_q, workspace,
    num_seqs, first_row, last_row, num_entries, entries_per_program, topk, tokens, compress_ratio,
    row_numel,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, HARDWARE_FP8: tl.constexpr,
):  # fmt: skip
    """Score entries_per_program entries for ``tokens`` tokens, BLOCK_T at most.

    Queries that see at most ``topk`` entries are not scored.
    """
    first_token = first_row + tl.program_id(0) * tokens
    stop_token = tl.minimum(first_token + tokens, last_row)
    column = tl.arange(0, BLOCK_T * BLOCK_HEADS)
    column_token = first_token + column // BLOCK_HEADS
    head = column % BLOCK_HEADS
    live = (head < HEADS) & (column_token < stop_token)
    dim = tl.arange(0, INDEX_DIM)
    rows = q.data + column_token.to(tl.int64) * q.stride_token + head * q.stride_head
    q_tile = tl.load(rows[None, :] + dim[:, None], mask=live[None, :], other=0.0)
    rows = weights.data + column_token.to(tl.int64) * weights.stride_row + head
    weight = tl.load(rows, mask=live, other=0.0)[None, :]

    token = first_token + tl.arange(0, BLOCK_T)
    out = workspace + (token - first_row).to(tl.int64) * row_numel
    offs_n = tl.arange(0, BLOCK_N)
    first_seq = find_sequence(first_token, cu_seqlens_q, num_seqs, SEQS)
    last_seq = find_sequence(stop_token - 1, cu_seqlens_q, num_seqs, SEQS)
    last_seq = tl.minimum(last_seq, num_seqs - 1)
    # A tile at a border of sequences has tokens of several; each sequence is a loop of its own.
    for seq in range(first_seq, last_seq + 1):
        visible = _visible_entries(
            seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio
        )
        own = (token >= tl.load(cu_seqlens_q + seq)) & (token < tl.load(cu_seqlens_q + seq + 1))
        visible = tl.where(own & (token < stop_token) & (visible > topk), visible, 0)
        low = tl.program_id(1) * entries_per_program
        high = tl.minimum(tl.max(visible, 0), low + entries_per_program)
        end = tl.minimum(visible, high)
        table = block_table.data + (tl.zeros([], tl.int64) + seq) * block_table.stride_seq
        for entry in tl.range(low, high, BLOCK_N):
            entries = entry + offs_n
            row = entries % ROWS
            page_id = tl.load(table + entries // ROWS, mask=entries < high, other=0).to(tl.int64)
            key = keys.data + (page_id * keys.stride_page + row * keys.stride_row)
            # Past the end these are other rows of real pages, whose scores are not stored.
            tile = tl.load(key[:, None] + dim[None, :])
            if keys.data.dtype.element_ty == tl.uint8:
                tile = widen(tile, q.data.dtype.element_ty, HARDWARE_FP8)
            products = tl.dot(tile, q_tile, input_precision="ieee")
            products = tl.maximum(products, 0.0) * weight
            score = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_T, BLOCK_HEADS]), 2)
            if keys.data.dtype.element_ty == tl.uint8:
                # The scales of a page lie behind its keys.
                scales = (keys.data + ROWS * keys.stride_row).to(tl.pointer_type(tl.float32))
                score *= tl.load(scales + (page_id * (keys.stride_page // 4) + row))[:, None]
            stored = entries[:, None] < end[None, :]
            tl.store(out[None, :] + entries[:, None], score, mask=stored)


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
        "num_seqs", "first_row", "num_rows", "num_blocks", "num_entries", "row_numel",
    ]
)  # fmt: skip
def index_select_kernel(
    workspace, out, lens, seq_lens, cu_seqlens_q,
    num_seqs, first_row, num_rows, num_blocks, num_entries, topk, compress_ratio, row_numel,
    out_stride,
    MERGE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCK_TOPK: tl.constexpr,
):  # fmt: skip
    """Select from one block of a row's scores; MERGE: from the candidates of all its blocks."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = first_row + tl.program_id(0)
    seq = find_sequence(token, cu_seqlens_q, num_seqs, SEQS)
    visible = _visible_entries(
        seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio
    )
    rank = tl.arange(0, BLOCK_TOPK)
    out_row = out + token.to(tl.int64) * out_stride
    kept = workspace + num_rows.to(tl.int64) * row_numel + row * num_blocks * topk
    kept_ids = kept.to(tl.pointer_type(tl.int32)) + num_rows.to(tl.int64) * num_blocks * topk
    if MERGE:
        if visible <= BLOCK:  # the first launch selected
            return
        cells, first, last = kept, 0, (visible + BLOCK - 1) // BLOCK * topk
        final = True
    else:
        if visible <= topk:
            if block == 0:
                tl.store(out_row + rank, tl.where(rank < visible, rank, -1), mask=rank < topk)
                tl.store(lens + token, visible)
            return
        cells, first = workspace + row * row_numel, block * BLOCK
        if first >= visible:
            return
        last = tl.minimum(first + BLOCK, visible)
        final = visible <= BLOCK
    bound, needed = _kth_largest(cells, first, last, topk, LANES)
    kept += block * topk
    kept_ids += block * topk
    seen_above = tl.zeros([], tl.int32)
    seen_equal = tl.zeros([], tl.int32)
    for start in range(first, last, LANES):
        entry = start + tl.arange(0, LANES)
        live = entry < last
        score, number = _load_ordered(cells, entry, last)
        if MERGE:
            entry = tl.load(kept_ids + entry, mask=live, other=0)
        above = live & (number > bound)
        equal = live & (number == bound)
        num_above = seen_above + tl.cumsum(above.to(tl.int32), 0)
        num_equal = seen_equal + tl.cumsum(equal.to(tl.int32), 0)
        taken = above | (equal & (num_equal <= needed))
        position = num_above + tl.minimum(num_equal, needed) - 1
        seen_above += tl.sum(above.to(tl.int32), 0)
        seen_equal += tl.sum(equal.to(tl.int32), 0)
        if final:
            tl.store(out_row + position, entry, mask=taken)
        else:
            tl.store(kept + position, score, mask=taken)
            tl.store(kept_ids + position, entry, mask=taken)
    if final:
        tl.store(lens + token, topk)
    else:
        # The last block may have fewer than topk. Padding follows all scores of the row, so it is
        # never among the topk of a row.
        unused = (rank >= seen_above + tl.minimum(seen_equal, needed)) & (rank < topk)
        tl.store(kept + rank, float("-inf"), mask=unused)


def launch(
    q, weights, pages, block_table, seq_lens, cu_seqlens_q, topk, compress_ratio, max_seqlen_q,
    plan, out, lens, workspace,
) -> None:  # fmt: skip
    """For each chunk of queries score the keys, if needed, and select."""
    (num_tokens, num_heads, _), num_seqs = q.shape, seq_lens.shape[0]
    arch, num_sms = arch_and_sms(q)
    block_n, columns, num_warps = FP32_TILE if q.element_size() == 4 else TILE
    block_heads = max(16, next_power_of_2(num_heads))
    block_t = max(1, columns // block_heads)
    tokens = 1 if max_seqlen_q <= 1 else block_t
    with torch.cuda.device_of(q):
        for first in range(0, num_tokens, max(1, plan.chunk)):
            last = min(first + plan.chunk, num_tokens)
            tiles = triton.cdiv(last - first, tokens)
            # More programs than run at once even out the lengths of a batch.
            entries = max(MIN_SCORED, plan.num_entries * tiles // (8 * PROGRAMS_PER_SM * num_sms))
            entries = triton.cdiv(entries, block_n) * block_n
            if plan.query_numel:
                launching.launch(
                    index_scores_kernel, (tiles, triton.cdiv(plan.num_entries, entries)),
                    q=strided.rows(q), weights=strided.matrix(weights), keys=paged_rows(pages),
                    block_table=strided.table(block_table), seq_lens=seq_lens,
                    cu_seqlens_q=cu_seqlens_q, workspace=workspace, num_seqs=num_seqs,
                    first_row=first, last_row=last, num_entries=plan.num_entries,
                    entries_per_program=entries, topk=topk, tokens=tokens,
                    compress_ratio=compress_ratio, row_numel=plan.row_numel, HEADS=num_heads,
                    BLOCK_HEADS=block_heads, INDEX_DIM=pages.index_dim,
                    ROWS=pages.storage_block_size, BLOCK_T=block_t, BLOCK_N=block_n,
                    HARDWARE_FP8=arch.widens_e4m3, num_warps=num_warps, num_stages=3,
                )  # fmt: skip
            for merge in (False, True) if plan.num_blocks > 1 else (False,):
                launching.launch(
                    index_select_kernel, (last - first, 1 if merge else plan.num_blocks),
                    workspace=workspace, out=out, lens=lens, seq_lens=seq_lens,
                    cu_seqlens_q=cu_seqlens_q, num_seqs=num_seqs, first_row=first,
                    num_rows=plan.chunk, num_blocks=plan.num_blocks, num_entries=plan.num_entries,
                    topk=topk, compress_ratio=compress_ratio, row_numel=plan.row_numel,
                    out_stride=out.stride(0), MERGE=merge, BLOCK=BLOCK, LANES=LANES,
                    BLOCK_TOPK=next_power_of_2(topk), num_warps=8,
                )  # fmt: skip
