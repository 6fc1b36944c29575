"""Norm, RoPE, quantization and the write of latent rows in one pass; ``compress`` ends with the
same helpers.

    y = x * rsqrt(mean(x^2) + eps) * weight                                   (optional)
    y'[2i] = y[2i] cos_i - y[2i+1] sin_i,  y'[2i+1] = y[2i+1] cos_i + y[2i] sin_i    on the trailing channels (optional)

in fp32, rounded once to what the page holds; quantized rows round to bf16 and then to e4m3, as
``common.latent_pages`` says. The rounding to e4m3 is integer arithmetic on the bits: exact where
there is no such instruction (sm_80) and in Triton's interpreter, whose own cast is not.

Layout: x [num_rows, dim], one program takes BLOCK_ROWS rows; pages as in ``common.latent_pages``.
Bound by memory: a row is read once and written once (twice with ``out``).

Source: DeepSeek-V4, kv_norm and rotary embedding of the latent; FlashMLA's tests/quant.py for the
    quantized rows.
"""

from typing import Any

import triton
import triton.language as tl

from ..common import latent_pages, launch_cache
from ..common.latent_pages import IndexPages, LatentPages
from ..common.launching import Launch
from ..common.tiles import INF_BITS, rounded_to_e4m3
from .call import LatentCall

ELEMENTS_PER_PROGRAM = 2048

QUANT_GROUP = tl.constexpr(latent_pages.QUANT_GROUP)
NOPE_DIM = tl.constexpr(latent_pages.NOPE_DIM)
SCALE_BYTES = tl.constexpr(latent_pages.SCALE_BYTES)
MIN_AMAX_BITS = tl.constexpr(0x38D1B717)


@triton.jit
def normed(rows, weight, eps, DIM: tl.constexpr):
    """RMS norm of rows [ROWS, DIM] fp32; weight [DIM] any dtype, or None for no norm at all."""
    if weight is not None:
        scale = tl.rsqrt(tl.sum(rows * rows, 1) / DIM + eps)
        rows = rows * scale[:, None] * tl.load(weight + tl.arange(0, DIM)).to(tl.float32)[None, :]
    return rows


