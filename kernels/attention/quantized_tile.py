"""Quantized pages in a query tile of paged attention: e4m3 values, and the scales of their rows.

As fp16 an e4m3 value is exact, and one instruction widens two of them; it takes three more to make
them what queries in bf16 are. So with HALF (`configs.uses_fp16_values`) the products over pages are
fp16's: the queries are scaled to fit, row by row and by powers of two. That is all that is done to
each element: the scale of a key's row multiplies its column of the scores, and that of a value's
row its column of the weights, M x N products a tile in place of N x HEAD_DIM. Both are fp32.

Weights that become fp16 have to fit it together with those scales. So the maximum that they are
taken against is that of the scores plus the logarithms of the scales, near enough: what is rounded
to fp16 is relative to the largest product of a weight and a scale, and the sum of weights is in
fp32 and without scales. (It takes a scale 2^112 times all others to push the weights of those out
of fp32's range.) One scale for a whole tensor is a factor of the scores' own scale, and of the sum
over the pages before the new K/V rows are added to it.

Values may come in pairs, as 16-bit numbers: the even channels and the odd ones are then two
products with sums of their own. No load transposes single bytes on their way to the matrix
instruction of small tiles (a thread would take them one by one); one does pairs.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.query_tiles import place_in_pages
from ..common.tiles import halve_e4m3

# Weights of quantized values reach up to 2^HEADROOM: fp16 holds those down to 2^-(14 + HEADROOM) of
# the largest with all of its digits.
HEADROOM = tl.constexpr(14)
# Scales below 2^-90, whose bits these are, count as that where maxima are taken: weights reach 2^90
# times what they are with scales of 1.
LEAST_SCALE = tl.constexpr((127 - 90) << 23)


class Scales(NamedTuple):
    """Pointers to one head's scales of quantized keys and of values, fp32, and their strides."""

    k: Any
    v: Any
    k_stride_page: Any
    k_stride_row: Any
    v_stride_page: Any
    v_stride_row: Any


@triton.jit
def to_half(q, HARDWARE_E4M3: tl.constexpr):
    """Rows of two-byte queries as fp16, and the factors [rows] back.

    Powers of two move the largest value of each row to [2^14, 2^15). Exact for all values down to
    2^-29 of the largest of a row. Without HARDWARE_E4M3 the factors make good what ``halve_e4m3``
    leaves out.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True)
    # Of the exponent alone, within what leaves both factors normal numbers.
    exponent = tl.maximum(largest >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    if not HARDWARE_E4M3:
        down *= 256.0
    return (q.to(tl.float32) * up[:, None]).to(tl.float16), down


@triton.jit
def halve(values, HARDWARE_E4M3: tl.constexpr, PTX: tl.constexpr):
    """As ``halve_e4m3``; with PTX several values at once.

    Those go through a type of Triton's whose exponent has the bias of fp16's.
    """
    if PTX and not HARDWARE_E4M3:
        halves = values.to(tl.float8e4b15, bitcast=True).to(tl.float16)
    else:
        halves = halve_e4m3(values, HARDWARE_E4M3)
    return halves


@triton.jit
def widen(values, dtype: tl.constexpr, HARDWARE_E4M3: tl.constexpr, PTX: tl.constexpr):
    """e4m3 values as numbers of ``dtype``, exactly."""
    widened = halve(values, HARDWARE_E4M3, PTX).to(tl.float32)
    if not HARDWARE_E4M3:
        widened *= 256.0
    return widened.to(dtype)


@triton.jit
def halve_pairs(pairs, HARDWARE_E4M3: tl.constexpr, PTX: tl.constexpr):
    """Even and odd channels of values that lie in pairs, as ``halve_e4m3``.

    With PTX two pairs of two rows at once: so does the matrix instruction take them, and the
    compiler packs bytes one by one.
    """
    if PTX and HARDWARE_E4M3:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 a, b;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 a, first;
            cvt.rn.f16x2.e4m3x2 b, second;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            }""", "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX:
        # Sign to the top, the other seven bits behind one that is 0: `halve_e4m3` on both halves of
        # a register.
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, rest;
            shl.b32 sign, $2, 8;
            shl.b32 rest, $2, 7;
            and.b32 rest, rest, 0x3f803f80;
            lop3.b32 $0, sign, 0x80008000, rest, 0xea;
            shr.b32 rest, $2, 1;
            and.b32 rest, rest, 0x3f803f80;
            lop3.b32 $1, $2, 0x80008000, rest, 0xea;
            }""", "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even = halve_e4m3(pairs.to(tl.uint8), HARDWARE_E4M3)
        odd = halve_e4m3((pairs >> 8).to(tl.uint8), HARDWARE_E4M3)
    return even, odd


@triton.jit
def load_scales(scales, page, tile, live, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scales [BLOCK_N] of keys and of values of a tile, whose page is one or each row's.

    0 for rows that are not ``live`` (None: all are).
    """
    page = page.to(tl.int64)
    if BLOCK_SIZE % BLOCK_N == 0:
        # One address for all: less is kept, and worked out, for each row.
        first = tile * BLOCK_N % BLOCK_SIZE
        row = tl.arange(0, BLOCK_N)
    else:
        first = 0
        _, row = place_in_pages(tile * BLOCK_N, BLOCK_SIZE, BLOCK_N)
    k_cells = scales.k + (page * scales.k_stride_page + first * scales.k_stride_row)
    v_cells = scales.v + (page * scales.v_stride_page + first * scales.v_stride_row)
    k_cells += row * scales.k_stride_row
    v_cells += row * scales.v_stride_row
    if live is None:
        found = tl.load(k_cells), tl.load(v_cells)
    else:
        found = tl.load(k_cells, mask=live, other=0.0), tl.load(v_cells, mask=live, other=0.0)
    return found
