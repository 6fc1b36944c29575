"""Scores of the lightning indexer over paged index keys, and the launches of ``index_topk``.

    score(t, w) = sum_h weights[t, h] * relu(q[t, h] . key_w)
    over the entries w < visible(t) = floor((p_t + 1) / compress_ratio)

A program multiplies tiles of keys (rows) with the heads of BLOCK_T tokens (columns). Decode and
prefill run the same kernel, so a score has the same bits in both. The page id of the next tile is
carried around the loop.

Layout of the workspace: scores [chunk, row_numel] fp32, entries < visible(t) written; then the
candidates of each level but the last, scores fp32 and ids int32, both [chunk, blocks, topk].

Source: DeepSeek-V4, lightning indexer.
"""

import torch
import triton
import triton.language as tl

from ..common import launching
from ..common.bits import widen
from ..common.latent_pages import IndexPages
from ..common.launching import arch_and_sms
from ..common.tile_shapes import PROGRAMS_PER_SM, next_power_of_2
from .plan import IndexPlan
from .selection import find_sequence, index_select_kernel, visible_entries

# (keys of a tile, columns of heads, warps) of 16-bit queries, and of fp32 ones.
TILE, FP32_TILE = (64, 64, 4), (32, 64, 8)
# Fewest entries that a program scores.
MIN_SCORED = 512
# Scores that a program of the selection looks at together.
LANES = 2048


