"""The page tensors of a pool, and the checks of ``gather_pages`` and ``scatter_pages``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ..common.checks import expect_apart, expect_int, expect_tensor

ALIGNMENT = 4  # bytes; required of addresses, strides and sizes of rows
FASTEST = 16


@dataclass(frozen=True, eq=False)
class PoolPages:
    """Page tensors of one shape: page p is row p of each tensor. Make it once for a pool.

    Args:
        tensors: [num_pages, page_bytes] uint8 each, on one device, with equal strides, the last one
            1. Addresses, page_bytes and the page stride are multiples of 4; copies are fastest if
            they are multiples of 16. The tensors may be views of one memory.

    Attributes:
        addresses: [num_tensors] int64, addresses of the tensors, on their device.
        is_aligned: True if addresses, page_bytes and the page stride are multiples of 16.

    Raises:
        ValueError: invalid ``tensors``.
    """

    tensors: Sequence[Tensor]
    addresses: Tensor = field(init=False)
    is_aligned: bool = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.tensors
        if not isinstance(tensors, (list, tuple)) or not tensors:
            raise ValueError(f"tensors: expected at least one tensor in a list, got {tensors!r}")
        same: Any = None
        device = tensors[0].device if isinstance(tensors[0], Tensor) else None
        for i, tensor in enumerate(tensors):
            name = f"tensors[{i}]"
            expect_tensor(name, tensor, (None, None), torch.uint8, device=device)
            expect_int(f"{name}: page_bytes", tensor.shape[1], 1)
            expect_apart(name, tensor)
            expect_alignment(name, tensor)
            same = same or (tuple(tensor.shape), tensor.stride())
            if (tuple(tensor.shape), tensor.stride()) != same:
                raise ValueError(
                    f"{name}: expected {list(same[0])} with strides {same[1]} as tensors[0], got "
                    f"{list(tensor.shape)} with strides {tensor.stride()}"
                )
        (_, page_bytes), (page_stride, _) = same
        found = [tensor.data_ptr() for tensor in tensors]
        addresses = torch.tensor(found, dtype=torch.int64, device=device)
        object.__setattr__(self, "tensors", tuple(tensors))
        object.__setattr__(self, "addresses", addresses)
        object.__setattr__(self, "is_aligned", gcd(*found, page_bytes, page_stride) % FASTEST == 0)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tensors[0].device

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.tensors[0].shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one tensor."""
        return self.tensors[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of a page in all tensors: a row of a buffer."""
        return len(self.tensors) * self.page_bytes


def check_copy(pages: Any, page_ids: Any, buffer: Any, rows: Any, gather: bool) -> None:
    """Raise ValueError unless the arguments are valid.

    Args:
        gather: True if the copies write to ``buffer``.
    """
    if not isinstance(pages, PoolPages):
        raise ValueError(f"pages: expected PoolPages, got {type(pages).__name__}")
    expect_tensor("buffer", buffer, (None, pages.num_bytes), torch.uint8)
    expect_alignment("buffer", buffer)
    if gather:
        expect_apart("buffer", buffer)
    if buffer.device != pages.device and not (buffer.is_cpu and buffer.is_pinned()):
        raise ValueError(
            f"buffer: expected a tensor on {pages.device} or in pinned host memory, got one on "
            f"{buffer.device}"
        )
    expect_tensor("page_ids", page_ids, (None,), torch.int64)
    num_copies = page_ids.shape[0]
    if rows is not None:
        expect_tensor("rows", rows, (num_copies,), torch.int64)
    elif num_copies > buffer.shape[0]:
        raise ValueError(
            f"buffer: expected uint8 [>= {num_copies}, {pages.num_bytes}], got uint8 "
            f"{list(buffer.shape)}"
        )


def expect_alignment(name: str, tensor: Tensor) -> None:
    """Require rows that begin and end at multiples of `ALIGNMENT` bytes; ValueError otherwise."""
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
