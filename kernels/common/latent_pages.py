"""Pages of latents and of index keys: views for the kernels, exact reads and writes in torch.

Plain pages are rows [num_pages, storage_block_size, dim]. Quantized pages of n rows are bytes:

    latents       n rows of 448 e4m3 values and 64 bf16 roped values: 576 bytes, at row * 576
                  n rows of 7 exponents e + 127, each of 64 values, and a zero: at n * 576 + row * 8
    index keys    n rows of index_dim e4m3 values, then n fp32 scales

Source: DeepSeek-V4 (``fp8_ds_mla`` rows; FlashMLA's tests/quant.py, where they are MODEL1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .checks import HEAD_DIMS, MODEL_DTYPES, expect_int, expect_short_pages, expect_tensor
from .e4m3 import E4M3_MAX

# The quantized latent row.
HEAD_DIM = 512
ROPE_DIM = 64
NOPE_DIM = HEAD_DIM - ROPE_DIM
QUANT_GROUP = 64
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = NOPE_DIM // QUANT_GROUP + 1
PAGE_ALIGNMENT = 576
# Required by copies of 16 bytes; every multiple of PAGE_ALIGNMENT has it.
BYTE_ALIGNMENT = 16

# The smallest maximum of a group: it keeps the scale of a group of zeros finite.
MIN_AMAX = 1e-4
EXPONENT_BIAS = 127


@dataclass(frozen=True, eq=False)
class RowPages:
    """Plain rows in pages, ``data`` [num_pages, storage_block_size, dim], or quantized bytes, whose
    parts a subclass names (`_views`)."""

    data: torch.Tensor
    storage_block_size: int

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """All that checks look at (`checks.accept`)."""
        data, (_, *sizes) = self.data, vars(self).values()
        return self.__class__, data.shape, data.stride(), data.dtype, data.device, *sizes

    @cached_property
    def fp8(self) -> bool:
        """True if the pages are quantized."""
        return isinstance(self.data, torch.Tensor) and self.data.dtype == torch.uint8

    def read(self, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gather rows [..., dim] of ``slots`` [...] int64, page * storage_block_size + row,
        exactly; a negative slot gives zeros."""
        page, row = self._locate(slots.clamp(min=0))
        if self.fp8:
            rows = self._dequantize(*(view[page, row] for view in self._views()))
        else:
            rows = self.data[page, row]
        return torch.where((slots >= 0)[..., None], rows, 0).to(dtype)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write ``rows`` [n, dim] to ``slots`` [n] int64; -1 = skip."""
        live = slots >= 0
        page, row = self._locate(slots[live])
        if not self.fp8:
            self.data[page, row] = rows[live].to(self.data.dtype)
            return
        for view, part in zip(self._views(), self._quantize(rows[live]), strict=True):
            view[page, row] = part

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Values [n, dim] fp32 that these pages hold after ``rows`` [n, dim] are written."""
        if self.fp8:
            return self._dequantize(*self._quantize(rows))
        return rows.to(self.data.dtype).float()

    def _locate(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots // self.storage_block_size, slots % self.storage_block_size

    def _view(self, first: int, width: int, stride: int) -> torch.Tensor:
        """Rows of ``width`` bytes, ``stride`` bytes apart, from byte ``first`` of each page on."""
        shape = self.data.shape[0], self.storage_block_size, width
        offset = self.data.storage_offset() + first
        return self.data.as_strided(shape, (self.data.stride(0), stride, 1), offset)

    def _check(self, dim: int, row_bytes: int, name: str) -> None:
        """Check ``data`` against the channels of a plain row, field ``name``, and the bytes of a
        quantized one."""
        rows, data = self.storage_block_size, self.data
        expect_int("storage_block_size", rows, 1)
        if dim not in HEAD_DIMS:
            raise NotImplementedError(f"{name}: {dim} is not one of {list(HEAD_DIMS)}")
        if not self.fp8:
            expect_tensor("data", data, (None, rows, dim), MODEL_DTYPES)
            expect_short_pages("data", data)
            return
        expect_tensor("data", data, (None, None), torch.uint8)
        if not rows * row_bytes <= data.shape[1] < 2**31:
            raise ValueError(
                f"data: expected pages of >= {rows * row_bytes} bytes, got {data.shape[1]}"
            )
        if data.stride(0) % BYTE_ALIGNMENT or data.storage_offset() % BYTE_ALIGNMENT:
            raise ValueError(
                f"data: expected a page stride and offset that are multiples of {BYTE_ALIGNMENT} "
                f"bytes, got {data.stride(0)} and {data.storage_offset()}"
            )


@dataclass(frozen=True, eq=False)
class LatentPages(RowPages):
    """Pages of latent rows, each a key-and-value vector with ``rope_dim`` trailing roped channels.

    Args:
        data: [num_pages, storage_block_size, head_dim] bf16, fp16 or fp32 rows, any page and row
            stride, last stride 1; or [num_pages, >= storage_block_size * 584] uint8 in the
            quantized layout of this module, page stride a multiple of 16.
        storage_block_size: rows that a page stores.
        head_dim: channels of a row, a power of two in 16..512; 512 in the quantized layout.
        rope_dim: trailing channels that are roped, even; 64 in the quantized layout.

    Raises:
        NotImplementedError: a head_dim or rope_dim that is not supported.

    Source: DeepSeek-V4, window and compressed KV.
    """

    head_dim: int = HEAD_DIM
    rope_dim: int = ROPE_DIM

    def __post_init__(self) -> None:
        self._check(self.head_dim, ROW_BYTES + SCALE_BYTES, "head_dim")
        expect_int("rope_dim", self.rope_dim, 0, self.head_dim)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim: expected an even number, got {self.rope_dim}")
        if self.fp8 and (self.head_dim, self.rope_dim) != (HEAD_DIM, ROPE_DIM):
            raise NotImplementedError(
                f"data: quantized latents have head_dim {HEAD_DIM} and rope_dim {ROPE_DIM}, "
                f"not {self.head_dim} and {self.rope_dim}"
            )

    @property
    def dim(self) -> int:
        """Channels of a row."""
        return self.head_dim

    @property
    def values(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size, 448] uint8 view of the e4m3 values."""
        return self._view(0, NOPE_DIM, ROW_BYTES)

    @property
    def rope(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size, 64] bf16 view of the roped channels."""
        return self._view(NOPE_DIM, 2 * ROPE_DIM, ROW_BYTES).view(torch.bfloat16)

    @property
    def scales(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size, 8] uint8, 7 biased exponents and 0."""
        return self._view(self.storage_block_size * ROW_BYTES, SCALE_BYTES, SCALE_BYTES)

    def _views(self) -> tuple[torch.Tensor, ...]:
        return self.values, self.rope, self.scales

    def _quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, exponent = quantize_groups(rows[:, :NOPE_DIM], QUANT_GROUP)
        biased = (exponent + EXPONENT_BIAS).to(torch.uint8)
        rope = rows[:, NOPE_DIM:].to(torch.bfloat16)
        return values, rope, torch.nn.functional.pad(biased, (0, 1))

    def _dequantize(
        self, values: torch.Tensor, rope: torch.Tensor, biased: torch.Tensor
    ) -> torch.Tensor:
        nope = dequantize_groups(values, biased[..., :-1].int() - EXPONENT_BIAS)
        return torch.cat([nope, rope.float()], -1)


@dataclass(frozen=True, eq=False)
class IndexPages(RowPages):
    """Pages of index keys: one vector a row, its trailing channels roped.

    Args:
        data: [num_pages, storage_block_size, index_dim] bf16, fp16 or fp32 rows, any page and row
            stride, last stride 1; or [num_pages, >= storage_block_size * (index_dim + 4)] uint8 in
            the quantized layout of this module, page stride a multiple of 16.
        storage_block_size: rows that a page stores.
        index_dim: channels of a key, a power of two in 16..512.

    Raises:
        NotImplementedError: an index_dim that is not supported.

    Source: DeepSeek-V4, indexer keys.
    """

    index_dim: int = 128

    def __post_init__(self) -> None:
        self._check(self.index_dim, self.index_dim + 4, "index_dim")

    @property
    def dim(self) -> int:
        """Channels of a row."""
        return self.index_dim

    @property
    def values(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size, index_dim] uint8 view of the values."""
        return self._view(0, self.index_dim, self.index_dim)

    @property
    def scales(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size] fp32 view of the scales."""
        n = self.storage_block_size
        return self.data[:, n * self.index_dim : n * (self.index_dim + 4)].view(torch.float32)

    def _views(self) -> tuple[torch.Tensor, ...]:
        return self.values, self.scales

    def _quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, exponent = quantize_groups(rows, self.index_dim)
        return values, _power_of_two(exponent[:, 0])

    def _dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return _decode(values) * scales[..., None]


def page_bytes(storage_block_size: int, row_bytes: int = ROW_BYTES + SCALE_BYTES) -> int:
    """Bytes of a quantized page, padding included.

    Args:
        storage_block_size: rows that the page stores, >= 1.
        row_bytes: bytes of a row with its scales: 584 for latents, index_dim + 4 for index keys.

    Returns:
        A multiple of 576: 37,440 for 64 latents, 1,728 for 2, 8,640 for 64 keys of 128 channels.
    """
    expect_int("storage_block_size", storage_block_size, 1)
    expect_int("row_bytes", row_bytes, 1)
    return -(-storage_block_size * row_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def quantize_groups(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to e4m3 with one power-of-two scale for each ``group`` channels.

    x is first rounded to bf16. Then a = max(|x|_max, 1e-4), e = ceil(log2(a / 448)), value =
    e4m3(clamp(x * 2^-e, +-448)): only infinities are clamped. A NaN stays NaN and does not count in
    the maximum. bf16 holds value * 2^e exactly.

    Returns:
        (values [..., dim] uint8, exponents [..., dim // group] int32).
    """
    x = rows.to(torch.bfloat16).float().unflatten(-1, (-1, group))
    largest = torch.where(x.isnan(), 0.0, x).abs().amax(-1).clamp(min=MIN_AMAX)
    # 448 = 1.75 * 2^8: the ceiling of log2(largest / 448) by its bits, without the rounding of a
    # logarithm.
    bits = largest.view(torch.int32)
    exponent = (bits >> 23) - (EXPONENT_BIAS + 8) + ((bits & 0x7FFFFF) > 0x600000).int()
    scaled = (x * _power_of_two(-exponent)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    values = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return values.flatten(-2), exponent


def dequantize_groups(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Undo ``quantize_groups``: rows [..., dim] fp32; arguments as it returns them."""
    rows = _decode(values).unflatten(-1, (exponents.shape[-1], -1))
    return (rows * _power_of_two(exponents)[..., None]).flatten(-2)


def _decode(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.float8_e4m3fn).float()


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32, exactly: the bits of a normal number, -126 <= exponent <= 127."""
    return ((exponent.int() + EXPONENT_BIAS) << 23).view(torch.float32)
