"""The checks of one call of ``gather_pages`` or ``scatter_pages``."""

from __future__ import annotations

from typing import Any

import torch

from ..common.checks import expect_apart, expect_tensor
from .pool_pages import PoolPages, expect_alignment


def check_copy(pages: Any, page_ids: Any, buffer: Any, rows: Any, written: str) -> None:
    """Check the arguments of both functions, which say what they are and what is raised.

    Args:
        written: the name of the argument that is written to, "buffer" or "pages".
    """
    if not isinstance(pages, PoolPages):
        raise ValueError(f"pages: expected PoolPages, got {type(pages).__name__}")
    expect_tensor("buffer", buffer, (None, pages.num_bytes), torch.uint8)
    expect_alignment("buffer", buffer)
    if written == "buffer":
        expect_apart("buffer", buffer)
    if not is_reachable(buffer, pages):
        raise ValueError(
            f"buffer: expected a tensor on {pages.device} or in pinned host memory, got one on "
            f"{buffer.device}"
        )
    expect_tensor("page_ids", page_ids, (None,), torch.int64)
    num_copies = page_ids.shape[0]
    if rows is None:
        if num_copies > buffer.shape[0]:
            raise ValueError(
                f"buffer: expected uint8 [>= {num_copies}, {pages.num_bytes}], got uint8 "
                f"{list(buffer.shape)}"
            )
    else:
        expect_tensor("rows", rows, (num_copies,), torch.int64)


def is_reachable(buffer: Any, pages: PoolPages) -> bool:
    """Whether the device of a pool addresses a buffer."""
    is_tensor = isinstance(buffer, torch.Tensor)
    return is_tensor and (buffer.device == pages.device or (buffer.is_cpu and buffer.is_pinned()))
