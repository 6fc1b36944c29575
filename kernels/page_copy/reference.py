"""Oracle of ``gather_pages`` and ``scatter_pages``: one byte after the other."""

from __future__ import annotations

import torch

from .pool_pages import PoolPages


def gather_pages(
    pages: PoolPages, page_ids: torch.Tensor, buffer: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Fills ``buffer``; arguments as in ``quire.kernels.gather_pages``."""
    for i, id_ in enumerate(page_ids.tolist()):
        row = i if rows is None else rows[i]
        page, tensors = _part(pages, id_)
        for t, tensor in enumerate(tensors):
            for byte in range(pages.page_bytes):
                buffer[row, t * pages.page_bytes + byte] = tensor[page, byte]


def scatter_pages(
    pages: PoolPages, page_ids: torch.Tensor, buffer: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Fills ``pages``; arguments as in ``quire.kernels.scatter_pages``."""
    for i, id_ in enumerate(page_ids.tolist()):
        row = i if rows is None else rows[i]
        page, tensors = _part(pages, id_)
        for t, tensor in enumerate(tensors):
            for byte in range(pages.page_bytes):
                tensor[page, byte] = buffer[row, t * pages.page_bytes + byte]


def _part(pages: PoolPages, id_: int) -> tuple[int, list[torch.Tensor]]:
    """The page of an id, and the tensors of its part."""
    parts = [[] for _ in range(pages.num_parts)]
    for i, tensor in enumerate(pages.tensors):
        parts[i * pages.num_parts // len(pages.tensors)].append(tensor)
    return id_ // pages.num_parts, parts[id_ % pages.num_parts]
