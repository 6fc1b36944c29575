"""``gather_pages`` and ``scatter_pages`` by torch: a copy for each page of each tensor.

On a CPU each is a memcpy (``index_copy_`` would move single bytes). Between a GPU and pinned memory
each is a transfer of a copy engine, which takes no multiprocessor from anybody; some microseconds
to begin it are what many small ones cost.
"""

from __future__ import annotations

import torch

from ..common.checks import expect_ids
from .pool_pages import PoolPages


@torch.no_grad()
def copy(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None,
    written: str,
) -> None:
    """Copies of checked arguments.

    Args:
        written: "buffer" or "pages".
    """
    expect_ids("page_ids", page_ids, pages.num_ids)
    if rows is not None:
        expect_ids("rows", rows, buffer.shape[0])
    ids = page_ids.tolist()
    to = range(len(ids)) if rows is None else rows.tolist()
    for t in range(pages.num_tensors):
        cells = buffer[:, t * pages.page_bytes : (t + 1) * pages.page_bytes]
        of_parts = pages.tensors[t :: pages.num_tensors]
        for id_, row in zip(ids, to, strict=True):
            page, part = divmod(id_, pages.num_parts)
            tensor = of_parts[part]
            if written == "buffer":
                cells[row].copy_(tensor[page], non_blocking=True)
            else:
                tensor[page].copy_(cells[row], non_blocking=True)
