"""Oracle of ``gather_pages`` and ``scatter_pages``: one byte, or one row in e4m3, after the other."""

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
        if pages.e4m3_rows is not None:
            _quantize(pages, [tensor[page] for tensor in tensors], buffer[row])
            continue
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
        if pages.e4m3_rows is not None:
            _dequantize(pages, buffer[row], [tensor[page] for tensor in tensors])
            continue
        for t, tensor in enumerate(tensors):
            for byte in range(pages.page_bytes):
                tensor[page, byte] = buffer[row, t * pages.page_bytes + byte]


def _part(pages: PoolPages, id_: int) -> tuple[int, list[torch.Tensor]]:
    """The page of an id, and the tensors of its part."""
    parts = [[] for _ in range(pages.num_parts)]
    for i, tensor in enumerate(pages.tensors):
        parts[i * pages.num_parts // len(pages.tensors)].append(tensor)
    return id_ // pages.num_parts, parts[id_ % pages.num_parts]


def _quantize(pages: PoolPages, tensors: list[torch.Tensor], cells: torch.Tensor) -> None:
    dtype, dim = pages.e4m3_rows.dtype, pages.e4m3_rows.row_dim
    num_rows, at = tensors[0].shape[0] // (dim * dtype.itemsize), 0
    for tensor in tensors:
        rows = tensor.view(dtype)
        for i in range(num_rows):
            x = rows[i * dim : (i + 1) * dim].float()
            largest = torch.max(x.abs())
            if torch.isinf(largest):
                largest = torch.tensor(torch.finfo(torch.float32).max)
            scale = torch.maximum(largest / 448.0, torch.tensor(2.0**-126))
            values = torch.clamp(x / scale, -448.0, 448.0).to(torch.float8_e4m3fn)
            cells[at + i * dim : at + (i + 1) * dim] = values.view(torch.uint8)
            scales = at + num_rows * dim
            cells[scales + 4 * i : scales + 4 * i + 4] = scale.reshape(1).view(torch.uint8)
        at += num_rows * (dim + 4)


def _dequantize(pages: PoolPages, cells: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    dtype, dim = pages.e4m3_rows.dtype, pages.e4m3_rows.row_dim
    num_rows, at = tensors[0].shape[0] // (dim * dtype.itemsize), 0
    for tensor in tensors:
        for i in range(num_rows):
            values = cells[at + i * dim : at + (i + 1) * dim].clone().view(torch.float8_e4m3fn)
            scales = at + num_rows * dim
            scale = cells[scales + 4 * i : scales + 4 * i + 4].clone().view(torch.float32)
            row = (values.float() * scale).to(dtype)
            size = dim * dtype.itemsize
            tensor[i * size : (i + 1) * size] = row.view(torch.uint8)
        at += num_rows * (dim + 4)
