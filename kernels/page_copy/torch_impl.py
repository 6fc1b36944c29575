"""``gather_pages`` and ``scatter_pages`` by torch: a copy for each page of each tensor.

On a CPU each is a memcpy (``index_copy_`` would move single bytes). Between a GPU and pinned memory
each is a transfer of a copy engine, which takes no multiprocessor from anybody; some microseconds
to begin it are what many small ones cost.
"""

from __future__ import annotations

import torch

from ..common import e4m3
from ..common.checks import expect_ids
from .pool_pages import E4m3Rows, PoolPages


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
    form = pages.e4m3_rows
    for t in range(pages.num_tensors):
        cells = buffer[:, t * pages.kept_bytes : (t + 1) * pages.kept_bytes]
        of_parts = pages.tensors[t :: pages.num_tensors]
        for id_, row in zip(ids, to, strict=True):
            page, part = divmod(id_, pages.num_parts)
            tensor = of_parts[part]
            if form is not None and written == "buffer":
                _quantize(tensor[page], cells[row], form)
            elif form is not None:
                _dequantize(cells[row], tensor[page], form)
            elif written == "buffer":
                cells[row].copy_(tensor[page], non_blocking=True)
            else:
                tensor[page].copy_(cells[row], non_blocking=True)


def _quantize(page: torch.Tensor, cells: torch.Tensor, form: E4m3Rows) -> None:
    """The rows of a page of one tensor, to their values and scales."""
    values, scales = e4m3.quantize(page.view(form.dtype).unflatten(0, (-1, form.row_dim)))
    at = values.numel()
    cells[:at].copy_(values.view(torch.uint8).flatten(), non_blocking=True)
    cells[at:].copy_(scales.view(torch.uint8), non_blocking=True)


def _dequantize(cells: torch.Tensor, page: torch.Tensor, form: E4m3Rows) -> None:
    """The reverse of `_quantize`."""
    at = page.shape[0] // form.dtype.itemsize
    # A copy on the device of the pages, whose own address is a multiple of 4.
    kept = cells.to(page.device, non_blocking=True, copy=True)
    values = kept[:at].view(torch.float8_e4m3fn).unflatten(0, (-1, form.row_dim))
    rows = e4m3.dequantize(values, kept[at:].view(torch.float32))
    page.copy_(rows.to(form.dtype).flatten().view(torch.uint8))
