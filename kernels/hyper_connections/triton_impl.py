"""Streams of a token collapsed, in two kernels.

1. products: m' = fn x over all streams x of a token, and the sum of the squares of x. The
   reduction, over 16384 channels and more, is split over programs, each of which leaves a partial
   sum: in decode there are too few tokens to keep a GPU busy otherwise.
2. collapse: m = m' rsqrt(mean(x^2) + norm_eps) by adding up the partial sums. The first programs
   (of a head none) make post and comb of a block of tokens each, a token a thread, so that all of
   Sinkhorn stays in that thread's registers and nothing is exchanged. Each of the others makes the
   weighted sum of one token's streams and its norm; neither waits for the other.

The products run on tensor cores in tf32 parts, and lose 2^-22 of each product: streams in bf16 or
fp16 are exact in tf32, so fn alone is taken apart, in two; those of fp32 take three products. On
AMD they are of fp32.

Layout: streams [num_tokens, n, hidden_size]; fn [rows, n * hidden_size] fp32; partial sums
[splits, num_tokens, ROWS] fp32, the sum of squares behind those of fn's rows; post, comb fp32.
Bound by memory: the streams are read once by each kernel.

Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
"""

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.arch import Arch
from ..common.launching import Launch, arch_and_sms, run
from ..common.tile_shapes import MAX_REGISTERS, next_power_of_2
from .call import expect_supported

# Bytes of a token in a tile of the products; parts that the reduction is split into, at most;
# tiles that a part has, at least.
BLOCK_BYTES, MAX_SPLITS, MIN_TILES = 128, 32, 4
# Tokens of a tile of the products, as many as read fn seldom enough: a byte of streams in bf16 comes
# with 0.75 of fn.
BLOCK_TOKENS = 64
COLLAPSE_WARPS = 8
# Partial sums that a thread fetches at once.
UNROLL = 4


