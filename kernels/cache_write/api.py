"""``write_kv``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_write


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Write rows of keys and values to their slots in the pages, in place; to e4m3 pages quantized,
    as ``common.e4m3`` says.

    Args:
        k, v: [num_rows, num_kv_heads, head_dim] bf16, fp16 or fp32, last stride 1.
        k_pages, v_pages: [num_pages, block_size, num_kv_heads, head_dim] same dtype or
            torch.float8_e4m3fn, any strides with last stride 1 (two views of one pool, head-major
            pages). No two of the slots written may share memory.
        slot_mapping: [num_rows] int64, page * block_size + row; -1 = do not write this row.
        k_scale, v_scale: for e4m3 pages, both of one kind; None for others. A number > 0 or fp32 []
            (or [1]): the scale of all rows, read. fp32 [num_pages, block_size, num_kv_heads], any
            strides: the scales of the rows, written beside them. (Host numbers in 2**-30 .. 2**30.)
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: with Triton, head_dim is not a power of two in 16..512.

    Source: PagedAttention (arXiv 2309.06180) 4.3.
    """
    chosen = implementation(impl, k)
    check_write(k, v, k_pages, v_pages, slot_mapping, k_scale, v_scale)
    if chosen == "triton":
        from .triton_impl import write_kv as write
    else:
        from .torch_impl import write_kv as write
    write(k, v, k_pages, v_pages, slot_mapping, k_scale, v_scale)
