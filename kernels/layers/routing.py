"""Routing of a mixture of experts in two kernels, one program a token.

Route: keep the scores of all experts in registers, and take the best remaining one top_k times.
Combine: add up the rows of a token times their weights, in the order of its experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..common import checks, launching, strided
from ..common.tile_shapes import next_power_of_2

SCORES = ("sqrt_softplus", "softmax")
# Channels of a row that a program adds up.
BLOCK_CHANNELS = 1024


def route_tokens(
    logits: torch.Tensor,
    *,
    top_k: int,
    score: str = "sqrt_softplus",
    scale: float = 1.0,
    logits_factor: float = 1.0,
    logits_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token, and compute their weights::

        score  = sqrt(softplus(logit))
        ids    = the top_k experts of score + bias, best first; or table[token_id]
        weight = score[id] / (sum of the scores of ids + 1e-20) * scale

    or, with ``score`` "softmax"::

        z      = logit * logits_factor + logits_bias
        ids    = the top_k experts of z, best first
        weight = exp(z[id]) / (sum of the exp(z) of ids) * scale * expert_scale[id]

    in fp32. Among equal scores Triton takes the lowest expert first; with torch the order is
    undefined.

    Args:
        logits: [num_tokens, num_experts] fp32, last stride 1.
        top_k: experts of a token, 1..num_experts.
        score: "sqrt_softplus" or "softmax".
        scale: factor of the weights, in 2**-30 .. 2**30.
        logits_factor: factor of the logits, in 2**-30 .. 2**30; 1 unless with "softmax".
        logits_bias, expert_scale: [num_experts] bf16, fp16 or fp32, with "softmax" only; None = 0,
            and 1.
        bias: [num_experts] fp32, added for the choice alone, not with "softmax"; None = 0.
        table: [num_ids, top_k] int64, experts by token id, not with "softmax"; None = by score.
        token_ids: [num_tokens] int64, rows of the table; given with it.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        (ids [num_tokens, top_k] int64, weights [num_tokens, top_k] fp32).

    Source: DeepSeek-V4 report 2; transformers ``modeling_deepseek_v4``, ``modeling_gpt_oss``,
        ``modeling_gemma4``.
    """
    chosen = checks.accept(
        impl, _check_routing, logits, top_k, score, scale, logits_factor, logits_bias, expert_scale,
        bias, table, token_ids,
    )  # fmt: skip
    (num_tokens, num_experts), softmax = logits.shape, score == "softmax"
    if table is not None:
        checks.expect_values("token_ids", token_ids, 0, table.shape[0] - 1)
        if checks.is_readable(table):
            checks.expect_values("table", table[token_ids], 0, num_experts - 1)
    if chosen == "torch":
        return _route_torch(
            logits, top_k, softmax, scale, logits_factor, logits_bias, expert_scale,
            bias, table, token_ids,
        )  # fmt: skip
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int64)
    weights = logits.new_empty(num_tokens, top_k)
    with torch.cuda.device_of(logits):
        launching.launch(
            _route_kernel, (num_tokens,),
            logits=strided.matrix(logits), logits_factor=float(logits_factor),
            logits_bias=logits_bias, expert_scale=expert_scale, bias=bias,
            table=strided.matrix(table), token_ids=token_ids, ids=ids, route_weights=weights,
            scale=float(scale), SOFTMAX=softmax, NUM_EXPERTS=num_experts, TOP_K=top_k,
            BLOCK=next_power_of_2(num_experts), BLOCK_K=next_power_of_2(top_k),
            num_warps=1 if num_experts <= 512 else 4,
        )  # fmt: skip
    return ids, weights


def _check_routing(
    logits, top_k, score, scale, logits_factor, logits_bias, expert_scale, bias, table, token_ids
) -> None:
    checks.expect_tensor("logits", logits, (None, None), torch.float32)
    num_tokens, num_experts = logits.shape
    checks.expect_int("logits: num_experts", num_experts, 1)
    checks.expect_int("top_k", top_k, 1, num_experts)
    checks.expect_positive("scale", scale)
    checks.expect_positive("logits_factor", logits_factor)
    if score not in SCORES:
        raise ValueError(f"score: expected one of {list(SCORES)}, got {score!r}")
    softmax = score == "softmax"
    if logits_factor != 1 and not softmax:
        raise ValueError(f"logits_factor: expected 1 with {score!r}, got {logits_factor!r}")
    for name, tensor, with_softmax, shape, dtypes in (
        ("logits_bias", logits_bias, True, (num_experts,), checks.MODEL_DTYPES),
        ("expert_scale", expert_scale, True, (num_experts,), checks.MODEL_DTYPES),
        ("bias", bias, False, (num_experts,), torch.float32),
        ("table", table, False, (None, top_k), torch.int64),
        ("token_ids", token_ids, False, (num_tokens,), torch.int64),
    ):
        if tensor is not None:
            if softmax != with_softmax:
                raise ValueError(f"{name}: expected None with {score!r}, got a tensor")
            checks.expect_tensor(name, tensor, shape, dtypes, device=logits.device)
    if (table is None) != (token_ids is None):
        missing = "table" if table is None else "token_ids"
        raise ValueError(f"{missing}: expected table and token_ids or neither, got None")
    if table is not None and bias is not None:
        raise ValueError("bias: expected None with a table, got a tensor")


