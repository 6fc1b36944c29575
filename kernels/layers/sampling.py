"""Sample a token from each row of logits in one kernel, one program a row, without a sort.

top_k and top_p keep the tokens above some x, and the lowest ids of those equal to it. A bisection
finds that x from counts and sums of weights, in a pass over the row for each step. A weight is
exp(x) as an integer, in units of 2**-42, so sums are exact in any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import checks, launching, strided
from ..common.bits import ordered
from ..common.tile_shapes import next_power_of_2

# Most logits that a program looks at at a time, and the registers of its threads, which are all.
BLOCK, REGISTERS = 4096, 128
# Weights of 2**20 tokens add up to less than MAX_WEIGHT.
UNITS = tl.constexpr(2.0**42)
MAX_WEIGHT = tl.constexpr(2**63 - 1)
MAX_VOCAB = 1 << 20
# Dtype and range of the columns that say how a row is drawn.
COLUMNS = {
    "temperature": (torch.float32, 0.0, float("inf")),
    "top_k": (torch.int32, 0, 2**31 - 1),
    "top_p": (torch.float32, 0.0, float("inf")),
    "min_p": (torch.float32, 0.0, 1.0),
    "u": (torch.float64, 0.0, 1.0),
}


def sample_tokens(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Sample one token for each row: the largest logit at temperature 0, else a draw::

        x = (logit - largest logit) / temperature       in fp32
        top_k: keep the top_k highest x                 ties: lowest ids first
        top_p: of these, the highest whose exp(x) first reach the share top_p of their sum
        min_p: of these, the ones with exp(x) >= min_p
        token: first id at which the running sum of exp(x), by id, exceeds u times the whole sum

    Triton's sums are exact; torch sums in fp32 for top_p and in fp64 for the draw, so the two may
    differ within rounding of a border. Among equal largest logits the lowest id wins.

    Args:
        logits: [num_rows, vocab_size] bf16, fp16 or fp32, last stride 1; -inf excludes a token.
        temperature: [num_rows] fp32, >= 0; None = 0 for all. The next four are given with it.
        top_k: [num_rows] int32; 0 = all.
        top_p: [num_rows] fp32, > 0; 1 = all.
        min_p: [num_rows] fp32 in [0, 1]; 0 = all.
        u: [num_rows] fp64 in [0, 1), the random numbers; Triton uses 32 bits of each.
        probs: [num_rows, vocab_size] fp32, last stride 1, filled in place with the distribution of
            each row; at temperature 0 it is 1 at the token. Only with temperature.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        [num_rows] int64; -1 for a row with a NaN or +inf, or with -inf only, whose probs are
        undefined.

    Raises:
        NotImplementedError: Triton with more than 2**20 tokens.

    Source: transformers ``generation/logits_process`` for the filters and their order.
    """
    columns = temperature, top_k, top_p, min_p, u
    chosen = checks.accept(impl, _check, logits, *columns, probs)
    if temperature is not None:
        for (name, (_, low, high)), column in zip(COLUMNS.items(), columns, strict=True):
            checks.expect_values(name, column, low, high)
    if chosen == "torch":
        return _torch(logits, temperature, top_k, top_p, min_p, u, probs)
    num_rows, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB:
        raise NotImplementedError(
            f"logits: up to {MAX_VOCAB} tokens are supported, got {vocab_size}"
        )
    block = min(BLOCK, max(128, next_power_of_2(vocab_size)))
    out = logits.new_empty(num_rows, dtype=torch.int64)
    with torch.cuda.device_of(logits):
        launching.launch(
            sample_kernel, (num_rows,),
            logits=strided.matrix(logits), temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, u=u, out=out, probs=strided.matrix(probs), vocab_size=vocab_size,
            BLOCK=block, num_warps=max(4, block // 256),
            **launching.arch_and_sms(logits)[0].register_limit(REGISTERS),
        )  # fmt: skip
    return out


def _check(logits, temperature, top_k, top_p, min_p, u, probs) -> None:
    checks.expect_tensor("logits", logits, (None, None), checks.MODEL_DTYPES)
    num_rows, vocab_size = logits.shape
    checks.expect_int("logits: vocab_size", vocab_size, 1, 2**31 - 1)
    columns = temperature, top_k, top_p, min_p, u
    draws = any(column is not None for column in columns)
    if draws:
        for (name, (dtype, _, _)), column in zip(COLUMNS.items(), columns, strict=True):
            checks.expect_tensor(name, column, (num_rows,), dtype, device=logits.device)
    if probs is not None and not draws:
        raise ValueError("probs: expected None without a temperature, got a tensor")
    checks.expect_output("probs", probs, (num_rows, vocab_size), torch.float32, logits.device)


@torch.no_grad()
def _torch(logits, temperature, top_k, top_p, min_p, u, probs) -> torch.Tensor:
    """Sort; reads on the host which rows are drawn."""
    logits = logits.float()
    top, ids = logits.max(dim=-1)
    if temperature is not None:
        if probs is not None:
            probs.zero_().scatter_(1, ids[:, None], 1.0)
        rows = (temperature > 0).nonzero().squeeze(1)
        if len(rows):
            columns = (logits, temperature, top_k, top_p, min_p, u)
            if len(rows) < len(ids):  # else the logits would be copied for nothing
                columns = (column[rows] for column in columns)
            *columns, u = columns
            mass = _probabilities(*columns)
            ids[rows] = _draw(mass, u)
            if probs is not None:
                probs.index_copy_(0, rows, mass)
    # The largest is NaN where any logit is, +inf where any is, and -inf where all are.
    return ids.masked_fill_(top - top != 0, -1)


def _probabilities(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    top_k, top_p, min_p = top_k[:, None], top_p[:, None], min_p[:, None]
    # Largest logit 0 first: then no temperature overflows.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    if ((top_k > 0) | (top_p < 1)).any():
        sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        behind = (top_k > 0) & (rank >= top_k)
        sorted_logits = sorted_logits.masked_fill(behind, -torch.inf)
        mass = sorted_logits.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        # The likeliest token stays, and rounding of the sum must not cut a row that keeps all.
        behind = (before >= top_p) & (rank > 0) & (top_p < 1)
        sorted_logits = sorted_logits.masked_fill(behind, -torch.inf)
        # Back to the order of ids: a draw must not depend on whether some other row needed a sort.
        logits = torch.empty_like(logits).scatter_(1, order, sorted_logits)
    kept = logits.softmax(dim=-1)
    if (min_p > 0).any():
        kept = kept.masked_fill(kept < min_p * kept.amax(dim=-1, keepdim=True), 0.0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
    return kept


def _draw(mass: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw one index a row, none of mass 0; mass: [num_rows, n] of any positive sum."""
    total = mass.cumsum(dim=-1, dtype=torch.float64)
    last = total[:, -1:]
    # The product may round up to the whole sum, behind which there is nothing; a row may be NaN.
    goal = torch.minimum(u[:, None] * last, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(total, goal, right=True).squeeze(1).clamp_(max=mass.shape[1] - 1)


class Row(NamedTuple):
    """A row of logits that is drawn."""

    logits: Any  # pointer to its first logit
    vocab_size: Any
    largest: Any  # the largest logit
    temperature: Any


class Kept(NamedTuple):
    """Bounds of the kept tokens, as integers of ``ordered``."""

    low: Any
    high: Any  # all tokens above it are kept
    num_equal: Any  # tokens kept of those from low to high, the lowest ids first
    least: Any  # the smallest exp(x)


@triton.jit
def _weight(x):
    """exp(x) as an integer, x <= 0."""
    return (tl.exp(x) * UNITS).to(tl.int64)


@triton.jit
def _share(part, whole, ROUND_UP: tl.constexpr):
    """part * whole / 2**32, rounded down or up; part < 2**32 - 1 if up, whole < 2**63."""
    below = (whole & 0xFFFFFFFF).to(tl.uint64) * part.to(tl.uint64)
    if ROUND_UP:
        below += 0xFFFFFFFF
    return (whole >> 32) * part + (below >> 32).to(tl.int64)


@triton.jit
def _tokens(row, start, BLOCK: tl.constexpr):
    """Ids of a block of a row's tokens, their mask and their x."""
    token = start + tl.arange(0, BLOCK)
    live = token < row.vocab_size
    logit = tl.load(row.logits + token, mask=live, other=float("-inf")).to(tl.float32)
    return token, live, tl.div_rn(logit - row.largest, row.temperature)


@triton.jit
def _reached(row, bound, BLOCK: tl.constexpr):
    """Number and weight of the tokens that reach a bound."""
    counts = tl.zeros([BLOCK], tl.int32)
    weights = tl.zeros([BLOCK], tl.int64)
    for start in range(0, row.vocab_size, BLOCK):
        _, live, x = _tokens(row, start, BLOCK)
        reaches = live & (ordered(x) >= bound)
        counts += reaches.to(tl.int32)
        weights += tl.where(reaches, _weight(x), 0)
    return tl.sum(counts, 0), tl.sum(weights, 0)


@triton.jit
def _search(row, low, goal, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the highest x that ``goal`` tokens reach, or tokens of weight ``goal``; enough reach
    ``low``. Returns (low, high, number above high, their weight, number from low to high, their
    weight); the tokens from low to high are equal, or one."""
    high = ordered(tl.zeros([], tl.float32))
    found, weight = _reached(row, low, BLOCK)
    above = tl.zeros([], tl.int32)
    above_weight = tl.zeros([], tl.int64)
    while (low < high) & (found - above > 1):
        middle = high - (high - low) // 2
        here, here_weight = _reached(row, middle, BLOCK)
        enough = (here_weight if BY_WEIGHT else here) >= goal
        low = tl.where(enough, middle, low)
        found = tl.where(enough, here, found)
        weight = tl.where(enough, here_weight, weight)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, here)
        above_weight = tl.where(enough, above_weight, here_weight)
    return low, high, above, above_weight, found - above, weight - above_weight


@triton.jit
def _bounds(row, k, p, BLOCK: tl.constexpr):
    """(low, high, num_equal) of top_k and top_p, as in ``Kept``."""
    low = tl.zeros([], tl.uint32)
    high = tl.zeros([], tl.uint32)
    num_equal = tl.zeros([], tl.int32)
    weight = tl.zeros([], tl.int64)
    by_count = (k > 0) & (k < row.vocab_size)
    if by_count:
        low, high, above, above_weight, equal, equal_weight = _search(row, low, k, False, BLOCK)
        num_equal = k - above
        weight = above_weight + equal_weight // equal * num_equal
    if p < 1.0:
        if not by_count:
            _, weight = _reached(row, low, BLOCK)
        part = tl.maximum((p.to(tl.float64) * 4294967296.0).to(tl.int64), 1)
        goal = _share(part, weight, True)
        low, high, _, above_weight, equal, equal_weight = _search(row, low, goal, True, BLOCK)
        each = tl.maximum(equal_weight // equal, 1)
        needed = ((goal - above_weight + each - 1) // each).to(tl.int32)
        num_equal = tl.where(equal > 1, needed, 1)
    return low, high, num_equal


@triton.jit
def _is_kept(x, live, kept, seen):
    """Mask of the kept tokens of a block, and ``seen``, the number of tokens from low to high in
    earlier blocks, for the next block."""
    value = ordered(x)
    equal = live & (value >= kept.low) & (value <= kept.high)
    rank = seen + tl.cumsum(equal.to(tl.int32), 0)
    stays = (live & (value > kept.high)) | (equal & (rank <= kept.num_equal))
    return stays & (tl.exp(x) >= kept.least), seen + tl.sum(equal.to(tl.int32), 0)


@triton.jit
def _draw_kept(row, kept, goal, BLOCK: tl.constexpr):
    """The first kept token at which the running weight exceeds the goal, -1 for none, and the
    weight of all kept tokens up to its block."""
    found = tl.full([], -1, tl.int32)
    before = tl.zeros([], tl.int64)
    seen = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (found < 0) & (start < row.vocab_size):
        token, live, x = _tokens(row, start, BLOCK)
        stays, seen = _is_kept(x, live, kept, seen)
        weights = tl.where(stays, _weight(x), 0)
        after = before + tl.sum(weights, 0)
        if after > goal:
            running = before + tl.cumsum(weights, 0)
            found = tl.min(tl.where(stays & (running > goal), token, 2147483647), 0)
        before = after
        start += BLOCK
    return found, before


@triton.jit
def sample_kernel(
    logits, temperature, top_k, top_p, min_p, u, out, probs, vocab_size, BLOCK: tl.constexpr
):
    """One row's token."""
    index = tl.program_id(0).to(tl.int64)
    first = logits.data + index * logits.stride_row
    best = tl.full([BLOCK], float("-inf"), tl.float32)  # of each lane; NaN where there is one
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(first + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        best_id = tl.where(logit > best, token, best_id)
        best = tl.maximum(best, logit, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(tl.where(best == best, best, float("inf")), 0)
    finite = tl.abs(largest) < float("inf")
    chosen = tl.min(tl.where(best == largest, best_id, vocab_size), 0)
    if temperature is not None:
        heat = tl.load(temperature + index)
        draws = finite & (heat > 0.0)
        row = Row(first, vocab_size, largest, tl.where(draws, heat, 1.0))
        # A greedy row keeps the first of its largest logits.
        low = ordered(tl.zeros([], tl.float32))
        high = low
        num_equal = tl.full([], 1, tl.int32)
        least = 0.0
        if draws:
            k, p = tl.load(top_k + index), tl.load(top_p + index)
            least = tl.load(min_p + index)
            low, high, num_equal = _bounds(row, k, p, BLOCK)
        kept = Kept(low, high, num_equal, least)
        _, total = _draw_kept(row, kept, MAX_WEIGHT, BLOCK)
        part = (tl.load(u + index) * 4294967296.0).to(tl.int64)
        goal = _share(tl.minimum(tl.maximum(part, 0), 0xFFFFFFFF), total, False)
        chosen, _ = _draw_kept(row, kept, goal, BLOCK)
        if probs is not None:
            whole = total.to(tl.float32) / UNITS
            seen = tl.zeros([], tl.int32)
            for start in range(0, vocab_size, BLOCK):
                token, live, x = _tokens(row, start, BLOCK)
                stays, seen = _is_kept(x, live, kept, seen)
                cells = probs.data + index * probs.stride_row + token
                tl.store(cells, tl.where(stays, tl.exp(x) / whole, 0.0), mask=live)
    tl.store(out + index, tl.where(finite, chosen, -1).to(tl.int64))
