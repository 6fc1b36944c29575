"""Streams of a token expanded, in one kernel: stream k is post[k] y + sum over j of comb[j, k] x[j].

The result y of experts comes in parts: the shared expert's row, and rows of the routed ones, which
are added to it by their weights, in fp32 and in the router's order, whatever else is in the batch.
What attention gives has no further rows. How many there are is known at run time alone, so that one
kernel serves both.

Layout: streams [num_tokens, n, hidden_size]; rows [num_tokens * k, hidden_size]. Bound by memory:
all is read once, and the streams written once.

Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
"""

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.launching import Launch, run
from ..common.tile_shapes import next_power_of_2
from .call import expect_supported

# Channels of all streams that a program expands; rows that it fetches at once, those of V4's experts.
CHANNELS, UNROLL, WARPS = 1024, 6, 4


@triton.jit(do_not_specialize=["k"])
def _expand_kernel(
    streams, y, rows, weights, post, comb, out, k,
    NUM_STREAMS: tl.constexpr, BLOCK_STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Args:
    k: rows of a token that are added to y by their weights; where it is 0, neither is read.
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < HIDDEN
    dtype = out.dtype.element_ty
    target = tl.arange(0, BLOCK_STREAMS)[:, None]
    real = target < NUM_STREAMS
    row = tl.load(y.data + token * y.stride_row + channel, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, k, UNROLL):
        for i in tl.static_range(UNROLL):
            there = first + i < k
            place = token * k + first + i
            weight = tl.load(weights + place, mask=there, other=0.0)
            more = tl.load(rows + place * HIDDEN + channel, mask=inside & there, other=0.0)
            row += weight * more.to(tl.float32)
    weight = tl.load(post + token * NUM_STREAMS + target, mask=real, other=0.0)
    total = weight.to(dtype).to(tl.float32) * row[None, :]
    cells = streams.data + token * streams.stride_token + channel
    for source in tl.static_range(NUM_STREAMS):
        entry = (token * NUM_STREAMS + source) * NUM_STREAMS + target
        weight = tl.load(comb + entry, mask=real, other=0.0).to(dtype).to(tl.float32)
        x = tl.load(cells + source * streams.stride_head, mask=inside, other=0.0)
        total += weight * x.to(tl.float32)[None, :]
    written = out + (token * NUM_STREAMS + target) * HIDDEN + channel[None, :]
    tl.store(written, total.to(dtype), mask=real & inside[None, :])


def expand(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Launch checked arguments, shaped as in ``expand_streams``; returns the streams."""
    out, launch = prepare(streams, y, post, comb, rows, weights)
    run([launch], streams)
    return out


def prepare(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, Launch]:
    """The result of checked arguments of ``expand_streams``, not filled yet, and the launch."""
    num_tokens, n, hidden_size = streams.shape
    expect_supported(n, hidden_size)
    out = y.new_empty(num_tokens, n, hidden_size)
    block = min(CHANNELS, next_power_of_2(hidden_size))
    return out, Launch(
        _expand_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        {
            "streams": strided.rows(streams),
            "y": strided.matrix(y),
            # Where there are none, tensors of these dtypes stand in.
            "rows": y if rows is None else rows,
            "weights": post if weights is None else weights,
            "post": post,
            "comb": comb,
            "out": out,
            "k": 0 if weights is None else weights.shape[1],
            "NUM_STREAMS": n,
            "BLOCK_STREAMS": next_power_of_2(n),
            "HIDDEN": hidden_size,
            "BLOCK": block,
            "UNROLL": UNROLL,
            "num_warps": WARPS,
        },
    )
