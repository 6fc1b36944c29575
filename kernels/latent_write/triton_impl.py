"""Norm, RoPE, quantization and the write of latent rows in one pass; ``compress`` ends with the
same helpers.

    y = x * rsqrt(mean(x^2) + eps) * weight                                   (optional)
    y'[2i] = y[2i] cos_i - y[2i+1] sin_i,  y'[2i+1] = y[2i+1] cos_i + y[2i] sin_i    on the trailing channels (optional)

in fp32, rounded once to what the page holds; quantized rows round to bf16 and then to e4m3, as
``common.latent_pages`` says. The rounding to e4m3 is integer arithmetic on the bits: exact where
there is no such instruction (sm_80) and in Triton's interpreter, whose own cast is not.

Layout: x [num_rows, dim], one program takes BLOCK_ROWS rows; pages as in ``common.latent_pages``.
Without pages, of heads, a program takes rows of one token, and a row of its tile is WIDTH channels:
one wide head, or as many narrow ones as fit where there is no norm.
Bound by memory: a row is read once and written once (twice with ``out``).

Source: DeepSeek-V4, kv_norm and rotary embedding of the latent; FlashMLA's tests/quant.py for the
    quantized rows.
"""

import math

import triton
import triton.language as tl

from ..common import latent_pages, strided
from ..common.latent_pages import IndexPages, LatentPages
from ..common.launching import Launch, run
from ..common.tiles import INF_BITS, rounded_to_e4m3
from .call import LatentCall

ELEMENTS_PER_PROGRAM = 2048
# Channels of a tile's row that serves rows of any number of channels.
WIDTH = max(latent_pages.DIMS)

QUANT_GROUP = tl.constexpr(latent_pages.QUANT_GROUP)
NOPE_DIM = tl.constexpr(latent_pages.NOPE_DIM)
SCALE_BYTES = tl.constexpr(latent_pages.SCALE_BYTES)
MIN_AMAX_BITS = tl.constexpr(0x38D1B717)


@triton.jit
def normed(rows, weight, mean, eps, dim, WIDTH: tl.constexpr):
    """RMS norm of rows [ROWS, WIDTH] fp32 of ``dim`` channels, and 0 behind them.

    mean: 1 / dim, exact as dim is a power of two; 0 for no norm at all, of which nothing is read.
    """
    if mean > 0.0:
        channel = tl.arange(0, WIDTH)
        scale = tl.rsqrt(tl.sum(rows * rows, 1) * mean + eps)
        factor = tl.load(weight + channel, mask=channel < dim, other=0.0).to(tl.float32)
        rows = rows * scale[:, None] * factor[None, :]
    return rows


