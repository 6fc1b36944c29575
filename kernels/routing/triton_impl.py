"""Routing of a mixture of experts in two kernels, one program a token.

route: scores of all experts stay in registers; the choice is top_k times the best that is left. A
softmax is that of the chosen logits, against the largest of them.
softplus(x) is max(x, 0) + log1p(exp(-|x|)), with log1p(e) = log(u) e / (u - 1), u = 1 + e: the
rounding of u cancels, so that scores of very negative logits are right as well.

combine: the rows of a token times their weights, added up in the order of its experts.

Layout: logits [num_tokens, num_experts] fp32; rows [num_tokens * k, size]. Both bound by launches
in decode and by memory in prefill.

Source: DeepSeek-V4 report 2; transformers ``modeling_deepseek_v4``, ``modeling_gpt_oss``,
    ``modeling_gemma4``.
"""

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.launching import Launch, run
from ..common.tile_shapes import next_power_of_2

MAX_EXPERTS = 4096
# Channels of a row that a program adds up.
BLOCK_CHANNELS = 1024


@triton.jit
def _scores(logits):
    """sqrt(softplus(logits)); NaN stays NaN."""
    small = tl.exp(-tl.abs(logits))
    above = 1.0 + small
    log1p = tl.where(above == 1.0, small, tl.log(above) * (small / (above - 1.0)))
    return tl.sqrt(tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)


