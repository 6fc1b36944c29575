"""Launches of ``index_topk``: the scores of the lightning indexer, then all levels of a top-k.

Next: `scores`, then `selection`.

    score(t, w) = sum_h weights[t, h] * relu(q[t, h] . key_w)
    over the entries w < visible(t) = floor((p_t + 1) / compress_ratio)

Layout of the workspace: scores [chunk, row_numel] fp32, of which entries < visible(t) are written;
then of each level but the last the candidates, scores fp32 and ids int32, both
[chunk, blocks, topk].

Source: DeepSeek-V4, lightning indexer.
"""

from typing import Any

import torch
import triton

from ..common.arch import Arch
from ..common.launching import Launch, arch_and_sms, run
from ..common.tile_shapes import MAX_REGISTERS, PROGRAMS_PER_SM, next_power_of_2
from .call import IndexCall
from .scores import index_scores_kernel
from .selection import index_select_kernel

# Keys of a tile, warps and stages. Quantized tiles are half as large, and need one more under way.
# fp32 has no tensor cores.
PLAIN_CONFIG, FP8_CONFIG, FP32_CONFIG = (64, 4, 3), (64, 4, 4), (32, 8, 2)
# Products of a key tile with heads that a program has at most on the columns.
MAX_COLUMNS = {2: 128, 4: 64}
# Scores of a block that a program looks at together, at least as many as it keeps, and those of a
# warp: 8 a thread, which leaves an SM 1024 threads.
LANES, LANES_PER_WARP = 2048, 256
# Entries that a program scores at least; where there are many programs they score more.
MIN_SCORED = 512


def index_topk(call: IndexCall) -> None:
    """Launch a checked call."""
    run(prepare(call, *arch_and_sms(call.q)), call.q)


def prepare(call: IndexCall, arch: Arch, num_sms: int) -> list[Launch]:
    """The launches of a checked call: of each chunk of queries the scores and all levels.

    Args:
        call: the checked call.
        arch: of the GPU.
        num_sms: streaming multiprocessors of the device.
    """
    plan, num_tokens, workspace = call.plan, call.q.shape[0], call.workspace
    if workspace is None:
        workspace = torch.empty(plan.workspace_numel, dtype=torch.float32, device=call.q.device)
    if not plan.query_numel:
        return [_prepare_select(call, workspace, 0, num_tokens, 0)]
    launches = []
    for first in range(0, num_tokens, max(1, plan.chunk)):
        last = min(first + plan.chunk, num_tokens)
        launches.append(_prepare_scores(call, workspace, first, last, arch, num_sms))
        for level in range(len(plan.num_blocks)):
            launches.append(_prepare_select(call, workspace, first, last, level))
    return launches


def _prepare_scores(
    call: IndexCall, scores: torch.Tensor, first: int, last: int, arch: Arch, num_sms: int
) -> Launch:
    """The launch that scores the queries [first, last)."""
    pages, plan = call.pages, call.plan
    num_heads, element_size = call.q.shape[1], call.q.element_size()
    config = FP8_CONFIG if pages.fp8 else PLAIN_CONFIG
    block_n, num_warps, num_stages = FP32_CONFIG if element_size == 4 else config
    block_heads = max(16, next_power_of_2(num_heads))
    most = max(1, MAX_COLUMNS[element_size] // block_heads)
    # In two blocks, of which decode skips one. Queries of both in registers, fp32, spill: there
    # decode has columns without tokens.
    pair = most > 1 and element_size == 2
    if pair and arch.maker == "nvidia" and pages.storage_block_size % block_n == 0:
        # The second block's queries leave room for two programs where three were: each has a tile
        # more under way. (A page id for each key takes registers: sm_100 would spill.)
        num_stages += 1
    tokens = 1 if call.max_seqlen_q <= 1 else most
    tiles = triton.cdiv(last - first, tokens)
    # More programs than run at once even out the lengths of a batch; each keeps enough tiles to
    # fill its pipeline.
    entries = max(MIN_SCORED, plan.num_entries * tiles // (8 * PROGRAMS_PER_SM * num_sms))
    entries = triton.cdiv(entries, block_n) * block_n
    keys = pages.values if pages.fp8 else pages.data
    return Launch(
        index_scores_kernel,
        (tiles, triton.cdiv(plan.num_entries, entries)),
        {
            "q": call.q,
            "weights": call.weights,
            "keys": pages.data,  # where the keys begin, too
            "workspace": scores,
            "entries_per_program": entries,
            "last_row": last,
            "block_table": call.block_table,
            **_shared_arguments(call, first),
            "q_stride_token": call.q.stride(0),
            "q_stride_head": call.q.stride(1),
            # Who sees no more than topk takes all, and needs no scores but to tell them.
            "topk": plan.topk if call.scores is None else 0,
            "tokens": tokens,
            "weights_stride": call.weights.stride(0),
            "table_stride": call.block_table.stride(0),
            "stride_page": keys.stride(0),
            "stride_row": keys.stride(1),
            "HEADS": num_heads,
            "BLOCK_HEADS": block_heads,
            "INDEX_DIM": pages.index_dim,
            "ROWS": pages.storage_block_size,
            "BLOCK_T": most // 2 if pair else most,
            "PAIR": pair,
            "BLOCK_N": block_n,
            "HARDWARE_FP8": arch.widens_e4m3,
            # fp32 in as many threads as a program has on NVIDIA: more would halve their registers.
            "num_warps": num_warps * 32 // arch.lanes if element_size == 4 else num_warps,
            "num_stages": num_stages,
            **arch.register_limit(MAX_REGISTERS),
        },
    )


def _prepare_select(
    call: IndexCall, workspace: torch.Tensor, first: int, last: int, level: int
) -> Launch:
    """The launch of one level of the selection for the queries [first, last)."""
    plan = call.plan
    block_topk = next_power_of_2(plan.topk)
    lanes = max(LANES, block_topk)
    return Launch(
        index_select_kernel,
        (last - first, plan.num_blocks[level]),
        {
            "workspace": workspace,
            "candidates": plan.candidates(max(level - 1, 0)),
            "next_candidates": plan.candidates(level),
            "out": call.out,
            "lens": call.lens,
            "num_rows": plan.chunk,
            "level": level,
            "num_blocks": plan.num_blocks[level - 1] if level else 0,
            "next_blocks": plan.num_blocks[level],
            **_shared_arguments(call, first),
            "out_stride": call.out.stride(0),
            "scores": call.scores,
            "told_stride": 0 if call.scores is None else call.scores.stride(0),
            "BLOCK": plan.block,
            "LANES": lanes,
            "BLOCK_TOPK": block_topk,
            "num_warps": max(4, lanes // LANES_PER_WARP),
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
