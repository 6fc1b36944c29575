"""Byte layout of pages of latents and of index keys.

Views for the kernels, and exact reads and writes in torch.

Plain pages are rows [num_pages, storage_block_size, dim]. The two quantized layouts keep their
scales behind all rows of a page:

    latents, 584 bytes a row       n rows of 448 e4m3 values, then 64 bf16 roped values (576 bytes a row, at row * 576)
                                   n rows of 7 exponents e + 127, one for 64 values, then a zero
                                   byte (at n * 576 + row * 8)
    index keys, dim + 4 bytes      n rows of dim e4m3 values, then n fp32 scales

n is ``storage_block_size``. Pages are padded to a multiple of 576 bytes; bytes after that are not
touched.

Each 64 latent values, and each index key, are quantized together. x is first rounded to bf16. Then
a = max(|x|_max, 1e-4), e = ceil(log2(a / 448)), value = e4m3(clamp(x * 2^-e, +-448)), scale = 2^e.
448 is the largest e4m3 value, so only infinities are clamped. A NaN becomes the e4m3 NaN and does
not count in the maximum. Reading gives e4m3 * 2^e, which bf16 holds exactly.

Source: DeepSeek-V4 (``fp8_ds_mla`` rows; FlashMLA's tests/quant.py, where they are MODEL1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import MODEL_DTYPES, expect_int, expect_tensor
from .e4m3 import E4M3_MAX

# The quantized latent row.
HEAD_DIM = 512
ROPE_DIM = 64
NOPE_DIM = HEAD_DIM - ROPE_DIM
QUANT_GROUP = 64
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = NOPE_DIM // QUANT_GROUP + 1
PAGE_ALIGNMENT = 576
# What copies of 16 bytes need; every page that is a multiple of PAGE_ALIGNMENT has it.
BYTE_ALIGNMENT = 16

# The smallest maximum of a group: it keeps the scale of a group of zeros finite.
MIN_AMAX = 1e-4
EXPONENT_BIAS = 127
DIMS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, eq=False)
class LatentPages:
    """Pages of latent rows, each a key-and-value vector with ``rope_dim`` trailing roped channels.

    Args:
        data: [num_pages, storage_block_size, head_dim] bf16, fp16 or fp32 rows, any page and row
            stride, last stride 1; or [num_pages, >= storage_block_size * 584] uint8 in the
            quantized layout of this module, page stride a multiple of 16.
        storage_block_size: rows that a page stores.
        head_dim: channels of a row, a power of two in 16..512; 512 in the quantized layout.
        rope_dim: trailing channels that are roped, even; 64 in the quantized layout.

    Raises:
        ValueError: data is not as above.
        NotImplementedError: a head_dim or rope_dim that is not supported.

    Source: DeepSeek-V4, window and compressed KV.
    """

    data: torch.Tensor
    storage_block_size: int
    head_dim: int = HEAD_DIM
    rope_dim: int = ROPE_DIM

    def __post_init__(self) -> None:
        expect_int("storage_block_size", self.storage_block_size, 1)
        _expect_dim("head_dim", self.head_dim)
        expect_int("rope_dim", self.rope_dim, 0, self.head_dim)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim: expected an even number, got {self.rope_dim}")
        if not self.fp8:
            _expect_rows(self.data, self.storage_block_size, self.head_dim)
            return
        if (self.head_dim, self.rope_dim) != (HEAD_DIM, ROPE_DIM):
            raise NotImplementedError(
                f"data: quantized latents have head_dim {HEAD_DIM} and rope_dim {ROPE_DIM}, not {self.head_dim} and {self.rope_dim}"
            )
        _expect_bytes(self.data, self.storage_block_size * (ROW_BYTES + SCALE_BYTES))

    @property
    def fp8(self) -> bool:
        """True if the pages are in the quantized layout."""
        return _is_bytes(self.data)

    @property
    def dim(self) -> int:
        """Channels of a row."""
        return self.head_dim

    @property
    def values(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size, 448] uint8 view of the e4m3 values."""
        return _rows_at(self.data, 0, self.storage_block_size, NOPE_DIM, ROW_BYTES)

    @property
    def rope(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size, 64] bf16 view of the roped channels."""
        n, width = self.storage_block_size, 2 * ROPE_DIM
        return _rows_at(self.data, NOPE_DIM, n, width, ROW_BYTES).view(torch.bfloat16)

    @property
    def scales(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size, 8] uint8 view: 7 biased exponents and a
        zero."""
        n = self.storage_block_size
        return _rows_at(self.data, n * ROW_BYTES, n, SCALE_BYTES, SCALE_BYTES)

    def read(self, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gather rows.

        Args:
            slots: [...] int64, page * storage_block_size + row; a negative slot gives zeros.
            dtype: data type of the result.

        Returns:
            [..., head_dim]; quantized rows are dequantized exactly.
        """
        page, row = _locate(slots, self.storage_block_size)
        if self.fp8:
            exponent = self.scales[page, row][..., :-1].int() - EXPONENT_BIAS
            nope = dequantize_groups(self.values[page, row], exponent)
            rows = torch.cat([nope, self.rope[page, row].float()], -1)
        else:
            rows = self.data[page, row]
        return torch.where((slots >= 0)[..., None], rows, 0).to(dtype)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write normed and roped ``rows`` [n, head_dim] to ``slots`` [n] int64, quantized where the
        pages are; -1 = skip."""
        live = slots >= 0
        page, row = _locate(slots[live], self.storage_block_size)
        if not self.fp8:
            self.data[page, row] = rows[live].to(self.data.dtype)
            return
        rows = rows[live]
        values, exponent = quantize_groups(rows[:, :NOPE_DIM], QUANT_GROUP)
        self.values[page, row] = values
        self.rope[page, row] = rows[:, NOPE_DIM:].to(torch.bfloat16)
        biased = (exponent + EXPONENT_BIAS).to(torch.uint8)
        self.scales[page, row] = torch.nn.functional.pad(biased, (0, 1))

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Values [n, head_dim] fp32 that these pages hold after ``rows`` [n, head_dim] are
        written."""
        if not self.fp8:
            return rows.to(self.data.dtype).float()
        nope = dequantize_groups(*quantize_groups(rows[:, :NOPE_DIM], QUANT_GROUP))
        return torch.cat([nope, rows[:, NOPE_DIM:].to(torch.bfloat16).float()], -1)


@dataclass(frozen=True, eq=False)
class IndexPages:
    """Pages of index keys: one vector a row, its trailing channels roped.

    Args:
        data: [num_pages, storage_block_size, index_dim] bf16, fp16 or fp32 rows, any page and row
            stride, last stride 1; or [num_pages, >= storage_block_size * (index_dim + 4)] uint8 in
            the quantized layout of this module, page stride a multiple of 16.
        storage_block_size: rows that a page stores.
        index_dim: channels of a key, a power of two in 16..512.

    Raises:
        ValueError: data is not as above.
        NotImplementedError: an index_dim that is not supported.

    Source: DeepSeek-V4, indexer keys.
    """

    data: torch.Tensor
    storage_block_size: int
    index_dim: int = 128

    def __post_init__(self) -> None:
        expect_int("storage_block_size", self.storage_block_size, 1)
        _expect_dim("index_dim", self.index_dim)
        if self.fp8:
            _expect_bytes(self.data, self.storage_block_size * (self.index_dim + 4))
        else:
            _expect_rows(self.data, self.storage_block_size, self.index_dim)

    @property
    def fp8(self) -> bool:
        """True if the pages are in the quantized layout."""
        return _is_bytes(self.data)

    @property
    def dim(self) -> int:
        """Channels of a row."""
        return self.index_dim

    @property
    def values(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size, index_dim] uint8 view of the e4m3
        values."""
        return _rows_at(self.data, 0, self.storage_block_size, self.index_dim, self.index_dim)

    @property
    def scales(self) -> torch.Tensor:
        """Quantized pages: [num_pages, storage_block_size] fp32 view of the scales."""
        n = self.storage_block_size
        return self.data[:, n * self.index_dim : n * (self.index_dim + 4)].view(torch.float32)

    def read(self, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gather keys: [..., index_dim] for ``slots`` [...] as in ``LatentPages.read``.

        Quantized keys are multiplied by their scale.
        """
        page, row = _locate(slots, self.storage_block_size)
        if self.fp8:
            rows = _decode(self.values[page, row]) * self.scales[page, row][..., None]
        else:
            rows = self.data[page, row]
        return torch.where((slots >= 0)[..., None], rows, 0).to(dtype)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write normed and roped ``rows`` [n, index_dim] to ``slots`` [n] int64, quantized where the
        pages are; -1 = skip."""
        live = slots >= 0
        page, row = _locate(slots[live], self.storage_block_size)
        if not self.fp8:
            self.data[page, row] = rows[live].to(self.data.dtype)
            return
        values, exponent = quantize_groups(rows[live], self.index_dim)
        self.values[page, row] = values
        self.scales[page, row] = _power_of_two(exponent[:, 0])


def page_bytes(storage_block_size: int, row_bytes: int = ROW_BYTES + SCALE_BYTES) -> int:
    """Bytes of a quantized page, padding included.

    Args:
        storage_block_size: rows that the page stores.
        row_bytes: bytes of a row with its scales: 584 for latents, index_dim + 4 for index keys.

    Returns:
        A multiple of 576: 37,440 for 64 latents, 1,728 for 2, and 8,640 for 64 index keys of 128
            channels.

    Raises:
        ValueError: an argument is not a positive int.

    Source: this module's docstring.
    """
    expect_int("storage_block_size", storage_block_size, 1)
    expect_int("row_bytes", row_bytes, 1)
    return -(-storage_block_size * row_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def quantize_groups(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to e4m3 with one power-of-two scale for each ``group`` channels.

    ``e4m3.quantize`` has one scale of any fp32 value for a row.

    Args:
        rows: [..., dim] any floating dtype; rounded to bf16 first.
        group: channels that share a scale; divides dim.

    Returns:
        (values [..., dim] uint8, exponents [..., dim // group] int32): row = e4m3(values) *
        2^exponents.

    Source: this module's docstring.
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


def _locate(slots: torch.Tensor, storage_block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots.clamp(min=0)
    return slots // storage_block_size, slots % storage_block_size


def _rows_at(
    data: torch.Tensor, first: int, num_rows: int, width: int, stride: int
) -> torch.Tensor:
    """Rows of ``width`` bytes that begin ``stride`` bytes apart from byte ``first`` of each page
    on."""
    offset = data.storage_offset() + first
    return data.as_strided((data.shape[0], num_rows, width), (data.stride(0), stride, 1), offset)


def _is_bytes(data: torch.Tensor) -> bool:
    return isinstance(data, torch.Tensor) and data.dtype == torch.uint8


def _expect_dim(name: str, dim: int) -> None:
    if dim not in DIMS:
        raise NotImplementedError(f"{name}: {dim} is not one of {list(DIMS)}")


def _expect_rows(data: torch.Tensor, storage_block_size: int, dim: int) -> None:
    expect_tensor("data", data, (None, storage_block_size, dim), MODEL_DTYPES)
    # The kernels address rows within a page with 32 bits.
    if storage_block_size * abs(data.stride(1)) >= 2**31:
        raise ValueError(f"data: expected pages of < 2**31 elements, got strides {data.stride()}")


def _expect_bytes(data: torch.Tensor, content: int) -> None:
    expect_tensor("data", data, (None, None), torch.uint8)
    if not content <= data.shape[1] < 2**31:
        raise ValueError(f"data: expected pages of >= {content} bytes, got {data.shape[1]}")
    if data.stride(0) % BYTE_ALIGNMENT or data.storage_offset() % BYTE_ALIGNMENT:
        raise ValueError(
            f"data: expected a page stride and offset that are multiples of {BYTE_ALIGNMENT} bytes, "
            f"got {data.stride(0)} and {data.storage_offset()}"
        )
