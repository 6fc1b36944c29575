"""``copy_overlap``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_overlap


def copy_overlap(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    pages: torch.Tensor,
    *,
    from_pages: torch.Tensor,
    state_index: torch.Tensor,
    state_rows: torch.Tensor,
    tokens: torch.Tensor,
    to_pages: torch.Tensor,
    impl: str | None = None,
) -> None:
    """What a compressor with overlap needs where a sequence is resumed: saved, and loaded again.

    A page keeps kv and gate + ape of the series a of a block's last ``ratio`` tokens, a whole
    compression window. Those of ``from_pages`` go to ``state``, before ``compress`` reads it; those
    of the step's ``tokens`` go to ``to_pages``. No page is read and written in one call.

    Args:
        kv, gate, ape, state: as of ``compress`` with overlap, kv and gate fp32: of their 2 * width
            channels the first half is series a.
        pages: [num_pages, ratio, 2, width] fp32, any strides with last stride 1.
        from_pages: [num_seqs] int64, the page that a sequence loads.
        state_index: [num_seqs] int64, the state that it goes to; -1 = none: nothing is loaded.
        state_rows: [num_seqs, ratio] int64, rows of the state that it goes to.
        tokens: [num_saved] int64, rows of kv; ``ratio`` of a page after each other, in the order of
            their rows in it.
        to_pages: [num_saved] int64; 0 = nowhere: the row of ``tokens`` is not saved. (What torch
            writes to page 0, and to the last state for -1, has no meaning.)
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.

    Source: DeepSeek-V4, compressed sparse attention: entries that overlap the window before.
    """
    chosen = implementation(impl, kv)
    check_overlap(
        kv, gate, ape, state, pages, from_pages, state_index, state_rows, tokens, to_pages
    )
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    module.copy(
        kv,
        gate,
        ape,
        state,
        pages,
        from_pages=from_pages,
        state_index=state_index,
        state_rows=state_rows,
        tokens=tokens,
        to_pages=to_pages,
    )
