"""Norm, RoPE, quantization and paged write of latent rows in one pass. ``compress`` ends with the
same helpers.

    y = x * rsqrt(mean(x^2) + eps) * weight                                   (optional)
    y'[2i] = y[2i] cos_i - y[2i+1] sin_i,  y'[2i+1] = y[2i+1] cos_i + y[2i] sin_i    on the trailing channels (optional)

The arithmetic is fp32, rounded once to the dtype of the page. Quantized rows round to bf16 and then
to e4m3 (``common.latent_pages``) by integer arithmetic on the bits: exact without a hardware
conversion (sm_80) and in Triton's interpreter.

A program takes BLOCK_ROWS rows [dim] of x. The heads of a token are rows that share its position.

Source: DeepSeek-V4, kv_norm and RoPE of the latent; FlashMLA's tests/quant.py for quantized rows.
"""

import torch
import triton
import triton.language as tl

from ..common import latent_pages, launching, strided
from ..common.bits import INF_BITS, rounded_to_e4m3
from ..common.latent_pages import IndexPages, LatentPages

ELEMENTS_PER_PROGRAM = 2048
# Channels of a tile for rows of any size.
WIDTH = max(latent_pages.DIMS)

QUANT_GROUP = tl.constexpr(latent_pages.QUANT_GROUP)
NOPE_DIM = tl.constexpr(latent_pages.NOPE_DIM)
SCALE_BYTES = tl.constexpr(latent_pages.SCALE_BYTES)
MIN_AMAX_BITS = tl.constexpr(0x38D1B717)  # latent_pages.MIN_AMAX as fp32


@triton.jit
def normed(rows, weight, mean, eps, dim, WIDTH: tl.constexpr):
    """RMS norm of rows [ROWS, WIDTH] fp32 with ``dim`` channels; 0 behind them.

    mean: 1 / dim, exact as dim is a power of two; 0: no norm, and ``weight`` is not read.
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
    """Rotate pairs (2i, 2i + 1) of the last ROPE_DIM of ``dim`` channels of rows [ROWS, WIDTH] by
    the angles of position [ROWS] int64 where ``live``."""
    if cos_sin is not None:
        even, odd = tl.split(tl.reshape(rows, [ROWS, WIDTH // 2, 2]))
        pair = tl.arange(0, WIDTH // 2)[None, :] - (dim - ROPE_DIM) // 2
        turns = live[:, None] & (pair >= 0) & (pair < ROPE_DIM // 2)
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
    """Quantize rows fp32 to e4m3, with one power-of-two scale for each QUANT_GROUP channels or, if
    ``whole``, for each row.

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
    """Write rows [ROWS, WIDTH] fp32 of ``dim`` channels to slots [ROWS] int64 where ``live``.

    uint8 pages are quantized: index keys of ``index_dim`` channels, or latents where that is 0;
    the strides are those of their e4m3 values.

    Returns:
        The rows as a reader of the page sees them, fp32.
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
            # The last group, the rotated channels, has no scale: a padding byte of zero.
            byte = tl.where(group < SCALE_BYTES - 1, exponent + 127, 0).to(tl.uint8)
            tl.store(
                scales + page * pages.stride_page + row * SCALE_BYTES + group, byte, mask=write
            )
            rows = tl.where(is_rope, roped.to(tl.float32), rows)
    return rows


@triton.jit(do_not_specialize=["num_rows", "heads", "block_size"])
def _write_latent_kernel(
    x, positions, cos_sin, norm_weight, mean, eps, pages, slot_mapping, out,
    num_rows, heads, block_size, dim,
    WIDTH: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    if pages is not None:
        slot = tl.load(slot_mapping + row, mask=live, other=-1)
        write = slot >= 0
        slot = tl.where(write, slot, 0)
        if out is None:
            live = write
    channel = tl.arange(0, WIDTH)[None, :]
    inside = live[:, None] & (channel < dim)
    rows = tl.load(x.data + row[:, None] * x.stride_row + channel, mask=inside, other=0.0)
    rows = normed(rows.to(tl.float32), norm_weight, mean, eps, dim, WIDTH)
    if cos_sin is not None:
        position = tl.load(positions + row // heads, mask=live, other=-1)
        rows = rotated(rows, position, position >= 0, cos_sin, dim, BLOCK_ROWS, WIDTH, ROPE_DIM)
    if pages is not None:
        rows = stored(rows, slot, write, pages, block_size, 0, dim, BLOCK_ROWS, WIDTH)
    if out is not None:
        cell = out.data + row[:, None] * out.stride_row + channel
        tl.store(cell, rows.to(out.data.dtype.element_ty), mask=inside)


def paged_rows(pages: LatentPages | IndexPages) -> strided.PagedRows:
    """Pages as ``stored`` takes them."""
    rows = pages.values if pages.fp8 else pages.data
    return strided.PagedRows(pages.data, rows.stride(0), rows.stride(1))


def write_latent(
    x: torch.Tensor,
    pages: LatentPages | None,
    slot_mapping: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
) -> None:
    """Launch ``write_latent`` of checked arguments."""
    num_rows, dim = x.shape
    # Heads of any size share a kernel, with and without a norm.
    width = WIDTH if pages is None else dim
    block_rows = ELEMENTS_PER_PROGRAM // width
    unread = x if cos_sin is None else cos_sin
    with torch.cuda.device_of(x):
        launching.launch(
            _write_latent_kernel,
            (triton.cdiv(num_rows, block_rows),),
            x=strided.matrix(x),
            positions=positions,
            cos_sin=strided.matrix(cos_sin),
            norm_weight=unread if norm_weight is None else norm_weight,
            mean=0.0 if norm_weight is None else 1 / dim,
            eps=float(eps),
            pages=None if pages is None else paged_rows(pages),
            slot_mapping=slot_mapping,
            out=strided.matrix(out),
            num_rows=num_rows,
            heads=max(1, num_rows // max(1, num_rows if positions is None else len(positions))),
            block_size=1 if pages is None else pages.storage_block_size,
            dim=dim,
            WIDTH=width,
            ROPE_DIM=0 if cos_sin is None else cos_sin.shape[1],
            BLOCK_ROWS=block_rows,
            num_warps=4,
        )