@triton.jit
def _best(
    row, logits_factor, logits_bias, bias,
    SOFTMAX: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The TOP_K experts of the highest rank, and their scores or logits; both [BLOCK_K]."""
    expert = tl.arange(0, BLOCK)
    real = expert < NUM_EXPERTS
    place = tl.arange(0, BLOCK_K)
    score = tl.load(row + expert, mask=real, other=0.0)
    if SOFTMAX:
        score *= logits_factor
        if logits_bias is not None:
            score += tl.load(logits_bias + expert, mask=real, other=0.0).to(tl.float32)
    else:
        score = _scores(score)
    rank = score
    if bias is not None:
        rank = score + tl.load(bias + expert, mask=real, other=0.0)
    # NaN and -inf rank last, but before experts that are taken.
    rank = tl.where(rank > -3.0e38, rank, -3.0e38)
    rank = tl.where(real, rank, float("-inf"))
    chosen = tl.zeros([BLOCK_K], tl.int64)
    found = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.min(tl.where(rank == tl.max(rank, 0), expert, BLOCK), 0)
        chosen = tl.where(place == k, best.to(tl.int64), chosen)
        value = tl.sum(tl.where(expert == best, score, 0.0), 0)
        found = tl.where(place == k, value, found)
        rank = tl.where(expert == best, float("-inf"), rank)
    return chosen, found


@triton.jit(do_not_specialize=["by_table"])
def _route_kernel(
    logits, logits_factor, logits_bias, expert_scale, bias, table, token_ids, by_table,
    ids, route_weights, scale,
    SOFTMAX: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Args:
    by_table: 1 where the table chooses; where it does not, it is not read.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_K)
    row = logits.data + token * logits.stride_row
    chosen = tl.zeros([BLOCK_K], tl.int64)
    found = tl.zeros([BLOCK_K], tl.float32)
    if by_table == 0:
        chosen, found = _best(
            row, logits_factor, logits_bias, bias, SOFTMAX, NUM_EXPERTS, TOP_K, BLOCK, BLOCK_K
        )
    elif table is not None:
        entry = tl.load(token_ids + token)
        chosen = tl.load(table.data + entry * table.stride_row + place, mask=place < TOP_K, other=0)
        found = _scores(tl.load(row + chosen, mask=place < TOP_K, other=0.0))
        found = tl.where(place < TOP_K, found, 0.0)
    if SOFTMAX:
        largest = tl.max(tl.where(place < TOP_K, found, float("-inf")), 0)
        found = tl.where(place < TOP_K, tl.exp(found - largest), 0.0)
    weight = found / (tl.sum(found, 0) + 1e-20) * scale
    if expert_scale is not None:
        factor = tl.load(expert_scale + chosen, mask=place < TOP_K, other=0.0)
        weight *= factor.to(tl.float32)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(route_weights + token * TOP_K + place, weight, mask=place < TOP_K)


@triton.jit
def _combine_kernel(
    rows,
    weights,
    addend,
    out,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        weight = tl.load(weights.data + token * weights.stride_row + k).to(tl.float32)
        row = tl.load(rows.data + (token * K + k) * rows.stride_row + channel, mask=inside, other=0)
        total += weight * row.to(tl.float32)
    total = total.to(out.dtype.element_ty)
    if addend is not None:
        more = tl.load(addend.data + token * addend.stride_row + channel, mask=inside, other=0)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + token * SIZE + channel, total, mask=inside)


def route(
    logits: torch.Tensor,
    top_k: int,
    score: str,
    scale: float,
    logits_factor: float,
    logits_bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    token_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch checked arguments, shaped as in ``route_tokens``; returns (ids, weights)."""
    made, launch = prepare_route(
        logits,
        top_k,
        score,
        scale,
        logits_factor,
        logits_bias,
        expert_scale,
        bias,
        table,
        token_ids,
    )
    run([launch], logits)
    return made


def combine(rows: torch.Tensor, weights: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
    """Launch checked arguments, shaped as in ``combine_experts``; returns the sums."""
    out, launch = prepare_combine(rows, weights, addend)
    run([launch], rows)
    return out


def prepare_route(
    logits: torch.Tensor,
    top_k: int,
    score: str,
    scale: float,
    logits_factor: float,
    logits_bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    token_ids: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], Launch]:
    """(ids, weights) of checked arguments of ``route_tokens``, not filled yet, and the launch."""
    num_tokens, num_experts = logits.shape
    if num_experts > MAX_EXPERTS:
        raise NotImplementedError(
            f"logits: up to {MAX_EXPERTS} experts are supported, got {num_experts}"
        )
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int64)
    weights = logits.new_empty(num_tokens, top_k)
    by_table = table is not None
    if score != "softmax":
        # One kernel for layers of a model that choose by score and those that choose by a table:
        # where there is no table, or with one no bias, any tensor stands in.
        table = ids if table is None else table
        token_ids = ids if token_ids is None else token_ids
        bias = weights if by_table else bias
    launch = Launch(
        _route_kernel,
        (num_tokens,),
        {
            "logits": strided.matrix(logits),
            "logits_factor": float(logits_factor),
            "logits_bias": logits_bias,
            "expert_scale": expert_scale,
            "bias": bias,
            "table": strided.matrix(table),
            "token_ids": token_ids,
            "by_table": int(by_table),
            "ids": ids,
            "route_weights": weights,
            "scale": float(scale),
            "SOFTMAX": score == "softmax",
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "BLOCK": next_power_of_2(num_experts),
            "BLOCK_K": next_power_of_2(top_k),
            "num_warps": 1 if num_experts <= 512 else 4,
        },
    )
    return (ids, weights), launch


def prepare_combine(
    rows: torch.Tensor, weights: torch.Tensor, addend: torch.Tensor | None
) -> tuple[torch.Tensor, Launch]:
    """The result of checked arguments of ``combine_experts``, not filled yet, and the launch."""
    (num_tokens, k), size = weights.shape, rows.shape[1]
    out = rows.new_empty(num_tokens, size)
    block = min(BLOCK_CHANNELS, next_power_of_2(max(1, size)))
    return out, Launch(
        _combine_kernel,
        (num_tokens, triton.cdiv(size, block)),
        {
            "rows": strided.matrix(rows),
            "weights": strided.matrix(weights),
            "addend": strided.matrix(addend),
            "out": out,
            "SIZE": size,
            "K": k,
            "BLOCK": block,
            "num_warps": 4,
        },
    )
