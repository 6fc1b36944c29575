"""``gather_pages`` and ``scatter_pages`` in torch: one copy per page and tensor.

On a CPU each copy is a memcpy (``index_copy_`` would move single bytes). Between a GPU and pinned
memory a copy engine runs it, and no multiprocessor is needed; each copy takes some microseconds to
begin.
"""

from __future__ import annotations

import torch

from ..common.checks import expect_ids
from .call import PoolPages


@torch.no_grad()
def copy(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None,
    gather: bool,
) -> None:
    """Copy pages to or from rows; arguments as in ``call.check_copy``, which checked them."""
    expect_ids("page_ids", page_ids, pages.num_pages)
    if rows is not None:
        expect_ids("rows", rows, buffer.shape[0])
    ids = page_ids.tolist()
    places = range(len(ids)) if rows is None else rows.tolist()
    for tensor, cells in zip(pages.tensors, buffer.split(pages.page_bytes, 1), strict=True):
        for page, row in zip(ids, places, strict=True):
            source, target = tensor[page], cells[row]
            if not gather:
                source, target = target, source
            target.copy_(source, non_blocking=True)