@triton.jit
def rotated(
    rows,
    position,
    live,
    cos_sin,
    cos_sin_stride,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """Turn the pairs (2i, 2i + 1) of the trailing ROPE_DIM channels of rows [ROWS, DIM] by the
    angles of position [ROWS] int64."""
    if cos_sin is not None:
        even, odd = tl.split(tl.reshape(rows, [ROWS, DIM // 2, 2]))
        pair = tl.arange(0, DIM // 2)[None, :] - (DIM - ROPE_DIM) // 2
        turns = live[:, None] & (pair >= 0)
        angle = cos_sin + position[:, None] * cos_sin_stride + pair
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + ROPE_DIM // 2, mask=turns, other=0.0)
        turned_even = tl.where(turns, even * cos - odd * sin, even)
        turned_odd = tl.where(turns, odd * cos + even * sin, odd)
        rows = tl.reshape(tl.join(turned_even, turned_odd), [ROWS, DIM])
    return rows


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize(rows, ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Quantize rows fp32 to e4m3 with one power-of-two scale for each GROUP channels.

    Returns:
        (values [ROWS, DIM] fp32 as read back, e4m3_bytes [ROWS, DIM] uint8, exponents [ROWS, DIM //
        GROUP] int32).
    """
    x = tl.reshape(rows.to(tl.bfloat16).to(tl.float32), [ROWS, DIM // GROUP, GROUP])
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Bits of positive floats are ordered as the floats are.
    largest = tl.max(tl.where(magnitude > INF_BITS, 0, magnitude), 2)
    largest = tl.maximum(largest, MIN_AMAX_BITS)
    # 448 = 1.75 * 2^8: the ceiling of log2(largest / 448), without the rounding of a logarithm.
    exponent = (largest >> 23) - (127 + 8) + tl.where((largest & 0x7FFFFF) > 0x600000, 1, 0)
    value, byte = rounded_to_e4m3(x * _power_of_two(-exponent)[:, :, None])
    value = value * _power_of_two(exponent)[:, :, None]
    e4m3_bytes = tl.reshape(byte, [ROWS, DIM]).to(tl.uint8)
    return tl.reshape(value, [ROWS, DIM]), e4m3_bytes, exponent


@triton.jit
def stored(
    rows,
    slot,
    live,
    pages,
    page_stride,
    row_stride,
    BLOCK_SIZE: tl.constexpr,
    LATENTS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Write rows [ROWS, DIM] fp32 to their slots [ROWS] int64 where ``live``; returns them as a
    reader of the page sees them.

    Pages of bytes are quantized, ``LATENTS`` or index keys; the strides are those of their e4m3
    values.
    """
    page = (slot // BLOCK_SIZE)[:, None]
    row = (slot % BLOCK_SIZE)[:, None]
    write = live[:, None]
    dim = tl.arange(0, DIM)[None, :]
    cell = pages + page * page_stride + row * row_stride + dim
    scales = pages + BLOCK_SIZE * row_stride  # behind all rows of a page
    if pages.dtype.element_ty != tl.uint8:
        kept = rows.to(pages.dtype.element_ty)
        tl.store(cell, kept, mask=write)
        rows = kept.to(tl.float32)
    elif not LATENTS:
        rows, e4m3_bytes, exponent = quantize(rows, ROWS, DIM, DIM)
        tl.store(cell, e4m3_bytes, mask=write)
        scales = scales.to(tl.pointer_type(tl.float32))
        tl.store(scales + page * (page_stride // 4) + row, _power_of_two(exponent), mask=write)
    else:
        roped = rows.to(tl.bfloat16)
        values, e4m3_bytes, exponent = quantize(rows, ROWS, DIM, QUANT_GROUP)
        is_rope = dim >= NOPE_DIM
        tl.store(cell, e4m3_bytes, mask=write & (dim < NOPE_DIM))
        rope = pages.to(tl.pointer_type(tl.bfloat16)) + NOPE_DIM // 2
        rope_cell = rope + page * (page_stride // 2) + row * (row_stride // 2) + dim - NOPE_DIM
        tl.store(rope_cell, roped, mask=write & is_rope)
        # The group of the roped channels has no scale: its byte is padding, and zero.
        group = tl.arange(0, SCALE_BYTES)[None, :]
        byte = tl.where(group < SCALE_BYTES - 1, exponent + 127, 0).to(tl.uint8)
        tl.store(scales + page * page_stride + row * SCALE_BYTES + group, byte, mask=write)
        rows = tl.where(is_rope, roped.to(tl.float32), values)
    return rows


@triton.jit(do_not_specialize=["num_rows"])
def _write_latent_kernel(
    x,
    positions,
    cos_sin,
    norm_weight,
    eps,
    pages,
    slot_mapping,
    out,
    num_rows,
    x_stride,
    cos_sin_stride,
    page_stride,
    row_stride,
    out_stride,
    BLOCK_SIZE: tl.constexpr,
    LATENTS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    write = live
    if pages is not None:
        slot = tl.load(slot_mapping + row, mask=live, other=-1)
        write = slot >= 0
        slot = tl.where(write, slot, 0)
        if out is None:
            live = write
    dim = tl.arange(0, DIM)[None, :]
    rows = tl.load(x + row[:, None] * x_stride + dim, mask=live[:, None], other=0.0)
    rows = normed(rows.to(tl.float32), norm_weight, eps, DIM)
    if cos_sin is not None:
        position = tl.load(positions + row, mask=live, other=-1)
        turned = position >= 0
        rows = rotated(rows, position, turned, cos_sin, cos_sin_stride, BLOCK_ROWS, DIM, ROPE_DIM)
    if pages is not None:
        rows = stored(
            rows,
            slot,
            write,
            pages,
            page_stride,
            row_stride,
            BLOCK_SIZE,
            LATENTS,
            BLOCK_ROWS,
            DIM,
        )
    if out is not None:
        cell = out + row[:, None] * out_stride + dim
        tl.store(cell, rows.to(out.dtype.element_ty), mask=live[:, None])


def page_arguments(pages: LatentPages | IndexPages | None) -> dict[str, Any]:
    """The arguments of ``stored`` that say where pages are, by name; None for no pages."""
    if pages is None:
        return {"pages": None, "page_stride": 1, "row_stride": 1, "BLOCK_SIZE": 1, "LATENTS": False}
    rows = pages.values if pages.fp8 else pages.data
    return {
        "pages": pages.data,  # where the rows begin, too
        "page_stride": rows.stride(0),
        "row_stride": rows.stride(1),
        "BLOCK_SIZE": pages.storage_block_size,
        "LATENTS": pages.fp8 and isinstance(pages, LatentPages),
    }


def write(arguments: dict[str, Any]) -> None:
    """Check and launch ``write_latent(**arguments)``.

    Calls that look alike are checked once (``common.launch_cache``).
    """
    launch_cache.run(prepare, arguments, _checked)


def _checked(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    return arguments, [prepare(LatentCall(**arguments))]


def prepare(call: LatentCall) -> Launch:
    """The launch of a checked call."""
    x, cos_sin, out = call.x, call.cos_sin, call.out
    num_rows, dim = x.shape
    block_rows = max(1, ELEMENTS_PER_PROGRAM // dim)
    return Launch(
        _write_latent_kernel,
        (triton.cdiv(num_rows, block_rows),),
        {
            "x": x,
            "positions": call.positions,
            "cos_sin": cos_sin,
            "norm_weight": call.norm_weight,
            "eps": float(call.eps),
            "slot_mapping": call.slot_mapping,
            "out": out,
            "num_rows": num_rows,
            "x_stride": x.stride(0),
            "cos_sin_stride": 0 if cos_sin is None else cos_sin.stride(0),
            "out_stride": 0 if out is None else out.stride(0),
            **page_arguments(call.pages),
            "DIM": dim,
            "ROPE_DIM": 0 if cos_sin is None else cos_sin.shape[1],
            "BLOCK_ROWS": block_rows,
            "num_warps": 4,
        },
    )
