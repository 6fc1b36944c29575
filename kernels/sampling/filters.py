"""Which tokens of a row are kept, found without a sort: what ``triton_impl`` computes with.

The tokens that top_k and top_p keep are those above some x, and of those that equal it the ones
with the lowest ids. So a search for that x suffices. Its steps count how many tokens reach the
middle of what may be x, as integers of the same order, and add up their weights. Where a row is
longer than a block, the search begins at a bound that all kept tokens reach, and looks only at the
tokens that reach it: their ids are written down once, and a few thousand are left of any real row.

A weight is exp(x) as an integer, in units of 2**-42: sums are exact in any order.
"""

import triton
import triton.language as tl

from ..common.ordering import ordered

# Weights of 2**20 tokens add up to less than 2**63.
UNITS = tl.constexpr(2.0**42)
MAX_VOCAB = 1 << 20


@triton.jit
def fixed(x):
    """exp(x) as an integer, x <= 0."""
    return (tl.exp(x) * UNITS).to(tl.int64)


@triton.jit
def share(part, whole):
    """part * whole / 2**32, rounded down; part < 2**32, whole < 2**63."""
    below = (whole & 0xFFFFFFFF).to(tl.uint64) * part.to(tl.uint64)
    return (whole >> 32) * part + (below >> 32).to(tl.int64)


@triton.jit
def share_up(part, whole):
    """part * whole / 2**32, rounded up; part < 2**32 - 1, whole < 2**63."""
    below = (whole & 0xFFFFFFFF).to(tl.uint64) * part.to(tl.uint64)
    return (whole >> 32) * part + ((below + 0xFFFFFFFF) >> 32).to(tl.int64)


@triton.jit
def places(vocab_size, count):
    """How many tokens there are to look at."""
    return tl.where(count >= 0, count, vocab_size)


@triton.jit
def tokens(row, ids, start, vocab_size, count, largest, heat, BLOCK: tl.constexpr):
    """Tokens of a row from a place on, with their x; past the end x is -inf.

    Args:
        ids: the tokens to look at.
        count: how many they are; -1: look at all of them, each at its own place.
    """
    place = start + tl.arange(0, BLOCK)
    token = place
    if count >= 0:
        live = place < count
        token = tl.load(ids + place, mask=live, other=0)
        logit = tl.load(row + token, mask=live, other=float("-inf")).to(tl.float32)
    else:
        live = place < vocab_size
        logit = tl.load(row + place, mask=live, other=float("-inf")).to(tl.float32)
    return token, live, tl.div_rn(logit - largest, heat)


@triton.jit
def reached(row, ids, vocab_size, count, largest, heat, bound, BLOCK: tl.constexpr):
    """How many tokens reach a bound, and what they weigh."""
    counts = tl.zeros([BLOCK], tl.int32)
    weights = tl.zeros([BLOCK], tl.int64)
    for start in range(0, places(vocab_size, count), BLOCK):
        _, live, x = tokens(row, ids, start, vocab_size, count, largest, heat, BLOCK)
        reaches = live & (ordered(x) >= bound)
        counts += reaches.to(tl.int32)
        weights += tl.where(reaches, fixed(x), 0)
    return tl.sum(counts, 0), tl.sum(weights, 0)


@triton.jit
def search(
    row, ids, vocab_size, count, largest, heat, low, goal,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest x at which the tokens that reach it are ``goal`` many, or weigh that much.

    Args:
        low: a bound at which they are.

    Returns:
        (low, high, how many are above high, what they weigh, how many lie from low to high, what
        they weigh). Those from low to high are equal, or one, or, of a count, all of them needed.
    """
    high = ordered(tl.zeros([], tl.float32))
    found, weight = reached(row, ids, vocab_size, count, largest, heat, low, BLOCK)
    above = tl.zeros([], tl.int32)
    above_weight = tl.zeros([], tl.int64)
    done = found <= 1
    if not BY_WEIGHT:
        done = done | (found == goal)
    while (low < high) & (not done):
        middle = high - (high - low) // 2
        here, weighs = reached(row, ids, vocab_size, count, largest, heat, middle, BLOCK)
        if BY_WEIGHT:
            enough = weighs >= goal
        else:
            enough = here >= goal
        low = tl.where(enough, middle, low)
        found = tl.where(enough, here, found)
        weight = tl.where(enough, weighs, weight)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, here)
        above_weight = tl.where(enough, above_weight, weighs)
        done = found - above <= 1
        if not BY_WEIGHT:
            done = done | (found == goal)
    return low, high, above, above_weight, found - above, weight - above_weight


@triton.jit
def list_tokens(row, ids, vocab_size, largest, heat, bound, BLOCK: tl.constexpr):
    """Write down the ids that reach a bound, in ascending order and up to BLOCK of them; returns
    how many there are."""
    count = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token, live, x = tokens(row, ids, start, vocab_size, -1, largest, heat, BLOCK)
        reaches = (live & (ordered(x) >= bound)).to(tl.int32)
        place = count + tl.cumsum(reaches, 0) - 1
        tl.store(ids + place, token, mask=(reaches != 0) & (place < BLOCK))
        count += tl.sum(reaches, 0)
    # Other threads read them.
    tl.debug_barrier()
    return count


@triton.jit
def kept(x, live, low, high, num_equal, seen, least):
    """Which tokens of a block are kept.

    Args:
        num_equal: how many of those from low to high.
        seen: how many of them the blocks before had.
        least: the smallest exp(x).

    Returns:
        (a mask, ``seen`` for the next block).
    """
    value = ordered(x)
    equal = live & (value >= low) & (value <= high)
    rank = seen + tl.cumsum(equal.to(tl.int32), 0)
    stays = (live & (value > high)) | (equal & (rank <= num_equal))
    return stays & (tl.exp(x) >= least), seen + tl.sum(equal.to(tl.int32), 0)


@triton.jit
def kept_weight(
    row, ids, vocab_size, count, largest, heat, low, high, num_equal, least, BLOCK: tl.constexpr
):
    """What all kept tokens weigh."""
    weights = tl.zeros([BLOCK], tl.int64)
    seen = tl.zeros([], tl.int32)
    for start in range(0, places(vocab_size, count), BLOCK):
        _, live, x = tokens(row, ids, start, vocab_size, count, largest, heat, BLOCK)
        stays, seen = kept(x, live, low, high, num_equal, seen, least)
        weights += tl.where(stays, fixed(x), 0)
    return tl.sum(weights, 0)


@triton.jit
def drawn(
    row, ids, vocab_size, count, largest, heat, low, high, num_equal, least, goal,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first kept token with which the weights exceed the goal, which is less than all weigh."""
    found = tl.full([], -1, tl.int32)
    before = tl.zeros([], tl.int64)
    seen = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (found < 0) & (start < places(vocab_size, count)):
        token, live, x = tokens(row, ids, start, vocab_size, count, largest, heat, BLOCK)
        stays, seen = kept(x, live, low, high, num_equal, seen, least)
        weights = tl.where(stays, fixed(x), 0)
        after = before + tl.sum(weights, 0)
        if after > goal:
            running = before + tl.cumsum(weights, 0)
            found = tl.min(tl.where(stays & (running > goal), token, 2147483647), 0)
        before = after
        start += BLOCK
    return found
