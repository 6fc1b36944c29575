"""Loads and saves of ``copy_overlap`` in one launch, a program a row of kv and gate. Rows of several
widths take one kernel: channels past the end are masked.

Layout: pages [num_pages, ratio, 2, width], state [num_states, ring, 2, 2 * width], kv and gate
[num_tokens, 2 * width], all fp32. Bound by memory; in decode most programs find nothing to do.

Source: DeepSeek-V4, compressed sparse attention: entries that overlap the window before.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.launching import Launch, run

# Channels that a program copies.
BLOCK = 512


class Pairs(NamedTuple):
    """Rows of kv and gate, [outer, rows, 2, channels].

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_outer: elements from one page, or state, to the next.
        stride_row: elements from one row of it to the next.
        stride_part: elements from kv to gate.
    """

    data: Any
    stride_outer: Any
    stride_row: Any
    stride_part: Any


@triton.jit
def _pair(pairs, outer, row, part, channel):
    """Cells [2, channels] of one row."""
    first = pairs.data + outer * pairs.stride_outer + row * pairs.stride_row
    return first + part * pairs.stride_part + channel


@triton.jit(do_not_specialize=["num_loads"])
def _copy_overlap_kernel(
    kv,
    gate,
    ape,
    state,
    pages,
    from_pages,
    state_index,
    state_rows,
    tokens,
    to_pages,
    num_loads,
    width,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    part = tl.arange(0, 2)[:, None]
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = dim < width
    if program < num_loads:
        seq, row = program // RATIO, program % RATIO
        index = tl.load(state_index + seq)
        if index >= 0:
            page = tl.load(from_pages + seq)
            to = tl.load(state_rows.data + seq * state_rows.stride_row + row)
            channel, inside = dim[None, :], live[None, :]
            rows = tl.load(_pair(pages, page, row, part, channel), mask=inside, other=0.0)
            tl.store(_pair(state, index, to, part, channel), rows, mask=inside)
    else:
        item = program - num_loads
        row = item % RATIO
        page = tl.load(to_pages + item)
        if page > 0:
            token = tl.load(tokens + item)
            value = tl.load(kv.data + token * kv.stride_row + dim, mask=live, other=0.0)
            logit = tl.load(gate.data + token * gate.stride_row + dim, mask=live, other=0.0)
            logit += tl.load(ape.data + row * ape.stride_row + dim, mask=live, other=0.0)
            tl.store(_pair(pages, page, row, 0, dim), value, mask=live)
            tl.store(_pair(pages, page, row, 1, dim), logit, mask=live)


def copy(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    pages: torch.Tensor,
    from_pages: torch.Tensor,
    state_index: torch.Tensor,
    state_rows: torch.Tensor,
    tokens: torch.Tensor,
    to_pages: torch.Tensor,
) -> None:
    """Launch checked arguments, shaped as in ``quire.kernels.copy_overlap``."""
    launch = prepare(
        kv, gate, ape, state, pages, from_pages, state_index, state_rows, tokens, to_pages
    )
    run([launch], kv)


def prepare(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    pages: torch.Tensor,
    from_pages: torch.Tensor,
    state_index: torch.Tensor,
    state_rows: torch.Tensor,
    tokens: torch.Tensor,
    to_pages: torch.Tensor,
) -> Launch:
    """The launch of checked arguments, shaped as in ``quire.kernels.copy_overlap``."""
    _, ratio, _, width = pages.shape
    num_loads = from_pages.shape[0] * ratio
    return Launch(
        _copy_overlap_kernel,
        (num_loads + tokens.shape[0], triton.cdiv(width, BLOCK)),
        {
            "kv": strided.matrix(kv),
            "gate": strided.matrix(gate),
            "ape": strided.matrix(ape),
            "state": Pairs(state, *state.stride()[:3]),
            "pages": Pairs(pages, *pages.stride()[:3]),
            "from_pages": from_pages,
            "state_index": state_index,
            "state_rows": strided.matrix(state_rows),
            "tokens": tokens,
            "to_pages": to_pages,
            "num_loads": num_loads,
            "width": width,
            "RATIO": ratio,
            "BLOCK": BLOCK,
            "num_warps": 4,
        },
    )
