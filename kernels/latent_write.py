"""Norm, RoPE, quantization and paged write of latent rows in one pass. ``compressor`` ends with the
same helpers.

A program takes BLOCK_ROWS rows. The arithmetic is fp32, rounded once to the dtype of the page.
Quantized rows round to bf16 and then to e4m3 (``common.latent_pages``) by integer arithmetic on the
bits, which needs no hardware conversion.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .common import checks, latent_pages, launching, strided
from .common.bits import INF_BITS, rounded_to_e4m3
from .common.latent_pages import IndexPages, LatentPages
from .common.tile_shapes import MAX_REGISTERS

ELEMENTS_PER_PROGRAM = 2048

QUANT_GROUP = tl.constexpr(latent_pages.QUANT_GROUP)
NOPE_DIM = tl.constexpr(latent_pages.NOPE_DIM)
SCALE_BYTES = tl.constexpr(latent_pages.SCALE_BYTES)
MIN_AMAX_BITS = tl.constexpr(0x38D1B717)  # latent_pages.MIN_AMAX as fp32


def write_latent(
    x: torch.Tensor,
    pages: LatentPages | None,
    slot_mapping: torch.Tensor | None,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | None:
    """Norm latent rows, rotate them, and write them to their slots. Each step is optional.

    The arithmetic is fp32 and rounds once, to the dtype of the pages.

    Args:
        x: [num_rows, head_dim] bf16, fp16 or fp32, last stride 1.
        pages: destination; None fills only ``out``. No two written slots may share memory.
        slot_mapping: [num_rows] int64, page * storage_block_size + row; -1 = do not write this row.
            None without pages.
        positions: [num_rows] int64, rows of ``cos_sin``; -1 = no rotation; None = no RoPE. Without
            pages [num_tokens], each of num_rows / num_tokens consecutive rows, the heads of a
            token.
        cos_sin: [max_position, rope_dim] fp32, the cosines of rope_dim / 2 pairs and then their
            sines. Pair i is channels 2i and 2i + 1 of the trailing rope_dim channels and turns by
            +angle.
        norm_weight: [head_dim] bf16, fp16 or fp32, of an RMS norm before RoPE; None = no norm.
        eps: added to the mean square, in 2**-100 .. 2**30.
        out: [num_rows, head_dim] x's dtype, filled in place with the rows as a reader of the page
            sees them, rows of slot -1 too; it may be x. None = not wanted.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        ``out``.

    Raises:
        NotImplementedError: head_dim is not a power of two in 16..512.

    Source: DeepSeek-V4, kv_norm and RoPE of the latent.
    """
    chosen = checks.accept(
        impl, _check, x, pages, slot_mapping, positions, cos_sin, norm_weight, eps, out
    )
    if chosen == "torch" or checks.is_readable(x):
        rotated = positions
        if pages is not None:
            live = slot_mapping >= 0
            num_slots = pages.data.shape[0] * pages.storage_block_size
            checks.expect_ids("slot_mapping", slot_mapping[live], num_slots)
            if out is None and positions is not None:
                rotated = positions[live]  # of the others nothing is read
        if rotated is not None:
            checks.expect_ids("positions", rotated[rotated >= 0], cos_sin.shape[0], "positions")
    if chosen == "torch":
        _torch(x, pages, slot_mapping, positions, cos_sin, norm_weight, eps, out)
        return out
    num_rows, dim = x.shape
    block_rows = ELEMENTS_PER_PROGRAM // dim
    num_tokens = num_rows if positions is None else len(positions)
    with torch.cuda.device_of(x):
        launching.launch(
            _write_latent_kernel, (triton.cdiv(num_rows, block_rows),),
            x=strided.matrix(x), positions=positions, cos_sin=strided.matrix(cos_sin),
            norm_weight=norm_weight, eps=float(eps),
            pages=None if pages is None else paged_rows(pages), slot_mapping=slot_mapping,
            out=strided.matrix(out), num_rows=num_rows,
            heads=max(1, num_rows // max(1, num_tokens)),
            block_size=1 if pages is None else pages.storage_block_size, DIM=dim,
            ROPE_DIM=0 if cos_sin is None else cos_sin.shape[1], BLOCK_ROWS=block_rows,
            num_warps=4, **launching.arch_and_sms(x)[0].register_limit(MAX_REGISTERS),
        )  # fmt: skip
    return out


def _check(x, pages, slot_mapping, positions, cos_sin, norm_weight, eps, out) -> None:
    if pages is not None and not isinstance(pages, LatentPages):
        raise ValueError(f"pages: expected LatentPages or None, got {type(pages).__name__}")
    checks.expect_tensor(
        "x", x, (None, None if pages is None else pages.head_dim), checks.MODEL_DTYPES
    )
    (num_rows, head_dim), device = x.shape, x.device
    if pages is not None:
        checks.expect_device("pages", pages.data, device)
        checks.expect_tensor("slot_mapping", slot_mapping, (num_rows,), torch.int64, device=device)
    elif out is None or slot_mapping is not None:
        raise ValueError("pages: expected LatentPages, or None with out and without slot_mapping")
    elif head_dim not in checks.HEAD_DIMS:
        raise NotImplementedError(f"x: head_dim {head_dim} is not one of {list(checks.HEAD_DIMS)}")
    if (positions is None) != (cos_sin is None):
        missing = "positions" if positions is None else "cos_sin"
        raise ValueError(f"{missing}: expected positions and cos_sin or neither, got None")
    if positions is not None:
        expected = None if pages is None else num_rows
        checks.expect_tensor("positions", positions, (expected,), torch.int64, device=device)
        num_tokens = positions.shape[0]
        if num_rows % num_tokens if num_tokens else num_rows:
            raise ValueError(f"positions: expected a divisor of {num_rows} rows, got {num_tokens}")
        expect_angles(cos_sin, head_dim, None if pages is None else pages.rope_dim, device)
    if norm_weight is not None:
        expect_norm(norm_weight, eps, head_dim, device)
    checks.expect_output("out", out, (num_rows, head_dim), x.dtype, device)


def expect_angles(
    cos_sin: torch.Tensor, dim: int, rope_dim: int | None, device: torch.device
) -> None:
    """Require a ``cos_sin`` [*, rope_dim] fp32 of an even rope_dim <= dim (None: any)."""
    checks.expect_tensor("cos_sin", cos_sin, (None, rope_dim), torch.float32, device=device)
    if cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= dim:
        raise ValueError(
            f"cos_sin: expected an even rope_dim in 2..{dim}, got {list(cos_sin.shape)}"
        )


def expect_norm(norm_weight: torch.Tensor, eps: float, dim: int, device: torch.device) -> None:
    """Require a ``norm_weight`` [dim] and an ``eps`` in [2**-100, 2**30]."""
    checks.expect_tensor("norm_weight", norm_weight, (dim,), checks.MODEL_DTYPES, device=device)
    checks.expect_positive("eps", eps, least=-100)


@torch.no_grad()
def _torch(x, pages, slot_mapping, positions, cos_sin, norm_weight, eps, out) -> None:
    if positions is not None and len(positions) < len(x):
        positions = positions.repeat_interleave(len(x) // len(positions))
    if pages is not None and positions is not None and out is None:
        positions = torch.where(slot_mapping >= 0, positions, -1)
    rows = norm_and_rotate(x, positions, cos_sin, norm_weight, eps)
    if pages is not None:
        pages.write(slot_mapping, rows)
    if out is not None:
        out.copy_(rows if pages is None else pages.seen(rows))


def norm_and_rotate(
    x: torch.Tensor, positions: torch.Tensor | None, cos_sin: torch.Tensor | None,
    norm_weight: torch.Tensor | None, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Norm rows and rotate those with a position >= 0, in plain torch; [num_rows, dim] fp32."""
    rows = x.float()
    if norm_weight is not None:
        rows = F.rms_norm(rows, rows.shape[-1:], norm_weight.float(), eps)
    if positions is None or not (positions >= 0).any():
        return rows
    nope, rope = rows.tensor_split((rows.shape[1] - cos_sin.shape[1],), -1)
    cos, sin = cos_sin[positions.clamp(min=0)].chunk(2, -1)
    even, odd = rope[:, 0::2], rope[:, 1::2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    rotated = torch.where((positions >= 0)[:, None], rotated, rope)
    return torch.cat([nope, rotated], -1)


def paged_rows(pages: LatentPages | IndexPages) -> strided.PagedMatrix:
    """Pages as ``stored`` takes them: the strides of quantized pages are those of their values."""
    rows = pages.values if pages.fp8 else pages.data
    return strided.PagedMatrix(pages.data, rows.stride(0), rows.stride(1))


@triton.jit
def normed(rows, weight, eps, DIM: tl.constexpr):
    """RMS norm of rows [ROWS, DIM] fp32; a weight of None: no norm."""
    if weight is not None:
        scale = tl.rsqrt(tl.sum(rows * rows, 1) / DIM + eps)
        factor = tl.load(weight + tl.arange(0, DIM)).to(tl.float32)
        rows = rows * scale[:, None] * factor[None, :]
    return rows


@triton.jit
def rotated(rows, position, cos_sin, ROWS: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Rotate pairs (2i, 2i + 1) of the last ROPE_DIM channels of rows [ROWS, DIM] by the angles of
    position [ROWS] int64; rows of negative positions stay."""
    even, odd = tl.split(tl.reshape(rows, [ROWS, DIM // 2, 2]))
    pair = tl.arange(0, DIM // 2)[None, :] - (DIM - ROPE_DIM) // 2
    turns = (position >= 0)[:, None] & (pair >= 0)
    angle = cos_sin.data + position[:, None] * cos_sin.stride_row + pair
    cos = tl.load(angle, mask=turns, other=1.0)
    sin = tl.load(angle + ROPE_DIM // 2, mask=turns, other=0.0)
    turned_even = tl.where(turns, even * cos - odd * sin, even)
    turned_odd = tl.where(turns, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), [ROWS, DIM])


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize(rows, ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Quantize rows fp32 to e4m3, with one power-of-two scale for each GROUP channels.

    Returns:
        (values [ROWS, DIM] fp32 as read back, their bytes uint8, exponents [ROWS, DIM // GROUP]
        int32).
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
    rows, slot, live, pages, block_size,
    INDEX_KEYS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write rows [ROWS, DIM] fp32 to slots [ROWS] int64 where ``live``.

    uint8 pages are quantized: index keys, or latents.

    Returns:
        The rows as a reader of the page sees them, fp32.
    """
    page = (slot // block_size)[:, None]
    row = (slot % block_size)[:, None]
    write = live[:, None]
    channel = tl.arange(0, DIM)[None, :]
    cell = pages.data + page * pages.stride_page + row * pages.stride_row + channel
    scales = pages.data + block_size * pages.stride_row  # behind all quantized rows of a page
    if pages.data.dtype.element_ty != tl.uint8:
        kept = rows.to(pages.data.dtype.element_ty)
        tl.store(cell, kept, mask=write)
        rows = kept.to(tl.float32)
    elif INDEX_KEYS:
        rows, e4m3_bytes, exponent = quantize(rows, ROWS, DIM, DIM)
        tl.store(cell, e4m3_bytes, mask=write)
        scale = scales.to(tl.pointer_type(tl.float32)) + page * (pages.stride_page // 4) + row
        tl.store(scale, _power_of_two(exponent), mask=write)
    else:
        roped = rows.to(tl.bfloat16)
        rows, e4m3_bytes, exponent = quantize(rows, ROWS, DIM, QUANT_GROUP)
        is_rope = channel >= NOPE_DIM
        tl.store(cell, e4m3_bytes, mask=write & (channel < NOPE_DIM))
        rope = pages.data.to(tl.pointer_type(tl.bfloat16)) + NOPE_DIM // 2
        rope_cell = rope + page * (pages.stride_page // 2) + row * (pages.stride_row // 2)
        tl.store(rope_cell + channel - NOPE_DIM, roped, mask=write & is_rope)
        # The last group, the rotated channels, has no scale: a padding byte of zero.
        group = tl.arange(0, SCALE_BYTES)[None, :]
        byte = tl.where(group < SCALE_BYTES - 1, exponent + 127, 0).to(tl.uint8)
        tl.store(scales + page * pages.stride_page + row * SCALE_BYTES + group, byte, mask=write)
        rows = tl.where(is_rope, roped.to(tl.float32), rows)
    return rows


@triton.jit(do_not_specialize=["num_rows", "heads", "block_size"])
def _write_latent_kernel(
    x, positions, cos_sin, norm_weight, eps, pages, slot_mapping, out, num_rows, heads, block_size,
    DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    if pages is not None:
        slot = tl.load(slot_mapping + row, mask=live, other=-1)
        write = slot >= 0
        slot = tl.where(write, slot, 0)
        if out is None:
            live = write
    channel = tl.arange(0, DIM)[None, :]
    cells = x.data + row[:, None] * x.stride_row + channel
    rows = tl.load(cells, mask=live[:, None], other=0.0).to(tl.float32)
    rows = normed(rows, norm_weight, eps, DIM)
    if cos_sin is not None:
        position = tl.load(positions + row // heads, mask=live, other=-1)
        rows = rotated(rows, position, cos_sin, BLOCK_ROWS, DIM, ROPE_DIM)
    if pages is not None:
        rows = stored(rows, slot, write, pages, block_size, False, BLOCK_ROWS, DIM)
    if out is not None:
        cells = out.data + row[:, None] * out.stride_row + channel
        tl.store(cells, rows.to(out.data.dtype.element_ty), mask=live[:, None])
