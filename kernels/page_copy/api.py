"""``gather_pages`` and ``scatter_pages``: check once, choose the implementation by name.

Next: `pool_pages`, what a pool is; `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ..common.impls import implementation
from .call import check_copy
from .pool_pages import PoolPages


def gather_pages(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> None:
    """Copy pages of a pool to rows of a buffer, byte by byte, whatever they hold.

    A row of the buffer has what all tensors have behind a page id, one after the other. With
    ``scatter_pages`` a page comes back as it was. Of a pool whose pages have parts, ids name these.
    A pool with ``e4m3_rows`` is quantized on the way, and so takes half or a quarter of the bytes;
    its pages come back within the error that ``common.e4m3`` says, rounded once more to their dtype.

    Args:
        pages: the page tensors.
        page_ids: [num_copies] int64 in [0, pages.num_ids).
        buffer: [num_rows, pages.num_bytes] uint8, the last stride 1, the other and the address
            multiples of 4; on the device of the pages, or in host memory that it addresses (pinned).
        rows: [num_copies] int64 in [0, num_rows), each at most once; None = 0, 1, ...
        impl: "triton" (default for CUDA tensors) = one launch, whose ids are on the device of the
            pages; "torch" (default for CPU tensors) = a copy for each page of each tensor, on a GPU
            by its copy engines, which nothing on the host waits for unless the ids are on the GPU,
            or the pool has ``e4m3_rows``.

    Raises:
        ValueError: a shape, dtype, stride, alignment or device is not as above.

    Source: vLLM 0.33 ``v1/kv_offload`` and SGLang ``sgl-kernel`` transfers for the two ways.
    """
    _copy(pages, page_ids, buffer, rows, impl, written="buffer")


def scatter_pages(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> None:
    """Copy rows of a buffer to pages of a pool: the reverse of ``gather_pages``.

    Args:
        pages, buffer, impl: as of ``gather_pages``.
        page_ids: [num_copies] int64 in [0, pages.num_ids), each at most once.
        rows: [num_copies] int64 in [0, num_rows); None = 0, 1, ...

    Raises:
        ValueError: a shape, dtype, stride, alignment or device is not as above.

    Source: as of ``gather_pages``.
    """
    _copy(pages, page_ids, buffer, rows, impl, written="pages")


def _copy(
    pages: Any, page_ids: Any, buffer: Any, rows: Any, impl: str | None, written: str
) -> None:
    # What is no pool, the checks refuse.
    first: Any = pages.addresses if isinstance(pages, PoolPages) else None
    chosen = implementation(impl, first)
    check_copy(pages, page_ids, buffer, rows, written)
    if chosen == "triton":
        from .triton_impl import copy
    else:
        from .torch_impl import copy
    copy(pages, page_ids, buffer, rows, written)
