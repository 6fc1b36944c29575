"""Tokens of rows of logits in one kernel, one program a row.

A row is read for its largest logit, with which a greedy row is done. A row that is drawn has its
filters turned into bounds (`filters`), then the weights of what is kept added up, and added up again
as far as the draw goes.

Layout: logits [num_rows, vocab_size]; of each row up to BLOCK ids [num_rows, BLOCK] int32 in the
workspace. Bound by the latency of a row's passes, each from the L2 cache but the first.

Source: as ``quire.kernels.sample_tokens``.
"""

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.launching import Launch, run
from ..common.ordering import ordered, threshold
from ..common.tile_shapes import next_power_of_2
from .filters import (
    MAX_VOCAB,
    UNITS,
    drawn,
    fixed,
    kept,
    kept_weight,
    list_tokens,
    reached,
    search,
    share,
    share_up,
    tokens,
)

# Logits that a program looks at at a time, at most, and candidates that it writes down.
BLOCK = 4096


@triton.jit
def _largest(row, vocab_size, BLOCK: tl.constexpr):
    """Of each lane the largest logit and its lowest id; NaN where there is one."""
    place = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + place
        logit = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        best_id = tl.where(logit > best, token, best_id)
        best = tl.maximum(best, logit, propagate_nan=tl.PropagateNan.ALL)
    return best, best_id


@triton.jit
def _bounds(row, ids, vocab_size, best, largest, heat, k, p, BLOCK: tl.constexpr):
    """What top_k and top_p keep: all above high, and num_equal of those from low to high.

    Returns:
        (how many tokens are in ids to look at, or -1, low, high, num_equal).
    """
    nothing = tl.zeros([], tl.uint32)
    low = nothing
    high = nothing
    num_equal = tl.zeros([], tl.int32)
    count = tl.full([], -1, tl.int32)
    by_count = (k > 0) & (k < vocab_size)
    by_weight = p < 1.0
    part = tl.maximum((p.to(tl.float64) * 4294967296.0).to(tl.int64), 1)
    weight = tl.zeros([], tl.int64)
    if by_count | by_weight:
        if not by_count:
            _, weight = reached(row, ids, vocab_size, -1, largest, heat, nothing, BLOCK)
        if vocab_size > BLOCK:
            if by_count:
                # k lanes have a token that reaches the k-th largest of theirs.
                if k <= BLOCK:
                    low = threshold(ordered(tl.div_rn(best - largest, heat)), k, BLOCK)
            else:
                # Tokens so light that all of them do not weigh what may be missing; 0.01 is more
                # than roundings take.
                spare = (weight - share_up(part, weight)).to(tl.float32) / (UNITS * vocab_size)
                low = ordered(tl.log(spare) - 0.01)
            count = list_tokens(row, ids, vocab_size, largest, heat, low, BLOCK)
            count = tl.where(count <= BLOCK, count, -1)
        if by_count:
            low, high, above, above_weight, equal, equal_weight = search(
                row, ids, vocab_size, count, largest, heat, low, k, False, BLOCK
            )
            num_equal = k - above
            # If not all of them, they are equal.
            share_of = tl.where(num_equal < equal, equal_weight // equal * num_equal, equal_weight)
            weight = above_weight + share_of
        if by_weight:
            goal = share_up(part, weight)
            low, high, _, above_weight, equal, equal_weight = search(
                row, ids, vocab_size, count, largest, heat, low, goal, True, BLOCK
            )
            each = tl.maximum(equal_weight // equal, 1)
            needed = ((goal - above_weight + each - 1) // each).to(tl.int32)
            num_equal = tl.where(equal > 1, needed, 1)
    return count, low, high, num_equal


@triton.jit
def sample_kernel(
    logits, temperature, top_k, top_p, min_p, u, out, probs, workspace, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's token.

    Args:
        workspace: [num_rows, BLOCK] int32; None where all rows are greedy.
    """
    index = tl.program_id(0).to(tl.int64)
    row = logits.data + index * logits.stride_row
    best, best_id = _largest(row, vocab_size, BLOCK)
    largest = tl.max(tl.where(best == best, best, float("inf")), 0)
    finite = tl.abs(largest) < float("inf")
    chosen = tl.min(tl.where(best == largest, best_id, vocab_size), 0)
    chosen = tl.where(finite, chosen, -1)
    if temperature is not None:
        heat = tl.load(temperature + index)
        draws = finite & (heat > 0.0)
        heat = tl.where(draws, heat, 1.0)
        ids = workspace + index * BLOCK
        # Of a greedy row the first token of the largest logit.
        low = ordered(tl.zeros([], tl.float32))
        high = low
        num_equal = tl.full([], 1, tl.int32)
        least = 0.0
        total = fixed(tl.zeros([], tl.float32))
        if draws:
            k, p = tl.load(top_k + index), tl.load(top_p + index)
            least = tl.load(min_p + index)
            count, low, high, num_equal = _bounds(
                row, ids, vocab_size, best, largest, heat, k, p, BLOCK
            )
            total = kept_weight(
                row, ids, vocab_size, count, largest, heat, low, high, num_equal, least, BLOCK
            )
            part = (tl.load(u + index) * 4294967296.0).to(tl.int64)
            goal = share(tl.minimum(tl.maximum(part, 0), 0xFFFFFFFF), total)
            chosen = drawn(
                row,
                ids,
                vocab_size,
                count,
                largest,
                heat,
                low,
                high,
                num_equal,
                least,
                goal,
                BLOCK,
            )
        if probs is not None:
            whole = total.to(tl.float32) / UNITS
            seen = tl.zeros([], tl.int32)
            for start in range(0, vocab_size, BLOCK):
                token, live, x = tokens(row, ids, start, vocab_size, -1, largest, heat, BLOCK)
                stays, seen = kept(x, live, low, high, num_equal, seen, least)
                cells = probs.data + index * probs.stride_row + token
                tl.store(cells, tl.where(stays, tl.exp(x) / whole, 0.0), mask=live)
    tl.store(out + index, chosen.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    u: torch.Tensor | None,
    probs: torch.Tensor | None,
) -> torch.Tensor:
    """Launch checked arguments, shaped as in ``sample_tokens``; returns the tokens."""
    out, launch = prepare(logits, temperature, top_k, top_p, min_p, u, probs)
    run([launch], logits)
    return out


def prepare(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    u: torch.Tensor | None,
    probs: torch.Tensor | None,
) -> tuple[torch.Tensor, Launch]:
    """The tokens of checked arguments of ``sample_tokens``, not filled yet, and the launch."""
    num_rows, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB:
        raise NotImplementedError(
            f"logits: up to {MAX_VOCAB} tokens are supported, got {vocab_size}"
        )
    block = min(BLOCK, max(128, next_power_of_2(vocab_size)))
    out = logits.new_empty(num_rows, dtype=torch.int64)
    workspace = None
    if temperature is not None:
        workspace = logits.new_empty(num_rows, block, dtype=torch.int32)
    return out, Launch(
        sample_kernel,
        (num_rows,),
        {
            "logits": strided.matrix(logits),
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "u": u,
            "out": out,
            "probs": strided.matrix(probs),
            "workspace": workspace,
            "vocab_size": vocab_size,
            "BLOCK": block,
            "num_warps": max(4, block // 256),
        },
    )