@triton.jit
def _tf32(x):
    """The nearest numbers of 11 significant bits, which tf32 products take as they are."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tokens", "tiles", "fn_rows"])
def _products_kernel(
    streams, fn, workspace, num_tokens, tiles, fn_rows,
    NUM_STREAMS: tl.constexpr, HIDDEN: tl.constexpr, FN_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums [BLOCK_T, ROWS] over ``tiles`` tiles of BLOCK_K channels.

    fn_rows: of fn, FN_ROWS or fewer; columns past the last repeat it, and are not read.
    """
    STREAM_TILES: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1).to(tl.int64)
    live = token < num_tokens
    row = tl.arange(0, ROWS)
    fn_row = tl.minimum(row, fn_rows - 1)
    first = tl.program_id(1) * tiles
    EXACT: tl.constexpr = PRECISION == "tf32x3" and streams.data.dtype.element_ty != tl.float32
    acc = tl.zeros([BLOCK_T, ROWS], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for tile in range(first, tl.minimum(first + tiles, NUM_STREAMS * STREAM_TILES)):
        stream = tile // STREAM_TILES
        channel = (tile % STREAM_TILES) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = channel < HIDDEN
        cells = streams.data + token[:, None] * streams.stride_token
        cells += stream * streams.stride_head + channel[None, :]
        x = tl.load(cells, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        matrix = fn.data + fn_row[None, :] * fn.stride_row + stream * HIDDEN + channel[:, None]
        w = tl.load(matrix, mask=inside[:, None] & (row < FN_ROWS)[None, :], other=0.0)
        if EXACT:  # x is, in tf32
            high = _tf32(w)
            acc = tl.dot(x, high, acc, input_precision="tf32")
            acc = tl.dot(x, _tf32(w - high), acc, input_precision="tf32")
        else:
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        squares += tl.sum(x * x, 1)
    acc = tl.where(row[None, :] == FN_ROWS, squares[:, None], acc)
    sums = workspace + (split * num_tokens + token[:, None]) * ROWS + row[None, :]
    tl.store(sums, acc, mask=live[:, None])


@triton.jit
def _sinkhorn(matrix, eps, ITERATIONS):
    """Columns, then rows and columns in turn, of matrices [n, n, tokens] divided by their sums."""
    matrix = matrix / (tl.sum(matrix, 0) + eps)[None, :, :]
    for _ in range(ITERATIONS - 1):
        matrix = matrix / (tl.sum(matrix, 1) + eps)[:, None, :]
        matrix = matrix / (tl.sum(matrix, 0) + eps)[None, :, :]
    return matrix


@triton.jit
def _write_weights(
    workspace, base, scale, post, comb, norm_eps, eps, num_tokens, num_splits, block,
    ITERATIONS, NUM_STREAMS: tl.constexpr, BLOCK_STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """post and comb of a block of tokens."""
    FN_ROWS: tl.constexpr = (2 + NUM_STREAMS) * NUM_STREAMS
    token = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    stream = tl.arange(0, BLOCK_STREAMS)
    real = stream < NUM_STREAMS
    entry = stream[:, None] * NUM_STREAMS + stream[None, :]
    is_entry = (real[:, None] & real[None, :])[:, :, None]  # [n, n, 1]
    take_post = real[:, None] & live[None, :]
    take_comb = is_entry & live[None, None, :]
    post_sum = tl.zeros([BLOCK_STREAMS, BLOCK_T], tl.float32)
    comb_sum = tl.zeros([BLOCK_STREAMS, BLOCK_STREAMS, BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    split_stride = num_tokens.to(tl.int64) * ROWS
    for first in range(0, num_splits, UNROLL):
        for i in tl.static_range(UNROLL):
            there = first + i < num_splits
            sums = workspace + (first + i) * split_stride + token * ROWS
            squares += tl.load(sums + FN_ROWS, mask=live & there, other=0.0)
            cells = sums[None, :] + NUM_STREAMS + stream[:, None]
            post_sum += tl.load(cells, mask=take_post & there, other=0.0)
            cells = sums[None, None, :] + 2 * NUM_STREAMS + entry[:, :, None]
            comb_sum += tl.load(cells, mask=take_comb & there, other=0.0)
    factor = tl.rsqrt(squares / (NUM_STREAMS * HIDDEN) + norm_eps)
    bases = tl.load(base + NUM_STREAMS + stream, mask=real, other=0.0)
    logits = post_sum * factor[None, :] * tl.load(scale + 1) + bases[:, None]
    cells = post + token[None, :] * NUM_STREAMS + stream[:, None]
    tl.store(cells, 2 * tl.sigmoid(logits), mask=take_post)
    bases = tl.load(base + 2 * NUM_STREAMS + entry, mask=is_entry.reshape(entry.shape), other=0.0)
    logits = comb_sum * factor[None, None, :] * tl.load(scale + 2) + bases[:, :, None]
    logits = tl.where(is_entry, logits, float("-inf"))
    # A row that is none has no largest logit: its weights would be NaN.
    largest = tl.where(real[:, None], tl.max(logits, 1), 0.0)
    matrix = tl.exp(logits - largest[:, None, :])
    total = tl.where(real[:, None], tl.sum(matrix, 1), 1.0)
    matrix = tl.where(is_entry, matrix / total[:, None, :] + eps, 0.0)
    matrix = _sinkhorn(matrix, eps, ITERATIONS)
    cells = comb + token[None, None, :] * (NUM_STREAMS * NUM_STREAMS) + entry[:, :, None]
    tl.store(cells, matrix, mask=take_comb)


@triton.jit
def _write_sum(
    streams, workspace, base, scale, norm_weight, out, norm_eps, eps, num_tokens, num_splits, token,
    NUM_STREAMS: tl.constexpr, BLOCK_STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr, FN_ROWS: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """The weighted sum of one token's streams, normed if there is a weight."""
    stream = tl.arange(0, BLOCK_STREAMS)
    real = stream < NUM_STREAMS
    split = tl.arange(0, MAX_SPLITS)
    there = split < num_splits
    sums = workspace + (split.to(tl.int64) * num_tokens + token) * ROWS
    cells = sums[:, None] + stream[None, :]
    product = tl.sum(tl.load(cells, mask=there[:, None] & real[None, :], other=0.0), 0)
    squares = tl.sum(tl.load(sums + FN_ROWS, mask=there, other=0.0), 0)
    factor = tl.rsqrt(squares / (NUM_STREAMS * HIDDEN) + norm_eps)
    bases = tl.load(base + stream, mask=real, other=0.0)
    pre = tl.sigmoid(product * factor * tl.load(scale) + bases) + eps
    channel = tl.arange(0, BLOCK_HIDDEN)
    inside = channel < HIDDEN
    row = streams.data + token * streams.stride_token + channel
    total = tl.zeros([BLOCK_HIDDEN], tl.float32)
    for i in tl.static_range(NUM_STREAMS):
        x = tl.load(row + i * streams.stride_head, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(stream == i, pre, 0.0), 0) * x
    total = total.to(out.dtype.element_ty)
    if norm_weight is not None:
        wide = total.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + norm_eps)
        weight = tl.load(norm_weight + channel, mask=inside, other=0.0).to(tl.float32)
        total = (wide * factor * weight).to(out.dtype.element_ty)
    tl.store(out + token * HIDDEN + channel, total, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_splits", "iterations", "weight_programs"])
def _collapse_kernel(
    streams,
    workspace,
    base,
    scale,
    norm_weight,
    out,
    post,
    comb,
    norm_eps,
    eps,
    num_tokens,
    num_splits,
    iterations,
    weight_programs,
    NUM_STREAMS: tl.constexpr,
    BLOCK_STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    FN_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    program = tl.program_id(0)
    if program < weight_programs:
        _write_weights(
            workspace, base, scale, post, comb, norm_eps, eps, num_tokens, num_splits, program,
            iterations, NUM_STREAMS, BLOCK_STREAMS, HIDDEN, ROWS, BLOCK_T, UNROLL,
        )  # fmt: skip
    else:
        _write_sum(
            streams, workspace, base, scale, norm_weight, out, norm_eps, eps, num_tokens,
            num_splits, (program - weight_programs).to(tl.int64), NUM_STREAMS, BLOCK_STREAMS, HIDDEN,
            BLOCK_HIDDEN, FN_ROWS, ROWS, MAX_SPLITS,
        )  # fmt: skip


def collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch checked arguments, shaped as in ``collapse_streams``; returns (out, post, comb)."""
    arch, num_sms = arch_and_sms(streams)
    made, launches = prepare_collapse(
        arch, num_sms, streams, fn, base, scale, norm_weight, norm_eps, eps, iterations
    )
    run(launches, streams)
    return made


def prepare_collapse(
    arch: Arch,
    num_sms: int,
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], list[Launch]]:
    """(out, post, comb) of checked arguments of ``collapse_streams``, not filled yet, and the
    launches."""
    num_tokens, n, hidden_size = streams.shape
    expect_supported(n, hidden_size)
    # The few rows of a head take the tile of a layer's: one kernel serves both.
    layer_rows, fn_rows = (2 + n) * n, len(fn)
    rows = max(16, next_power_of_2(layer_rows + 1))
    block_k = max(16, min(BLOCK_BYTES // streams.itemsize, next_power_of_2(hidden_size)))
    all_tiles = n * triton.cdiv(hidden_size, block_k)
    blocks = max(1, triton.cdiv(num_tokens, BLOCK_TOKENS))
    splits = max(1, min(MAX_SPLITS, all_tiles // MIN_TILES, num_sms // blocks))
    tiles = triton.cdiv(all_tiles, splits)
    splits = triton.cdiv(all_tiles, tiles)
    out = streams.new_empty(num_tokens, hidden_size)
    workspace = fn.new_empty(splits, num_tokens, rows)
    post = comb = None
    if fn_rows > n:
        post, comb = fn.new_empty(num_tokens, n), fn.new_empty(num_tokens, n, n)
    sizes = {"NUM_STREAMS": n, "HIDDEN": hidden_size, "FN_ROWS": layer_rows, "ROWS": rows}
    at_once = arch.lanes * COLLAPSE_WARPS  # tokens whose post and comb a program makes
    weight_programs = triton.cdiv(num_tokens, at_once) if fn_rows > n else 0
    launches = [
        Launch(
            _products_kernel,
            (triton.cdiv(num_tokens, BLOCK_TOKENS), splits),
            {
                "streams": strided.rows(streams),
                "fn": strided.matrix(fn),
                "workspace": workspace,
                "num_tokens": num_tokens,
                "tiles": tiles,
                "fn_rows": fn_rows,
                **sizes,
                "BLOCK_T": BLOCK_TOKENS,
                "BLOCK_K": block_k,
                "PRECISION": arch.fp32_products,
                "num_warps": 4,
                "num_stages": 4 if arch.maker == "nvidia" else 3,
                **arch.register_limit(MAX_REGISTERS),
            },
        ),
        Launch(
            _collapse_kernel,
            (weight_programs + num_tokens,),
            {
                "streams": strided.rows(streams),
                "base": base,
                "scale": scale,
                "norm_weight": norm_weight,
                "out": out,
                "workspace": workspace,
                # A head has neither: any fp32 tensor stands in, and nothing is written there.
                "post": workspace if post is None else post,
                "comb": workspace if comb is None else comb,
                "norm_eps": float(norm_eps),
                "eps": float(eps),
                "num_tokens": num_tokens,
                "num_splits": splits,
                "iterations": iterations,
                "weight_programs": weight_programs,
                **sizes,
                "BLOCK_STREAMS": next_power_of_2(n),
                "BLOCK_HIDDEN": next_power_of_2(hidden_size),
                "BLOCK_T": at_once,
                "MAX_SPLITS": MAX_SPLITS,
                "UNROLL": UNROLL,
                "num_warps": COLLAPSE_WARPS,
            },
        ),
    ]
    return (out, post, comb), launches
