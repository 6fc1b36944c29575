"""Triton helpers on the bits of numbers: e4m3 and e2m1 widened, e4m3 rounded, the order of fp32.

Source: OCP 8-bit floating point specification for e4m3; OCP Microscaling Formats 1.0 for e2m1.
"""

import triton
import triton.language as tl

# Bit patterns of fp32: infinity, 448, and the smallest normal e4m3 value 2^-6.
INF_BITS = tl.constexpr(0x7F800000)
E4M3_MAX_BITS = tl.constexpr(0x43E00000)
E4M3_NORMAL_BITS = tl.constexpr(0x3C800000)
# 2 to the difference of the biases of fp16, 15, and e2m1, 1.
E2M1_FACTOR = tl.constexpr(2.0**14)


@triton.jit
def widen(values, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """e4m3 bytes as numbers of ``dtype``, exactly; NaN stays NaN. Without HARDWARE the bits move
    into an fp16, whose exponent has a bias of 15 instead of 7."""
    if HARDWARE:
        wide = values.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # The shift copies the sign into the top two bits; 0xBF80 keeps one of them.
        bits = values.to(tl.int8, bitcast=True).to(tl.int16) << 7
        bits = (bits.to(tl.uint16, bitcast=True) & 0xBF80).to(tl.uint16)
        bits = tl.where((values & 0x7F) == 0x7F, 0x7E00, bits).to(tl.uint16)
        wide = (bits.to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    return wide.to(dtype)


@triton.jit
def widen_e2m1(packed, exponents, GROUP: tl.constexpr, dtype: tl.constexpr):
    """Bytes of two e2m1 values [N, K / 2], the earlier one in the low bits, times E8M0 scale bytes
    [N, K / GROUP]: their products [N, K]."""
    bits = packed.to(tl.uint16)
    bits = tl.join(bits & 15, bits >> 4)
    half = ((bits & 8) << 12) | ((bits & 7) << 9)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * E2M1_FACTOR
    # Byte 0 stands for 2^-127, which is a subnormal number.
    scale = tl.maximum(exponents.to(tl.uint32) << 23, 0x400000).to(tl.float32, bitcast=True)
    N: tl.constexpr = packed.shape[0]
    NUM_GROUPS: tl.constexpr = exponents.shape[1]
    values = values.reshape(N, NUM_GROUPS, GROUP) * scale[:, :, None]
    return values.reshape(N, NUM_GROUPS * GROUP).to(dtype)


@triton.jit
def rounded_to_e4m3(x):
    """(value fp32, its byte int32) of the e4m3 value nearest to x fp32, ties to even; infinities
    give +-448, NaN gives NaN."""
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
def ordered(score):
    """fp32 as uint32 in the same order, all above 0; both zeros are one value."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
