"""``gather_pages`` and ``scatter_pages``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import PoolPages, check_copy


def gather_pages(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> None:
    """Copy pages of a pool to rows of a buffer, byte by byte.

    A row of the buffer holds one page of all tensors, one tensor after the other. ``scatter_pages``
    copies it back.

    Args:
        pages: page tensors.
        page_ids: [num_copies] int64 in [0, pages.num_pages).
        buffer: [num_rows, pages.num_bytes] uint8; last stride 1, address and row stride multiples
            of 4; on the device of the pages, or in pinned host memory.
        rows: [num_copies] int64 in [0, num_rows), distinct; None = 0, 1, ...
        impl: "triton" (default for CUDA tensors): one launch; ids on the device of the pages.
            "torch" (default for CPU tensors): one copy per page and tensor. On a GPU its copy
            engines run them; the host waits only for ids on the GPU.

    Raises:
        ValueError: invalid shape, dtype, stride, alignment or device.

    Source: vLLM 0.33 ``v1/kv_offload`` and SGLang ``sgl-kernel`` transfers for the two ways.
    """
    _copy(pages, page_ids, buffer, rows, impl, gather=True)


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
        pages, buffer, impl: see ``gather_pages``.
        page_ids: [num_copies] int64 in [0, pages.num_pages), distinct.
        rows: [num_copies] int64 in [0, num_rows); None = 0, 1, ...

    Raises:
        ValueError: invalid shape, dtype, stride, alignment or device.

    Source: see ``gather_pages``.
    """
    _copy(pages, page_ids, buffer, rows, impl, gather=False)


def _copy(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None,
    impl: str | None,
    *,
    gather: bool,
) -> None:
    # check_copy refuses anything but PoolPages.
    chosen = implementation(impl, pages.addresses if isinstance(pages, PoolPages) else None)
    check_copy(pages, page_ids, buffer, rows, gather)
    if chosen == "triton":
        from .triton_impl import copy
    else:
        from .torch_impl import copy
    copy(pages, page_ids, buffer, rows, gather)
