"""Oracle of ``gather_pages`` and ``scatter_pages``: one byte after the other."""

from __future__ import annotations

import torch

from quire.kernels import PoolPages


def gather_pages(
    pages: PoolPages, page_ids: torch.Tensor, buffer: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Fill ``buffer``; arguments as in ``quire.kernels.gather_pages``."""
    for i, page in enumerate(page_ids.tolist()):
        row = i if rows is None else rows[i]
        for t, tensor in enumerate(pages.tensors):
            for byte in range(pages.page_bytes):
                buffer[row, t * pages.page_bytes + byte] = tensor[page, byte]


def scatter_pages(
    pages: PoolPages, page_ids: torch.Tensor, buffer: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Fill ``pages``; arguments as in ``quire.kernels.scatter_pages``."""
    for i, page in enumerate(page_ids.tolist()):
        row = i if rows is None else rows[i]
        for t, tensor in enumerate(pages.tensors):
            for byte in range(pages.page_bytes):
                tensor[page, byte] = buffer[row, t * pages.page_bytes + byte]
