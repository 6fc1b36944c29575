"""Triton helper of rows that get scales of their own, as ``e4m3.quantize`` has them."""

import triton
import triton.language as tl

from . import e4m3
from .tiles import INF_BITS

MAX_BITS = tl.constexpr(0x7F7FFFFF)  # of the largest finite fp32 number
E4M3_MAX = tl.constexpr(e4m3.E4M3_MAX)
MIN_SCALE = tl.constexpr(e4m3.MIN_SCALE)


@triton.jit
def row_scales(rows):
    """Scales [ROWS] of rows [ROWS, DIM] fp32."""
    # Bits of positive floats are ordered as the floats are, and those of a NaN come last.
    largest = tl.max(rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = tl.where(largest == INF_BITS, MAX_BITS, largest).to(tl.float32, bitcast=True)
    scales = tl.math.div_rn(largest, tl.full(largest.shape, E4M3_MAX, tl.float32))
    return tl.where(scales < MIN_SCALE, MIN_SCALE, scales)
