"""Load and save overlapping compression windows in one launch, a program per row of kv and gate.

Rows of several widths take one kernel: channels past the end are masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import checks, launching, strided
from .common.checks import expect_apart, expect_tensor, expect_values

# Channels that a program copies.
BLOCK = 512


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
    """Save and load the rows that a compressor with overlap needs to resume a sequence.

    A page keeps series a, kv and gate + ape, of a block's last ``ratio`` tokens: a whole
    compression window. Pages ``from_pages`` are loaded to ``state``, before ``compress`` reads it.
    The rows ``tokens`` of the step are saved to ``to_pages``. No page is read and written in one
    call.

    Args:
        kv, gate, ape, state: arguments of ``compress`` with overlap, kv and gate fp32. Series a is
            the first half of their 2 * width channels.
        pages: [num_pages, ratio, 2, width] fp32, any strides with last stride 1.
        from_pages: [num_seqs] int64, the page that a sequence loads.
        state_index: [num_seqs] int64, the state to load it to; -1 = load nothing.
        state_rows: [num_seqs, ratio] int64, the rows of that state.
        tokens: [num_saved] int64, rows of kv; the ``ratio`` rows of a page one after another.
        to_pages: [num_saved] int64; 0 = do not save the row.
        impl: see ``quire.kernels``, also for errors.

    Source: DeepSeek-V4, compressed sparse attention: entries that overlap the window before.
    """
    chosen = checks.accept(
        impl, _check, kv, gate, ape, state, pages, from_pages, state_index, state_rows, tokens,
        to_pages,
    )  # fmt: skip
    num_pages, ratio, _, width = pages.shape
    num_seqs = from_pages.shape[0]
    if checks.is_readable(pages):
        loads, saves = state_index != -1, to_pages != 0
        expect_values("state_index", state_index[loads], 0, state.shape[0] - 1)
        expect_values("from_pages", from_pages[loads], 0, num_pages - 1)
        expect_values("state_rows", state_rows[loads], 0, state.shape[1] - 1)
        expect_values("to_pages", to_pages[saves], 1, num_pages - 1)
        expect_values("tokens", tokens[saves], 0, kv.shape[0] - 1)
    if chosen == "torch":
        return _torch(
            kv, gate, ape, state, pages, from_pages, state_index, state_rows, tokens, to_pages
        )
    num_loads = num_seqs * ratio
    with torch.cuda.device_of(kv):
        launching.launch(
            _copy_overlap_kernel, (num_loads + tokens.shape[0], triton.cdiv(width, BLOCK)),
            kv=strided.matrix(kv), gate=strided.matrix(gate), ape=strided.matrix(ape),
            state=strided.pages(state), pages=strided.pages(pages), from_pages=from_pages,
            state_index=state_index, state_rows=strided.matrix(state_rows), tokens=tokens,
            to_pages=to_pages, num_loads=num_loads, width=width, RATIO=ratio, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    return None


def _check(
    kv, gate, ape, state, pages, from_pages, state_index, state_rows, tokens, to_pages
) -> None:
    fp32, int64 = torch.float32, torch.int64
    expect_tensor("pages", pages, (None, None, 2, None), fp32)
    expect_apart("pages", pages)
    _, ratio, _, width = pages.shape
    device, channels = pages.device, 2 * width
    expect_tensor("kv", kv, (None, channels), fp32, device=device)
    expect_tensor("gate", gate, tuple(kv.shape), fp32, device=device)
    expect_tensor("ape", ape, (ratio, channels), fp32, device=device)
    expect_tensor("state", state, (None, None, 2, channels), fp32, device=device)
    expect_apart("state", state)
    expect_tensor("from_pages", from_pages, (None,), int64, device=device)
    num_seqs = from_pages.shape[0]
    expect_tensor("state_index", state_index, (num_seqs,), int64, device=device)
    expect_tensor("state_rows", state_rows, (num_seqs, ratio), int64, device=device)
    expect_tensor("tokens", tokens, (None,), int64, device=device)
    if tokens.shape[0] % max(1, ratio):
        raise ValueError(f"tokens: expected a multiple of {ratio}, got {tokens.shape[0]}")
    expect_tensor("to_pages", to_pages, (tokens.shape[0],), int64, device=device)


@torch.no_grad()
def _torch(
    kv, gate, ape, state, pages, from_pages, state_index, state_rows, tokens, to_pages
) -> None:
    ratio, width = pages.shape[1], pages.shape[3]
    loads, saves = state_index >= 0, to_pages > 0
    state[..., :width][state_index[loads, None], state_rows[loads]] = pages[from_pages[loads]]
    row = torch.arange(len(tokens), device=kv.device)[saves] % max(1, ratio)
    token = tokens[saves]
    saved = torch.stack([kv[token, :width], gate[token, :width] + ape[row, :width]], dim=1)
    pages[to_pages[saves], row] = saved


@triton.jit
def _pair(pairs, outer, row, part, channel):
    """Cells of kv (part 0) and gate (part 1) of a row, [outer, rows, 2, channels]."""
    first = pairs.data + outer * pairs.stride_page + row * pairs.stride_row
    return first + part * pairs.stride_head + channel


@triton.jit(do_not_specialize=["num_loads"])
def _copy_overlap_kernel(
    kv, gate, ape, state, pages, from_pages, state_index, state_rows, tokens, to_pages,
    num_loads, width,
    RATIO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
