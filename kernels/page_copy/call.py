"""Check the arguments of ``gather_pages`` and ``scatter_pages``."""

from __future__ import annotations

from typing import Any

import torch

from ..common.checks import expect_apart, expect_tensor
from .pool_pages import PoolPages, expect_alignment


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