@triton.jit
def _load_page(table, entry, high, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page id of the tile that begins at ``entry``, or of each of its keys if a tile may span pages;
    0 from ``high`` on."""
    if ROWS % BLOCK_N != 0:
        entry = entry + tl.arange(0, BLOCK_N)
    return tl.load(table + entry // ROWS, mask=entry < high, other=0)


@triton.jit(do_not_specialize=["num_seqs", "first_row", "last_row", "num_entries", "entries_per_program", "topk", "tokens"])  # fmt: skip
def index_scores_kernel(
    q, weights, keys, block_table, seq_lens, cu_seqlens_q, workspace,
    num_seqs, first_row, last_row, num_entries, entries_per_program, topk, tokens, compress_ratio,
    q_stride_token, q_stride_head, weights_stride, table_stride, stride_page, stride_row,
    scores_stride,
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
    rows = q + column_token.to(tl.int64) * q_stride_token + head * q_stride_head
    q_tile = tl.load(rows[None, :] + dim[:, None], mask=live[None, :], other=0.0)
    rows = weights + column_token.to(tl.int64) * weights_stride + head
    weight = tl.load(rows, mask=live, other=0.0)[None, :]

    token = first_token + tl.arange(0, BLOCK_T)
    out = workspace + (token - first_row).to(tl.int64) * scores_stride
    offs_n = tl.arange(0, BLOCK_N)
    first_seq = find_sequence(first_token, cu_seqlens_q, num_seqs)
    last_seq = tl.minimum(find_sequence(stop_token - 1, cu_seqlens_q, num_seqs), num_seqs - 1)
    # A tile at a border of sequences has tokens of several; each sequence is a loop of its own.
    for seq in range(first_seq, last_seq + 1):
        visible = visible_entries(
            seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio
        )
        own = (token >= tl.load(cu_seqlens_q + seq)) & (token < tl.load(cu_seqlens_q + seq + 1))
        visible = tl.where(own & (token < stop_token) & (visible > topk), visible, 0)
        low = tl.program_id(1) * entries_per_program
        high = tl.minimum(tl.max(visible, 0), low + entries_per_program)
        end = tl.minimum(visible, high)
        table = block_table + (tl.zeros([], tl.int64) + seq) * table_stride
        page = _load_page(table, low, high, ROWS, BLOCK_N)
        for entry in tl.range(low, high, BLOCK_N):
            entries = entry + offs_n
            row = entries % ROWS
            page_id = page.to(tl.int64)
            key = keys + (page_id * stride_page + row * stride_row)
            # Past the end these are other rows of real pages, whose scores are not stored.
            tile = tl.load(key[:, None] + dim[None, :])
            if keys.dtype.element_ty == tl.uint8:
                tile = widen(tile, q.dtype.element_ty, HARDWARE_FP8)
            products = tl.dot(tile, q_tile, input_precision="ieee")
            products = tl.maximum(products, 0.0) * weight
            score = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_T, BLOCK_HEADS]), 2)
            if keys.dtype.element_ty == tl.uint8:
                # The scales of a page lie behind its keys.
                scales = (keys + ROWS * stride_row).to(tl.pointer_type(tl.float32))
                score *= tl.load(scales + (page_id * (stride_page // 4) + row))[:, None]
            stored = entries[:, None] < end[None, :]
            tl.store(out[None, :] + entries[:, None], score, mask=stored)
            page = _load_page(table, entry + BLOCK_N, high, ROWS, BLOCK_N)


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: IndexPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    compress_ratio: int,
    plan: IndexPlan,
    max_seqlen_q: int,
    out: torch.Tensor,
    lens: torch.Tensor,
    scores: torch.Tensor | None,
    workspace: torch.Tensor,
) -> None:
    """Launch ``index_topk`` of checked arguments: for each chunk of queries the scores, if any are
    needed, and the levels of the selection."""
    (num_tokens, num_heads, _), num_seqs = q.shape, seq_lens.shape[0]
    arch, num_sms = arch_and_sms(q)
    block_n, columns, num_warps = FP32_TILE if q.element_size() == 4 else TILE
    block_heads = max(16, next_power_of_2(num_heads))
    block_t = max(1, columns // block_heads)
    tokens = 1 if max_seqlen_q <= 1 else block_t
    keys = pages.values if pages.fp8 else pages.data
    with torch.cuda.device_of(q):
        for first in range(0, num_tokens, max(1, plan.chunk)):
            last = min(first + plan.chunk, num_tokens)
            tiles = triton.cdiv(last - first, tokens)
            # More programs than run at once even out the lengths of a batch.
            entries = max(MIN_SCORED, plan.num_entries * tiles // (8 * PROGRAMS_PER_SM * num_sms))
            entries = triton.cdiv(entries, block_n) * block_n
            if plan.query_numel:
                launching.launch(
                    index_scores_kernel,
                    (tiles, triton.cdiv(plan.num_entries, entries)),
                    q=q,
                    weights=weights,
                    keys=pages.data,
                    block_table=block_table,
                    seq_lens=seq_lens,
                    cu_seqlens_q=cu_seqlens_q,
                    workspace=workspace,
                    num_seqs=num_seqs,
                    first_row=first,
                    last_row=last,
                    num_entries=plan.num_entries,
                    entries_per_program=entries,
                    topk=0 if plan.score_all else plan.topk,
                    tokens=tokens,
                    compress_ratio=compress_ratio,
                    q_stride_token=q.stride(0),
                    q_stride_head=q.stride(1),
                    weights_stride=weights.stride(0),
                    table_stride=block_table.stride(0),
                    stride_page=keys.stride(0),
                    stride_row=keys.stride(1),
                    scores_stride=plan.row_numel,
                    HEADS=num_heads,
                    BLOCK_HEADS=block_heads,
                    INDEX_DIM=pages.index_dim,
                    ROWS=pages.storage_block_size,
                    BLOCK_T=block_t,
                    BLOCK_N=block_n,
                    HARDWARE_FP8=arch.widens_e4m3,
                    num_warps=num_warps,
                    num_stages=3,
                )
            for level, num_blocks in enumerate(plan.num_blocks):
                launching.launch(
                    index_select_kernel,
                    (last - first, num_blocks),
                    workspace=workspace,
                    candidates=plan.candidates(max(level - 1, 0)),
                    next_candidates=plan.candidates(level),
                    out=out,
                    lens=lens,
                    scores=scores,
                    seq_lens=seq_lens,
                    cu_seqlens_q=cu_seqlens_q,
                    num_seqs=num_seqs,
                    first_row=first,
                    num_rows=plan.chunk,
                    level=level,
                    num_blocks=plan.num_blocks[level - 1] if level else 0,
                    next_blocks=num_blocks,
                    num_entries=plan.num_entries,
                    topk=plan.topk,
                    compress_ratio=compress_ratio,
                    row_stride=plan.row_numel,
                    out_stride=out.stride(0),
                    scores_stride=0 if scores is None else scores.stride(0),
                    BLOCK=plan.block,
                    LANES=LANES,
                    BLOCK_TOPK=next_power_of_2(plan.topk),
                    num_warps=8,
                )
