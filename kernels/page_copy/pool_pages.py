"""The page tensors of a pool, and where they lie: what one launch copies pages of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..common.checks import MODEL_DTYPES, expect_apart, expect_int, expect_tensor

# Bytes that addresses, strides and sizes of rows are multiples of; copies are fastest at 16.
ALIGNMENT = 4
FASTEST = 16
SCALE_BYTES = 4


@dataclass(frozen=True)
class E4m3Rows:
    """Rows that a buffer has in e4m3, each with a scale of its own, as ``common.e4m3`` says.

    Bytes that a page begins with are rows of ``row_dim`` elements, one after the other. A buffer
    has their values, [rows, row_dim] e4m3, and then their scales, [rows] fp32. Rows of bf16 and
    fp16 that came back are bit equal when they come back again; of fp32, scales may differ by an
    ulp.

    Args:
        dtype: of the pages: bf16, fp16 or fp32.
        row_dim: elements of a row, a power of two in MIN_DIM..MAX_DIM.

    Raises:
        ValueError: the arguments are not as above.
    """

    dtype: torch.dtype
    row_dim: int

    MIN_DIM: ClassVar[int] = 16
    MAX_DIM: ClassVar[int] = 512

    def __post_init__(self) -> None:
        if self.dtype not in MODEL_DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in MODEL_DTYPES)
            raise ValueError(f"dtype: expected one of {names}, got {self.dtype}")
        expect_int("row_dim", self.row_dim, self.MIN_DIM)
        if self.row_dim > self.MAX_DIM or self.row_dim & (self.row_dim - 1):
            raise ValueError(
                f"row_dim: expected a power of two in {self.MIN_DIM}..{self.MAX_DIM}, got "
                f"{self.row_dim}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a page."""
        return self.row_dim * self.dtype.itemsize

    def kept_bytes(self, num_bytes: int) -> int:
        """Bytes that a buffer has for so many bytes of a page, a multiple of ``row_bytes``."""
        return num_bytes // self.row_bytes * (self.row_dim + SCALE_BYTES)


@dataclass(frozen=True, eq=False)
class PoolPages:
    """Page tensors of one shape: page id p is row p of each of them. Make it once for a pool.

    A page may be copied in parts, of equal bytes, which may overlap: then id ``p * num_parts + j``
    is part j of page p, and its bytes are those of row p in the j-th share of ``tensors``.

    Args:
        tensors: of [num_pages, page_bytes] uint8 on one device, with equal strides, the last one 1;
            page_bytes, the other stride and all addresses are multiples of 4 bytes. (Copies move 16
            bytes at a time where they are multiples of 16.) They may be views of one memory.
        num_parts: parts of a page; each has ``len(tensors) / num_parts`` tensors.
        e4m3_rows: what a buffer has of each page; None = its bytes as they are. page_bytes is then
            a multiple of ``e4m3_rows.row_bytes``.

    Attributes:
        addresses: [num_tensors] int64 on their device, where each of them begins.
        is_aligned: whether all of that are multiples of 16.

    Raises:
        ValueError: ``tensors`` are not as above.
    """

    tensors: Sequence[Tensor]
    num_parts: int = 1
    e4m3_rows: E4m3Rows | None = None
    addresses: Tensor = field(init=False)
    is_aligned: bool = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.tensors
        if not isinstance(tensors, (list, tuple)) or not tensors:
            raise ValueError(f"tensors: expected at least one tensor in a list, got {tensors!r}")
        expect_int("num_parts", self.num_parts, 1)
        if len(tensors) % self.num_parts:
            raise ValueError(
                f"tensors: expected a multiple of {self.num_parts}, equally many for each part, "
                f"got {len(tensors)}"
            )
        same: Any = None
        for i, tensor in enumerate(tensors):
            name = f"tensors[{i}]"
            expect_tensor(name, tensor, (None, None), torch.uint8, device=_device(tensors[0]))
            expect_int(f"{name}: page_bytes", tensor.shape[1], 1)
            expect_apart(name, tensor)
            expect_alignment(name, tensor)
            same = same or (tuple(tensor.shape), tensor.stride())
            if (tuple(tensor.shape), tensor.stride()) != same:
                raise ValueError(
                    f"{name}: expected {list(same[0])} with strides {same[1]} as tensors[0], got "
                    f"{list(tensor.shape)} with strides {tensor.stride()}"
                )
        rows = self.e4m3_rows
        if rows is not None and same[0][1] % rows.row_bytes:
            raise ValueError(
                f"tensors: expected pages of a multiple of {rows.row_bytes} bytes, whole rows of "
                f"{rows.row_dim} {str(rows.dtype).removeprefix('torch.')}, got {same[0][1]}"
            )
        found = [tensor.data_ptr() for tensor in tensors]
        addresses = torch.tensor(found, dtype=torch.int64, device=tensors[0].device)
        object.__setattr__(self, "tensors", tuple(tensors))
        object.__setattr__(self, "addresses", addresses)
        object.__setattr__(self, "is_aligned", gcd(*found, *same[0][1:], same[1][0]) % FASTEST == 0)

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.tensors[0].device

    @property
    def num_pages(self) -> int:
        """Rows of each tensor."""
        return self.tensors[0].shape[0]

    @property
    def num_ids(self) -> int:
        """Page ids: of all parts of all pages."""
        return self.num_pages * self.num_parts

    @property
    def num_tensors(self) -> int:
        """Tensors that one id stands for."""
        return len(self.tensors) // self.num_parts

    @property
    def page_bytes(self) -> int:
        """Bytes of a row of one tensor."""
        return self.tensors[0].shape[1]

    @property
    def kept_bytes(self) -> int:
        """Bytes that a buffer has of a row of one tensor."""
        rows = self.e4m3_rows
        return self.page_bytes if rows is None else rows.kept_bytes(self.page_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes that a row of a buffer has for one page id, of all its tensors."""
        return self.num_tensors * self.kept_bytes


def expect_alignment(name: str, tensor: Tensor) -> None:
    """Require rows of bytes that begin at multiples of `ALIGNMENT`; ValueError otherwise."""
    for what, number in (("size", tensor.shape[1]), ("stride", tensor.stride(0))):
        if number % ALIGNMENT:
            raise ValueError(
                f"{name}: expected rows whose {what} is a multiple of {ALIGNMENT} bytes, got "
                f"{number}"
            )
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name}: expected an address that is a multiple of {ALIGNMENT}, got "
            f"{tensor.data_ptr():#x}"
        )


def _device(tensor: Any) -> torch.device | None:
    return tensor.device if isinstance(tensor, Tensor) else None
