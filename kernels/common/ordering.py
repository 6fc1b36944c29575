"""The order of fp32 numbers as unsigned integers, and the largest of a vector of them."""

import triton
import triton.language as tl


@triton.jit
def ordered(score):
    """fp32 as uint32 in the same order, all above 0; both zeros are one value."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def score_of(value):
    """The fp32 that ``ordered`` makes a uint32 of; NaN of what is above that of infinity."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def threshold(values, k, GROUPS: tl.constexpr):
    """A number that the k largest of a vector of uint32 reach, and no others but equals of it.

    It is 0 if fewer than k are not 0. GROUPS: k or more, and divides the vector. So many groups
    have each a largest value; k values reach the least of these, where the search begins. It halves
    what is left until exactly k values reach a number, or none but the k-th largest is left.
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