def combine_experts(
    rows: torch.Tensor,
    weights: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Sum over a token's experts of weight * row, in fp32 and in their order, then ``addend``.

    The sum is rounded to the dtype of the rows, and once more with ``addend``.

    Args:
        rows: [num_tokens * k, size] bf16, fp16 or fp32, last stride 1, grouped by token.
        weights: [num_tokens, k] bf16, fp16 or fp32.
        addend: [num_tokens, size] in the dtype of rows, output of the shared expert; None = none.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        [num_tokens, size] in the dtype of rows.

    Source: transformers ``modeling_deepseek_v4``.
    """
    chosen = checks.implementation(impl, rows)
    checks.expect_tensor("weights", weights, (None, None), checks.MODEL_DTYPES)
    num_tokens, k = weights.shape
    checks.expect_int("weights: k", k, 1)
    device = weights.device
    checks.expect_tensor("rows", rows, (num_tokens * k, None), checks.MODEL_DTYPES, device=device)
    size = rows.shape[1]
    shape = num_tokens, size
    checks.expect_tensor("addend", addend, shape, rows.dtype, device=device, optional=True)
    if chosen == "torch":
        return _combine_torch(rows, weights, addend)
    out = rows.new_empty(num_tokens, size)
    block = min(BLOCK_CHANNELS, next_power_of_2(max(1, size)))
    with torch.cuda.device_of(rows):
        launching.launch(
            _combine_kernel, (num_tokens, triton.cdiv(size, block)),
            rows=strided.matrix(rows), weights=strided.matrix(weights),
            addend=strided.matrix(addend), out=out, SIZE=size, K=k, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@torch.no_grad()
def _route_torch(
    logits, top_k, softmax, scale, logits_factor, logits_bias, expert_scale, bias, table, token_ids
) -> tuple[torch.Tensor, torch.Tensor]:
    if softmax:
        z = logits if logits_factor == 1 else logits * logits_factor
        z = z if logits_bias is None else z + logits_bias.float()
        top, ids = z.topk(top_k, dim=-1)
        weights = top.softmax(dim=-1)
        if expert_scale is not None:
            weights = weights * expert_scale.float()[ids]
        return ids, weights * scale
    scores = F.softplus(logits).sqrt()
    if table is not None:
        ids = table[token_ids]
    else:
        ids = (scores if bias is None else scores + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scale


@torch.no_grad()
def _combine_torch(rows, weights, addend) -> torch.Tensor:
    y = rows.unflatten(0, weights.shape)
    out = y[:, 0].float() * weights[:, :1].float()
    # sum(dim=1) promises no order of its additions.
    for i in range(1, weights.shape[1]):
        out += y[:, i].float() * weights[:, i : i + 1].float()
    out = out.to(rows.dtype)
    return out if addend is None else out + addend


@triton.jit
def _scores(logits):
    """sqrt(softplus(logits)); NaN stays NaN.

    softplus(x) = max(x, 0) + log1p(e) with e = exp(-|x|), and log1p(e) = log(u) e / (u - 1) with
    u = 1 + e: the rounding of u cancels, so scores of very negative logits are right as well.
    """
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
        found = tl.where(place == k, tl.sum(tl.where(expert == best, score, 0.0), 0), found)
        rank = tl.where(expert == best, float("-inf"), rank)
    return chosen, found


@triton.jit
def _route_kernel(
    logits, logits_factor, logits_bias, expert_scale, bias, table, token_ids, ids, route_weights,
    scale,
    SOFTMAX: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_K)
    inside = place < TOP_K
    row = logits.data + token * logits.stride_row
    if table is not None:
        entry = tl.load(token_ids + token)
        chosen = tl.load(table.data + entry * table.stride_row + place, mask=inside, other=0)
        found = _scores(tl.load(row + chosen, mask=inside, other=0.0))
        found = tl.where(inside, found, 0.0)
    else:
        chosen, found = _best(
            row, logits_factor, logits_bias, bias, SOFTMAX, NUM_EXPERTS, TOP_K, BLOCK, BLOCK_K
        )
    if SOFTMAX:
        largest = tl.max(tl.where(inside, found, float("-inf")), 0)
        found = tl.where(inside, tl.exp(found - largest), 0.0)
    weight = found / (tl.sum(found, 0) + 1e-20) * scale
    if expert_scale is not None:
        weight *= tl.load(expert_scale + chosen, mask=inside, other=0.0).to(tl.float32)
    tl.store(ids + token * TOP_K + place, chosen, mask=inside)
    tl.store(route_weights + token * TOP_K + place, weight, mask=inside)


@triton.jit
def _combine_kernel(
    rows, weights, addend, out,
    SIZE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
