"""Triton helpers of tiles of keys: e4m3 widened and rounded, its scales, the sequence of a token.

Source: OCP 8-bit floating point specification for e4m3.
"""

import triton
import triton.language as tl

from .e4m3 import E4M3_MAX, MIN_SCALE

LARGEST = tl.constexpr(E4M3_MAX)
LEAST_SCALE = tl.constexpr(MIN_SCALE)
# Bit patterns of fp32: infinity, the largest finite number, 448, and the smallest normal e4m3 value
# 2^-6.
INF_BITS = tl.constexpr(0x7F800000)
MAX_BITS = tl.constexpr(0x7F7FFFFF)
E4M3_MAX_BITS = tl.constexpr(0x43E00000)
E4M3_NORMAL_BITS = tl.constexpr(0x3C800000)
# Sequences whose ends a program looks at together.
CHUNK = tl.constexpr(128)


@triton.jit
def halve_e4m3(quantized, HARDWARE: tl.constexpr):
    """e4m3fn bytes as fp16 numbers, exactly; without HARDWARE a factor of 2^8 is missing.

    HARDWARE: convert by an instruction (``Arch.widens_e4m3``). Without it the bits are moved
    into an fp16 whose exponent has a bias of 15 instead of 7, subnormals included. (The two NaN
    become 480; no key has them.)
    """
    if HARDWARE:
        values = quantized.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # The sign is repeated above the other seven bits: of its copies one ends at the top, and one
        # where the first bit of the wider exponent has to be 0.
        bits = quantized.to(tl.int8, bitcast=True).to(tl.int16) << 7
        values = (bits.to(tl.uint16, bitcast=True) & 0xBF80).to(tl.float16, bitcast=True)
    return values


@triton.jit
def widen_e4m3(quantized, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """e4m3fn bytes as numbers of ``dtype`` (bf16, fp16 or fp32), exactly.

    HARDWARE: as in ``halve_e4m3``.
    """
    values = halve_e4m3(quantized, HARDWARE).to(tl.float32)
    if not HARDWARE:
        values *= 256.0
    return values.to(dtype)


@triton.jit
def find_sequence(token, cu_seqlens_q, num_seqs):
    """The sequence of a token: how many sequences end at it or before.

    ``num_seqs`` for a token behind the last.
    """
    found = tl.zeros([], tl.int32)
    for start in range(0, num_seqs, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        end = tl.load(cu_seqlens_q + 1 + seq, mask=seq < num_seqs, other=2147483647)
        found += tl.sum((end <= token).to(tl.int32), 0)
    return found


@triton.jit
def rounded_to_e4m3(x):
    """(value fp32, its byte int32) of the e4m3 value nearest to x fp32, ties to even.

    Infinities give +-448, NaN gives NaN.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > INF_BITS
    magnitude = tl.minimum(magnitude, E4M3_MAX_BITS)
    # Three mantissa bits stay; a carry out of them runs into the exponent, as it should.
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & 0x7FF00000
    # Below 2^-6 the values are multiples of 2^-9, the spacing of fp32 at 2^14: an addition rounds
    # to them.
    step = magnitude.to(tl.float32, bitcast=True) + 16384.0
    steps = step.to(tl.int32, bitcast=True) - 0x46800000
    is_normal = magnitude >= E4M3_NORMAL_BITS
    value = tl.where(is_normal, normal.to(tl.float32, bitcast=True), step - 16384.0)
    byte = tl.where(is_normal, (normal >> 20) - ((127 - 7) << 3), steps)
    value = tl.where(is_nan, float("nan"), tl.where(bits < 0, -value, value))
    return value, tl.where(is_nan, 0x7F, byte) | tl.where(bits < 0, 0x80, 0)


@triton.jit
def row_scales(rows):
    """Scales [ROWS] of rows [ROWS, DIM] fp32, as ``e4m3.quantize`` has them."""
    # Bits of positive floats are ordered as the floats are, and those of a NaN come last.
    largest = tl.max(rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = tl.where(largest == INF_BITS, MAX_BITS, largest).to(tl.float32, bitcast=True)
    scales = tl.math.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    return tl.where(scales < LEAST_SCALE, LEAST_SCALE, scales)
