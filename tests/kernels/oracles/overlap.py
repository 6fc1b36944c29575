"""Oracle of ``copy_overlap``: one row at a time, in the order of the step.

Source: DeepSeek-V4, compressed sparse attention: entries that overlap the window before.
"""

from __future__ import annotations

import torch


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
) -> None:
    """Fills ``state`` and ``pages`` in place; arguments as in ``quire.kernels.copy_overlap``."""
    _, ratio, _, width = pages.shape
    for s, (page, index) in enumerate(zip(from_pages, state_index, strict=True)):
        if index >= 0:
            for r in range(ratio):
                state[index, state_rows[s, r], :, :width] = pages[page, r]
    for i, (token, page) in enumerate(zip(tokens, to_pages, strict=True)):
        if page > 0:
            pages[page, i % ratio, 0] = kv[token, :width]
            pages[page, i % ratio, 1] = gate[token, :width] + ape[i % ratio, :width]
