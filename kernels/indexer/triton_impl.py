"""The lightning indexer: scores over paged index keys, then an exact top-k of each row by bisection.

    score(t, w) = sum_h weights[t, h] * relu(q[t, h] . key_w),   w < visible(t) = floor((p_t + 1) / compress_ratio)

*Scores.* A program multiplies tiles of keys with the heads of BLOCK_T tokens: keys on the rows of the matrix instruction, heads on its
columns, so that few tokens waste nothing and the sum over heads stays within four lanes. Every score is the same chain of operations for
any BLOCK_T, so decode and prefill agree to the bit. Page ids of the next tile are carried around the loop (see ``kernels.attention.triton_impl``). Quantised
keys become fp16, the shortest way from e4m3 to a matrix instruction, and two-byte queries with them, each scaled by a power of two to fit.

*Selection* (``plan``: pieces and levels). A program holds one piece in registers, as unsigned integers of the same order, and counts
how many reach the middle of what may be the topk-th largest, until that is found or exactly topk reach a number. Exact, no atomics, the
same on every run, and 32 counts at most. What is above that number is taken, of what equals it the first; a prefix sum places both in
ascending order of id. A row of one piece is final; others leave their candidates, padded with the value 0, to the next level.

Layout of the workspace: scores [chunk, row_numel] fp32, of which entries < visible(t) are written; then of each level but the last the
candidates, scores as ordered bits and ids, both [chunk, pieces, topk] int32.

Source: DeepSeek-V4, lightning indexer.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..common import launch_cache
from ..common.launching import Launch, arch_and_sms
from ..common.tile_shapes import MAX_REGISTERS, PROGRAMS_PER_SM, next_power_of_2
from ..common.tiles import find_sequence, halve_e4m3, widen_e4m3
from .call import IndexCall, check

# Keys of a tile, warps and stages. Quantised tiles are half as large, and need one more under way. fp32 has no tensor cores.
PLAIN_CONFIG, FP8_CONFIG, FP32_CONFIG = (64, 4, 3), (64, 4, 4), (32, 8, 2)
# Products of a key tile with heads that a program has at most on the columns.
MAX_COLUMNS = {2: 128, 4: 64}
# Entries that a program scores at least; where there are many programs they score more.
MIN_SCORED = 512


@triton.jit
def _visible_entries(seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio):
    """Entries that a token of sequence ``seq`` sees; 0 for tokens behind the last sequence."""
    real = seq < num_seqs
    last = tl.load(cu_seqlens_q + seq + 1, mask=real, other=0)
    seq_len = tl.load(seq_lens + seq, mask=real, other=0)
    tokens = tl.maximum(seq_len - last + token + 1, 0)
    return tl.where(real, tl.minimum(tokens // compress_ratio, num_entries), 0)


@triton.jit
def _load_page(table, entry, high, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page id of the tile that begins at ``entry``, or of each of its keys where a page is no multiple of a tile; 0 for what is not read."""
    if ROWS % BLOCK_N != 0:
        entry = entry + tl.arange(0, BLOCK_N)
    return tl.load(table + entry // ROWS, mask=entry < high, other=0)


@triton.jit
def _to_half(q):
    """Columns of two-byte queries as fp16, their largest values moved to [2^14, 2^15) by powers of two, and the factors [1, columns] back.

    Exact for all values down to 2^-29 of the largest of a column.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 0).to(tl.int32, bitcast=True)
    # Of the exponent alone, within what leaves both factors normal numbers; 2^x has the bits (x + 127) << 23.
    exponent = tl.maximum(largest >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)[None, :]
    return (q.to(tl.float32) * up).to(tl.float16), down


@triton.jit(do_not_specialize=["num_seqs", "first_row", "last_row", "num_entries", "piece", "topk"])
def _index_scores_kernel(
    q, weights, keys, block_table, seq_lens, cu_seqlens_q, scores,
    num_seqs, first_row, last_row, num_entries, piece, topk, compress_ratio,
    q_stride_token, q_stride_head, weights_stride, table_stride, stride_page, stride_row, scores_stride,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, HARDWARE_FP8: tl.constexpr,
):  # fmt: skip
    first_token = first_row + tl.program_id(0) * BLOCK_T
    token = first_token + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_T * BLOCK_HEADS)
    column_token = first_token + column // BLOCK_HEADS
    head = column % BLOCK_HEADS
    live = (head < HEADS) & (column_token < last_row)
    dim = tl.arange(0, INDEX_DIM)
    q_rows = q + column_token.to(tl.int64) * q_stride_token + head * q_stride_head
    q_tile = tl.load(q_rows[None, :] + dim[:, None], mask=live[None, :], other=0.0)
    weight_rows = weights + column_token.to(tl.int64) * weights_stride + head
    weight = tl.load(weight_rows, mask=live, other=0.0)[None, :]
    QUANTISED: tl.constexpr = keys.dtype.element_ty == tl.uint8
    HALF: tl.constexpr = QUANTISED and q.dtype.element_ty != tl.float32
    if HALF:
        q_tile, factor = _to_half(q_tile)
        weight *= factor if HARDWARE_FP8 else factor * 256.0

    offs_n = tl.arange(0, BLOCK_N)
    key_offsets = (offs_n * stride_row)[:, None] + dim[None, :]
    row_of_token = (token - first_row).to(tl.int64) * scores_stride
    first_seq = find_sequence(first_token, cu_seqlens_q, num_seqs)
    stop_token = tl.minimum(first_token + BLOCK_T, last_row)
    last_seq = tl.minimum(find_sequence(stop_token - 1, cu_seqlens_q, num_seqs), num_seqs - 1)
    # Tokens of several sequences share a tile at their borders only; each sequence is then a loop of its own.
    for seq in range(first_seq, last_seq + 1):
        begin = tl.load(cu_seqlens_q + seq)
        end = tl.load(cu_seqlens_q + seq + 1)
        visible = _visible_entries(seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio)  # fmt: skip
        # Who sees no more than topk takes all, and needs no scores.
        wanted = (token >= begin) & (token < end) & (token < last_row) & (visible > topk)
        visible = tl.where(wanted, visible, 0)
        low = tl.program_id(1) * piece
        high = tl.minimum(tl.max(visible, 0), low + piece)
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
                pointers = (keys + (page_id * stride_page + row_ids * stride_row))[:, None] + dim[None, :]  # fmt: skip
            # Past the end these are other rows of real pages: their scores are not stored, so that they may hold anything.
            tile = tl.load(pointers)
            if QUANTISED:
                # The scales of a page lie behind its keys.
                scales = (keys + ROWS * stride_row).to(tl.pointer_type(tl.float32))
                scale = tl.load(scales + page_id * (stride_page // 4) + row_ids)
                if HALF:
                    tile = halve_e4m3(tile, HARDWARE_FP8)
                else:
                    tile = widen_e4m3(tile, tl.float32, HARDWARE_FP8)
            products = tl.dot(
                tile, q_tile, input_precision="ieee"
            )  # [BLOCK_N, BLOCK_T * BLOCK_HEADS]
            products = tl.maximum(products, 0.0) * weight
            score = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_T, BLOCK_HEADS]), 2)
            if QUANTISED:
                score *= scale[:, None]
            tl.store(
                scores + row_of_token[None, :] + entries[:, None],
                score,
                mask=entries[:, None] < tl.minimum(visible, high)[None, :],
            )
            page = _load_page(table, entry + BLOCK_N, high, ROWS, BLOCK_N)


@triton.jit
def _ordered(score):
    """fp32 as uint32 in the same order, all above 0; both zeros are one value."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _threshold(values, k, GROUPS: tl.constexpr):
    """A number that the k largest of a vector of uint32 reach, and no others but equals of it; 0 if fewer than k are not 0.

    GROUPS: k or more, and divides the vector. So many groups have each a largest value; k values reach the least of these, where the search
    begins. It halves what is left until exactly k values reach a number, or none but the k-th largest is left.
    """
    low = tl.min(tl.max(tl.reshape(values, [values.numel // GROUPS, GROUPS]), 0), 0)
    high = tl.max(values, 0)
    count = tl.zeros([], tl.int32)
    while (low < high) & (count != k):
        middle = high - (high - low) // 2
        reached = tl.sum((values >= middle).to(tl.int32), 0)
        enough = reached >= k
        count = tl.where(enough, reached, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit(
    do_not_specialize=["num_seqs", "num_rows", "first_row", "num_entries", "level", "pieces", "next_pieces"]
)  # fmt: skip
def _index_select_kernel(
    workspace, candidates, next_candidates, out, lens, seq_lens, cu_seqlens_q,
    num_seqs, num_rows, first_row, num_entries, level, pieces, next_pieces, topk, compress_ratio, scores_stride, out_stride,
    BLOCK: tl.constexpr, BLOCK_TOPK: tl.constexpr,
):  # fmt: skip
    """Select from a piece of scores, or of the candidates that begin at an element of the workspace, ``num_rows`` rows of them."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = first_row + tl.program_id(0)
    seq = find_sequence(token, cu_seqlens_q, num_seqs)
    visible = _visible_entries(seq, token, seq_lens, cu_seqlens_q, num_seqs, num_entries, compress_ratio)  # fmt: skip
    rank = tl.arange(0, BLOCK_TOPK)
    out_row = out + token.to(tl.int64) * out_stride
    if visible <= topk:
        if (level == 0) & (piece == 0):
            tl.store(out_row + rank, tl.where(rank < visible, rank, -1), mask=rank < topk)
            tl.store(lens + token, visible)
        return
    # Without a workspace no query sees more than topk.
    if workspace is not None:
        size = visible
        for _ in range(0, level):
            # A row of one piece was final at that level.
            size = tl.where(size > BLOCK, (size + BLOCK - 1) // BLOCK * topk, 0)
        if piece * BLOCK >= size:
            return

        entry = piece * BLOCK + tl.arange(0, BLOCK)
        live = entry < size
        if candidates is None:
            score = tl.load(workspace + row * scores_stride + entry, mask=live, other=0.0)
            value = tl.where(live, _ordered(score), 0)
        else:
            cells = workspace + candidates + row * pieces * topk + entry
            value = tl.load(cells, mask=live, other=0.0).to(tl.uint32, bitcast=True)
            cells += num_rows.to(tl.int64) * pieces * topk
            entry = tl.load(cells, mask=live, other=0.0).to(tl.int32, bitcast=True)
        threshold = _threshold(value, topk, BLOCK_TOPK)
        # 0 is no score: what is past the end, and what a piece of fewer than topk left unused.
        above = value > threshold
        equal = (value == threshold) & (value > 0)
        needed = topk - tl.sum(above.to(tl.int32), 0)
        # One scan for two counts: those above in the high half, the equal ones in the low half.
        counts = tl.cumsum((above.to(tl.int32) << 16) + equal.to(tl.int32), 0)
        num_equal = counts & 0xFFFF
        position = (counts >> 16) + tl.minimum(num_equal, needed) - 1
        taken = above | (equal & (num_equal <= needed))
        if size <= BLOCK:
            tl.store(out_row + position, entry, mask=taken)
            tl.store(lens + token, topk)
        elif next_candidates is not None:
            kept = workspace + next_candidates + (row * next_pieces + piece) * topk
            tl.store(kept + position, value.to(tl.float32, bitcast=True), mask=taken)
            # The last piece may have fewer than topk.
            unused = (rank >= tl.sum(taken.to(tl.int32), 0)) & (rank < topk)
            tl.store(kept + rank, 0.0, mask=unused)
            kept += num_rows.to(tl.int64) * next_pieces * topk
            tl.store(kept + position, entry.to(tl.float32, bitcast=True), mask=taken)


def topk(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Check and launch ``index_topk(**arguments)``; returns (out, lens). Calls that look alike are checked once (``common.launch_cache``)."""
    launch_cache.run(prepare, arguments, _prepared)
    return arguments["out"], arguments["lens"]


def _prepared(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    call = check(**arguments)
    if call.workspace is None and call.plan.query_numel:
        numel = call.plan.workspace_numel
        workspace = torch.empty(numel, dtype=torch.float32, device=call.q.device)
        call = replace(call, workspace=workspace)
    return dict(vars(call)), prepare(call, *arch_and_sms(call.q))


def prepare(call: IndexCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches of a checked call: for each chunk of queries the scores and every level of the selection.

    Args:
        call: the checked call.
        arch: compute capability as major * 10 + minor.
        num_sms: streaming multiprocessors of the device.
    """
    plan, num_tokens = call.plan, call.q.shape[0]
    if not plan.query_numel:
        return [_prepare_select(call, None, 0, num_tokens, 0)]
    workspace = call.workspace
    if workspace is None:
        workspace = torch.empty(plan.workspace_numel, dtype=torch.float32, device=call.q.device)
    launches = []
    for first in range(0, num_tokens, max(1, plan.chunk)):
        last = min(first + plan.chunk, num_tokens)
        launches.append(_prepare_scores(call, workspace, first, last, arch, num_sms))
        for level in range(len(plan.num_blocks)):
            launches.append(_prepare_select(call, workspace, first, last, level))
    return launches


def _prepare_scores(
    call: IndexCall, scores: torch.Tensor, first: int, last: int, arch: int, num_sms: int
) -> Launch:
    """The launch that scores the queries [first, last)."""
    pages, plan = call.pages, call.plan
    num_heads, element_size = call.q.shape[1], call.q.element_size()
    config = FP8_CONFIG if pages.fp8 else PLAIN_CONFIG
    block_n, num_warps, num_stages = FP32_CONFIG if element_size == 4 else config
    block_heads = max(16, next_power_of_2(num_heads))
    most = max(1, MAX_COLUMNS[element_size] // block_heads)
    block_t = min(most, next_power_of_2(max(1, call.max_seqlen_q)))
    tiles = triton.cdiv(last - first, block_t)
    # More pieces than programs at once even out the lengths of a batch, each program keeping enough tiles to fill its pipeline.
    piece = max(MIN_SCORED, plan.num_entries * tiles // (8 * PROGRAMS_PER_SM * num_sms))
    piece = triton.cdiv(piece, block_n) * block_n
    keys = pages.values if pages.fp8 else pages.data
    return Launch(
        _index_scores_kernel,
        (tiles, triton.cdiv(plan.num_entries, piece)),
        {
            "q": call.q,
            "weights": call.weights,
            "keys": pages.data,  # where the keys begin, too
            "scores": scores,
            "piece": piece,
            "last_row": last,
            "block_table": call.block_table,
            **_shared_arguments(call, first),
            "q_stride_token": call.q.stride(0),
            "q_stride_head": call.q.stride(1),
            "weights_stride": call.weights.stride(0),
            "table_stride": call.block_table.stride(0),
            "stride_page": keys.stride(0),
            "stride_row": keys.stride(1),
            "HEADS": num_heads,
            "BLOCK_HEADS": block_heads,
            "INDEX_DIM": pages.index_dim,
            "ROWS": pages.storage_block_size,
            "BLOCK_T": block_t,
            "BLOCK_N": block_n,
            "HARDWARE_FP8": arch >= 89,
            "num_warps": num_warps,
            "num_stages": num_stages,
            "maxnreg": MAX_REGISTERS,
        },
    )


def _prepare_select(
    call: IndexCall, workspace: torch.Tensor | None, first: int, last: int, level: int
) -> Launch:
    """The launch of one level of the selection for the queries [first, last)."""
    plan = call.plan
    final = level == len(plan.num_blocks) - 1
    return Launch(
        _index_select_kernel,
        (last - first, plan.num_blocks[level]),
        {
            "workspace": workspace,
            "candidates": plan.candidates(level - 1) if level else None,
            "next_candidates": None if final else plan.candidates(level),
            "out": call.out,
            "lens": call.lens,
            "num_rows": plan.chunk,
            "level": level,
            "pieces": plan.num_blocks[level - 1] if level else 0,
            "next_pieces": plan.num_blocks[level],
            **_shared_arguments(call, first),
            "out_stride": call.out.stride(0),
            "BLOCK": plan.block,
            "BLOCK_TOPK": next_power_of_2(plan.topk),
            # At most 16 values a thread: twice that, and one program fills the registers of an SM.
            "num_warps": max(4, plan.block // 512),
        },
    )


def _shared_arguments(call: IndexCall, first: int) -> dict[str, Any]:
    """Kernel arguments that both kernels take."""
    return {
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "num_seqs": call.seq_lens.shape[0],
        "first_row": first,
        "num_entries": call.plan.num_entries,
        "topk": call.plan.topk,
        "compress_ratio": call.compress_ratio,
        "scores_stride": call.plan.row_numel,
    }