@triton.jit
def rotated(
    rows, position, live, cos_sin, dim,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """Turn the pairs (2i, 2i + 1) of the trailing ROPE_DIM channels of each ``dim``, a power of
    two, of rows [ROWS, WIDTH] by the angles of position [ROWS] int64 where ``live``."""
    if cos_sin is not None:
        even, odd = tl.split(tl.reshape(rows, [ROWS, WIDTH // 2, 2]))
        pair = tl.arange(0, WIDTH // 2) & (dim // 2 - 1)
        pair = tl.multiple_of(tl.max_contiguous(pair, 8), 8)[None, :] - (dim - ROPE_DIM) // 2
        turns = live[:, None] & (pair >= 0)
        angle = cos_sin.data + position[:, None] * cos_sin.stride_row + pair
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + ROPE_DIM // 2, mask=turns, other=0.0)
        turned_even = tl.where(turns, even * cos - odd * sin, even)
        turned_odd = tl.where(turns, odd * cos + even * sin, odd)
        rows = tl.reshape(tl.join(turned_even, turned_odd), [ROWS, WIDTH])
    return rows


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize(rows, whole, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Quantize rows fp32 to e4m3 with one power-of-two scale for each QUANT_GROUP channels, or for
    all of a row if it is ``whole``.

    Returns:
        (values [ROWS, WIDTH] fp32 as read back, e4m3_bytes [ROWS, WIDTH] uint8, exponents [ROWS,
        WIDTH // QUANT_GROUP] int32).
    """
    GROUPS: tl.constexpr = WIDTH // QUANT_GROUP
    x = tl.reshape(rows.to(tl.bfloat16).to(tl.float32), [ROWS, GROUPS, QUANT_GROUP])
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Bits of positive floats are ordered as the floats are.
    largest = tl.max(tl.where(magnitude > INF_BITS, 0, magnitude), 2)
    if whole:
        largest = tl.broadcast_to(tl.max(largest, 1, keep_dims=True), [ROWS, GROUPS])
    largest = tl.maximum(largest, MIN_AMAX_BITS)
    # 448 = 1.75 * 2^8: the ceiling of log2(largest / 448), without the rounding of a logarithm.
    exponent = (largest >> 23) - (127 + 8) + tl.where((largest & 0x7FFFFF) > 0x600000, 1, 0)
    value, byte = rounded_to_e4m3(x * _power_of_two(-exponent)[:, :, None])
    value = value * _power_of_two(exponent)[:, :, None]
    e4m3_bytes = tl.reshape(byte, [ROWS, WIDTH]).to(tl.uint8)
    return tl.reshape(value, [ROWS, WIDTH]), e4m3_bytes, exponent


@triton.jit
def stored(
    rows, slot, live, pages, block_size, index_dim, dim,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write rows [ROWS, WIDTH] fp32 of dim channels to their slots [ROWS] int64 where ``live``;
    returns them as a reader of the page sees them.

    Pages of bytes are quantized: those of index keys of ``index_dim`` channels, or, if that is 0,
    of latents; the strides are those of their e4m3 values.
    """
    page = (slot // block_size)[:, None]
    row = (slot % block_size)[:, None]
    write = live[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    cell = pages.data + page * pages.stride_page + row * pages.stride_row + channel
    if pages.data.dtype.element_ty != tl.uint8:
        kept = rows.to(pages.data.dtype.element_ty)
        tl.store(cell, kept, mask=write & (channel < dim))
        rows = kept.to(tl.float32)
    else:
        roped = rows.to(tl.bfloat16)
        rows, e4m3_bytes, exponent = quantize(rows, index_dim > 0, ROWS, WIDTH)
        group = tl.arange(0, WIDTH // QUANT_GROUP)[None, :]
        scales = pages.data + block_size * pages.stride_row  # behind all rows of a page
        if index_dim > 0:
            tl.store(cell, e4m3_bytes, mask=write & (channel < index_dim))
            scale = scales.to(tl.pointer_type(tl.float32)) + page * (pages.stride_page // 4)
            scale += row + group
            tl.store(scale, _power_of_two(exponent), mask=write & (group == 0))
        else:
            is_rope = channel >= NOPE_DIM
            tl.store(cell, e4m3_bytes, mask=write & (channel < NOPE_DIM))
            rope = pages.data.to(tl.pointer_type(tl.bfloat16)) + NOPE_DIM // 2
            rope_cell = rope + page * (pages.stride_page // 2) + row * (pages.stride_row // 2)
            tl.store(rope_cell + channel - NOPE_DIM, roped, mask=write & is_rope)
            # The group of the roped channels has no scale: its byte is padding, and zero.
            byte = tl.where(group < SCALE_BYTES - 1, exponent + 127, 0).to(tl.uint8)
            tl.store(
                scales + page * pages.stride_page + row * SCALE_BYTES + group, byte, mask=write
            )
            rows = tl.where(is_rope, roped.to(tl.float32), rows)
    return rows


@triton.jit(do_not_specialize=["num_rows"])
def _write_latent_kernel(
    x, positions, cos_sin, norm_weight, mean, eps, pages, slot_mapping, out,
    num_rows, dim, width,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    if pages is None:
        # Rows of one token, its heads: one in a row of the tile, or as many side by side as fit.
        token = tl.full([BLOCK_ROWS], 0, tl.int64) + tl.program_id(0)
        row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = row < num_rows
        row += token * num_rows
        inside = live[:, None] & (tl.arange(0, WIDTH)[None, :] < width)
    else:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        token = row
        live = row < num_rows
        slot = tl.load(slot_mapping + row, mask=live, other=-1)
        write = slot >= 0
        slot = tl.where(write, slot, 0)
        if out is None:
            live = write
        inside = live[:, None]
        dim = WIDTH
    channel = tl.arange(0, WIDTH)[None, :]
    rows = tl.load(x.data + row[:, None] * x.stride_row + channel, mask=inside, other=0.0)
    rows = normed(rows.to(tl.float32), norm_weight, mean, eps, dim, WIDTH)
    if cos_sin is not None:
        position = tl.load(positions + token, mask=live, other=-1)
        rows = rotated(rows, position, position >= 0, cos_sin, dim, BLOCK_ROWS, WIDTH, ROPE_DIM)
    if pages is not None:
        rows = stored(rows, slot, write, pages, BLOCK_SIZE, 0, dim, BLOCK_ROWS, WIDTH)
    if out is not None:
        cell = out.data + row[:, None] * out.stride_row + channel
        tl.store(cell, rows.to(out.data.dtype.element_ty), mask=inside)


def paged_rows(pages: LatentPages | IndexPages) -> strided.PagedRows:
    """The pages of ``stored``, whose first row is where they begin."""
    rows = pages.values if pages.fp8 else pages.data
    return strided.PagedRows(pages.data, rows.stride(0), rows.stride(1))


def write_latent(call: LatentCall) -> None:
    """Launch a checked call."""
    run([prepare(call)], call.x)


def prepare(call: LatentCall) -> Launch:
    """The launch of a checked call."""
    x, cos_sin, norm_weight, out = call.x, call.cos_sin, call.norm_weight, call.out
    pages, (num_rows, dim), packed = call.pages, x.shape, 1
    wide = WIDTH if pages is None else dim
    block_rows = max(1, ELEMENTS_PER_PROGRAM // wide)
    grid = (triton.cdiv(num_rows, block_rows),)
    if pages is None:
        num_tokens = num_rows if call.positions is None else len(call.positions)
        num_rows //= max(1, num_tokens)
        # What is normed has a row of the tile to itself.
        if norm_weight is None and all(t is None or t.stride(0) == dim for t in (x, out)):
            packed = math.gcd(num_rows, wide // dim)
        num_rows //= packed
        grid = (num_tokens, triton.cdiv(num_rows, block_rows))
    return Launch(
        _write_latent_kernel,
        grid,
        {
            "x": strided.Matrix(x, packed * x.stride(0)),
            "positions": call.positions,
            "cos_sin": strided.matrix(cos_sin),
            # Without a norm any tensor, of which nothing is read, so that heads with a norm and
            # heads without have the same kernel.
            "norm_weight": next(t for t in (norm_weight, cos_sin, x) if t is not None),
            "mean": 0.0 if norm_weight is None else 1 / dim,
            "eps": float(call.eps),
            "slot_mapping": call.slot_mapping,
            "out": None if out is None else strided.Matrix(out, packed * out.stride(0)),
            "num_rows": num_rows,
            "dim": dim,
            "width": packed * dim,
            "pages": None if pages is None else paged_rows(pages),
            "BLOCK_SIZE": 1 if pages is None else pages.storage_block_size,
            "WIDTH": wide,
            "ROPE_DIM": 0 if cos_sin is None else cos_sin.shape[1],
            "BLOCK_ROWS": block_rows,
            "num_warps": 4,
        },
    )
