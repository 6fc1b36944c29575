"""Residual streams collapsed in two kernels and expanded in one.

Products: m' = fn x over all streams x of a token, and the sum of the squares of x, as partial sums
[splits, num_tokens, ROWS]: decode has too few tokens to keep a GPU busy otherwise. Collapse: a
program adds up the partial sums of one token, and computes its weights, the weighted sum of its
streams and the norm of that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .common import checks, launching, strided
from .common.tile_shapes import MAX_REGISTERS, next_power_of_2
from .layers.norm import normed

# Limits of the Triton kernels.
MAX_STREAMS = 8
MAX_HIDDEN = 16384
# Products: bytes of a token and tokens in a tile; most splits, and fewest tiles of one.
BLOCK_BYTES, BLOCK_TOKENS, MAX_SPLITS, MIN_TILES = 64, 64, 32, 4
# Channels that a program expands.
CHANNELS = 1024


def collapse_streams(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float = 1e-6,
    eps: float = 1e-6,
    iterations: int = 20,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Collapse residual streams to the input of a sub-block, and compute the weights of its output.

    With n streams and m = fn norm(streams), one RMS norm without weight over all streams of a
    token::

        pre  = sigmoid(scale[0] m[:n] + base[:n]) + eps
        post = 2 sigmoid(scale[1] m[n:2n] + base[n:2n])
        comb = Sinkhorn of the softmax over k of scale[2] m[2n:] + base[2n:], as [n (j), n (k)]
        out  = RMS norm with ``norm_weight`` of the sum over i of pre[i] streams[i], rounded

    The arithmetic is fp32. A ``fn`` with n rows (that before the model's head) gives only ``out``.

    Args:
        streams: [num_tokens, n, hidden_size] bf16, fp16 or fp32, last stride 1.
        fn: [n or (2 + n) * n, n * hidden_size] fp32.
        base: [rows of fn] fp32.
        scale: [3] fp32, [1] where fn has n rows.
        norm_weight: [hidden_size] bf16, fp16 or fp32, of the norm of the result.
        norm_eps: added to the mean squares of both norms, in 2**-100 .. 2**30.
        eps: added to pre, to the softmax and to Sinkhorn's divisors, in the same range.
        iterations: normalizations of columns (over j), >= 1, with one of rows (over k) between
            consecutive two.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        (out [num_tokens, hidden_size] in the dtype of streams, post [num_tokens, n] fp32, comb
        [num_tokens, n, n] fp32). post and comb are None where fn has n rows.

    Raises:
        NotImplementedError: Triton with more than 8 streams or 16384 channels.

    Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
    """
    chosen = checks.accept(
        impl, _check_collapse, streams, fn, base, scale, norm_weight, norm_eps, eps, iterations
    )
    if chosen == "torch":
        return _collapse_torch(streams, fn, base, scale, norm_weight, norm_eps, eps, iterations)
    _expect_supported(streams)
    (num_tokens, n, hidden_size), fn_rows = streams.shape, fn.shape[0]
    arch, num_sms = launching.arch_and_sms(streams)
    rows = max(16, next_power_of_2(fn_rows + 1))
    block_k = max(16, min(BLOCK_BYTES // streams.itemsize, next_power_of_2(hidden_size)))
    all_tiles = n * triton.cdiv(hidden_size, block_k)
    blocks = max(1, triton.cdiv(num_tokens, BLOCK_TOKENS))
    splits = max(1, min(MAX_SPLITS, all_tiles // MIN_TILES, num_sms // blocks))
    tiles = triton.cdiv(all_tiles, splits)
    splits = triton.cdiv(all_tiles, tiles)
    out = streams.new_empty(num_tokens, hidden_size)
    workspace = fn.new_empty(splits, num_tokens, rows)
    post, comb = None, None
    if fn_rows > n:
        post, comb = fn.new_empty(num_tokens, n), fn.new_empty(num_tokens, n, n)
    with torch.cuda.device_of(streams):
        launching.launch(
            _products_kernel, (triton.cdiv(num_tokens, BLOCK_TOKENS), splits),
            streams=strided.rows(streams), fn=strided.matrix(fn), workspace=workspace,
            num_tokens=num_tokens, tiles=tiles, NUM_STREAMS=n, HIDDEN=hidden_size,
            FN_ROWS=fn_rows, ROWS=rows, BLOCK_T=BLOCK_TOKENS, BLOCK_K=block_k,
            PRECISION=arch.fp32_products, num_warps=4, num_stages=3,
            **arch.register_limit(MAX_REGISTERS),
        )  # fmt: skip
        launching.launch(
            _collapse_kernel, (num_tokens,),
            streams=strided.rows(streams), workspace=workspace, base=base, scale=scale,
            norm_weight=norm_weight, out=out, post=post, comb=comb, norm_eps=float(norm_eps),
            eps=float(eps), num_tokens=num_tokens, num_splits=splits, iterations=iterations,
            NUM_STREAMS=n, BLOCK_STREAMS=next_power_of_2(n), HIDDEN=hidden_size,
            BLOCK_HIDDEN=next_power_of_2(hidden_size), FN_ROWS=fn_rows, ROWS=rows,
            MAX_SPLITS=MAX_SPLITS, num_warps=8, **launching.EQUAL_SUMS,
        )  # fmt: skip
    return out, post, comb


def expand_streams(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Add the output of a sub-block to the streams: post[k] z + sum over j of comb[j, k]
    streams[j].

    z is y. With ``rows`` it is y + the sum of weight * row over a token's rows, in their order and
    not rounded. post and comb are first rounded to the dtype of the streams; the arithmetic is
    fp32.

    Args:
        streams: [num_tokens, n, hidden_size] bf16, fp16 or fp32, last stride 1.
        y: [num_tokens, hidden_size] in the same dtype, output of the sub-block; with rows, output
            of the shared expert.
        post, comb: [num_tokens, n] and [num_tokens, n, n] fp32, from ``collapse_streams``.
        rows: [num_tokens * k, hidden_size] in the same dtype, contiguous, from ``expert_mlp``.
        weights: [num_tokens, k] fp32, contiguous, from ``route_tokens``; given with rows.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        [num_tokens, n, hidden_size], new memory.

    Raises:
        NotImplementedError: Triton with more than 8 streams or 16384 channels.

    Source: as of ``collapse_streams``.
    """
    chosen = checks.accept(impl, _check_expand, streams, y, post, comb, rows, weights)
    if chosen == "torch":
        return _expand_torch(streams, y, post, comb, rows, weights)
    _expect_supported(streams)
    (num_tokens, n, hidden_size), k = streams.shape, 0 if weights is None else weights.shape[1]
    out = y.new_empty(num_tokens, n, hidden_size)
    block = min(CHANNELS, next_power_of_2(hidden_size))
    with torch.cuda.device_of(streams):
        launching.launch(
            _expand_kernel, (num_tokens, triton.cdiv(hidden_size, block)),
            streams=strided.rows(streams), y=strided.matrix(y), rows=rows, weights=weights,
            post=post, comb=comb, out=out, k=k, NUM_STREAMS=n, BLOCK_STREAMS=next_power_of_2(n),
            HIDDEN=hidden_size, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _check_collapse(streams, fn, base, scale, norm_weight, norm_eps, eps, iterations) -> None:
    _, n, hidden_size = _checked_shape(streams)
    device, fp32 = streams.device, torch.float32
    checks.expect_tensor("fn", fn, (None, n * hidden_size), fp32, device=device)
    fn_rows, layer_rows = fn.shape[0], (2 + n) * n
    if fn_rows not in (n, layer_rows):
        raise ValueError(f"fn: expected {n} or {layer_rows} rows for {n} streams, got {fn_rows}")
    checks.expect_tensor("base", base, (fn_rows,), fp32, device=device)
    checks.expect_tensor("scale", scale, (1 if fn_rows == n else 3,), fp32, device=device)
    dtypes = checks.MODEL_DTYPES
    checks.expect_tensor("norm_weight", norm_weight, (hidden_size,), dtypes, device=device)
    checks.expect_positive("norm_eps", norm_eps, least=-100)
    checks.expect_positive("eps", eps, least=-100)
    checks.expect_int("iterations", iterations, 1)


def _check_expand(streams, y, post, comb, rows, weights) -> None:
    num_tokens, n, hidden_size = _checked_shape(streams)
    dtype, device, fp32 = streams.dtype, streams.device, torch.float32
    checks.expect_tensor("y", y, (num_tokens, hidden_size), dtype, device=device)
    checks.expect_tensor("post", post, (num_tokens, n), fp32, device=device)
    checks.expect_tensor("comb", comb, (num_tokens, n, n), fp32, device=device)
    if (rows is None) != (weights is None):
        missing = "rows" if rows is None else "weights"
        raise ValueError(f"{missing}: expected rows and weights or neither, got None")
    if weights is not None:
        checks.expect_tensor("weights", weights, (num_tokens, None), fp32, device=device)
        k = weights.shape[1]
        checks.expect_int("weights: k", k, 1)
        checks.expect_tensor("rows", rows, (num_tokens * k, hidden_size), dtype, device=device)
    for name, tensor in (("post", post), ("comb", comb), ("rows", rows), ("weights", weights)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got {tensor.stride()}")


def _checked_shape(streams: torch.Tensor) -> tuple[int, int, int]:
    """Require streams; returns (num_tokens, n, hidden_size)."""
    checks.expect_tensor("streams", streams, (None, None, None), checks.MODEL_DTYPES)
    num_tokens, n, hidden_size = streams.shape
    checks.expect_int("streams: n", n, 1)
    checks.expect_int("streams: hidden_size", hidden_size, 1)
    return num_tokens, n, hidden_size


def _expect_supported(streams: torch.Tensor) -> None:
    """Raise NotImplementedError for streams that the Triton kernels do not support."""
    limits = ("n", MAX_STREAMS), ("hidden_size", MAX_HIDDEN)
    for (name, most), size in zip(limits, streams.shape[1:], strict=True):
        if size > most:
            raise NotImplementedError(f"streams: {name}: supported are up to {most}, got {size}")


@torch.no_grad()
def _collapse_torch(streams, fn, base, scale, norm_weight, norm_eps, eps, iterations):
    n = streams.shape[1]
    flat = streams.flatten(1).float()
    mixes = F.linear(F.rms_norm(flat, flat.shape[-1:], None, norm_eps), fn)
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    out = (pre[..., None] * streams).sum(dim=1).to(streams.dtype).float()
    out = F.rms_norm(out, out.shape[-1:], norm_weight.float(), norm_eps).to(streams.dtype)
    if len(fn) == n:
        return out, None, None
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return out, post, comb


@torch.no_grad()
def _expand_torch(streams, y, post, comb, rows, weights) -> torch.Tensor:
    """z and both terms are rounded to the dtype of y."""
    if rows is not None:
        parts = rows.unflatten(0, weights.shape)
        total = y.float()
        # In the order of rows, which sum(dim=1) does not promise.
        for i in range(weights.shape[1]):
            total = total + parts[:, i] * weights[:, i : i + 1]
        y = total.to(y.dtype)
    post, comb = post.to(y.dtype), comb.to(y.dtype)
    return post[..., None] * y[:, None] + comb.transpose(1, 2) @ streams


@triton.jit(do_not_specialize=["num_tokens", "tiles"])
def _products_kernel(
    streams, fn, workspace, num_tokens, tiles,
    NUM_STREAMS: tl.constexpr, HIDDEN: tl.constexpr, FN_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums [BLOCK_T, ROWS] over ``tiles`` tiles of BLOCK_K channels; the sum of the squares
    is in column FN_ROWS."""
    STREAM_TILES: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1).to(tl.int64)
    live = token < num_tokens
    row = tl.arange(0, ROWS)
    first = tl.program_id(1) * tiles
    acc = tl.zeros([BLOCK_T, ROWS], tl.float32)
    # Summed over channels after the loop: in it the compiler may round a product of its own and the
    # neighbour's differently (FMA), so that threads with the same row would store unequal sums.
    squares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for tile in range(first, tl.minimum(first + tiles, NUM_STREAMS * STREAM_TILES)):
        stream = tile // STREAM_TILES
        channel = (tile % STREAM_TILES) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = channel < HIDDEN
        cells = streams.data + token[:, None] * streams.stride_token
        cells += stream * streams.stride_head + channel[None, :]
        x = tl.load(cells, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        matrix = fn.data + row[None, :] * fn.stride_row + stream * HIDDEN + channel[:, None]
        w = tl.load(matrix, mask=inside[:, None] & (row < FN_ROWS)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        squares += x * x
    acc = tl.where(row[None, :] == FN_ROWS, tl.sum(squares, 1)[:, None], acc)
    sums = workspace + (split * num_tokens + token[:, None]) * ROWS + row[None, :]
    tl.store(sums, acc, mask=live[:, None])


@triton.jit
def _mixes(sums, live, row, real, factor, base, scale):
    """scale * m + base of rows [N] of fn, from their partial sums at sums [MAX_SPLITS]."""
    parts = tl.load(sums[:, None] + row[None, :], mask=live[:, None] & real[None, :], other=0.0)
    return tl.sum(parts, 0) * factor * tl.load(scale) + tl.load(base + row, mask=real, other=0.0)


@triton.jit
def _sinkhorn(logits, real, eps, iterations):
    """Sinkhorn of the softmax over k of logits [BLOCK (j), BLOCK (k)]; real: streams that exist."""
    is_entry = real[:, None] & real[None, :]
    logits = tl.where(is_entry, logits, float("-inf"))
    # Rows past the last stream have no largest logit: subtracting -inf would give NaN.
    matrix = tl.exp(logits - tl.where(real, tl.max(logits, 1), 0.0)[:, None])
    total = tl.where(real, tl.sum(matrix, 1), 1.0)
    matrix = tl.where(is_entry, matrix / total[:, None] + eps, 0.0)
    matrix = matrix / (tl.sum(matrix, 0) + eps)[None, :]
    for _ in range(iterations - 1):
        matrix = matrix / (tl.sum(matrix, 1) + eps)[:, None]
        matrix = matrix / (tl.sum(matrix, 0) + eps)[None, :]
    return matrix


@triton.jit(do_not_specialize=["num_tokens", "num_splits", "iterations"])
def _collapse_kernel(
    streams, workspace, base, scale, norm_weight, out, post, comb, norm_eps, eps,
    num_tokens, num_splits, iterations,
    NUM_STREAMS: tl.constexpr, BLOCK_STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr, FN_ROWS: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """The weights of one token, the sum of its streams and its norm."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS)
    live = split < num_splits
    sums = workspace + (split.to(tl.int64) * num_tokens + token) * ROWS
    squares = tl.sum(tl.load(sums + FN_ROWS, mask=live, other=0.0), 0)
    factor = tl.rsqrt(squares / (NUM_STREAMS * HIDDEN) + norm_eps)
    stream = tl.arange(0, BLOCK_STREAMS)
    real = stream < NUM_STREAMS
    pre = tl.sigmoid(_mixes(sums, live, stream, real, factor, base, scale)) + eps
    if post is not None:
        logits = _mixes(sums, live, NUM_STREAMS + stream, real, factor, base, scale + 1)
        tl.store(post + token * NUM_STREAMS + stream, 2 * tl.sigmoid(logits), mask=real)
        ENTRIES: tl.constexpr = BLOCK_STREAMS * BLOCK_STREAMS
        entry = stream[:, None] * NUM_STREAMS + stream[None, :]
        is_entry = real[:, None] & real[None, :]
        row = 2 * NUM_STREAMS + entry.reshape(ENTRIES)
        logits = _mixes(sums, live, row, is_entry.reshape(ENTRIES), factor, base, scale + 2)
        logits = logits.reshape(BLOCK_STREAMS, BLOCK_STREAMS)
        cells = comb + token * (NUM_STREAMS * NUM_STREAMS) + entry
        tl.store(cells, _sinkhorn(logits, real, eps, iterations), mask=is_entry)
    channel = tl.arange(0, BLOCK_HIDDEN)
    inside = channel < HIDDEN
    row = streams.data + token * streams.stride_token + channel
    total = tl.zeros([BLOCK_HIDDEN], tl.float32)
    for i in tl.static_range(NUM_STREAMS):
        x = tl.load(row + i * streams.stride_head, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(stream == i, pre, 0.0), 0) * x
    rounded = total.to(out.dtype.element_ty).to(tl.float32)
    total = normed(rounded, norm_weight, norm_eps, 0.0, HIDDEN, channel, inside)
    tl.store(out + token * HIDDEN + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["k"])
def _expand_kernel(
    streams, y, rows, weights, post, comb, out, k,
    NUM_STREAMS: tl.constexpr, BLOCK_STREAMS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < HIDDEN
    dtype = out.dtype.element_ty
    target = tl.arange(0, BLOCK_STREAMS)[:, None]
    real = target < NUM_STREAMS
    z = tl.load(y.data + token * y.stride_row + channel, mask=inside, other=0.0).to(tl.float32)
    if rows is not None:
        for i in range(0, k):
            weight = tl.load(weights + token * k + i)
            row = tl.load(rows + (token * k + i) * HIDDEN + channel, mask=inside, other=0.0)
            z += weight * row.to(tl.float32)
    weight = tl.load(post + token * NUM_STREAMS + target, mask=real, other=0.0)
    total = weight.to(dtype).to(tl.float32) * z[None, :]
    cells = streams.data + token * streams.stride_token + channel
    for source in tl.static_range(NUM_STREAMS):
        entry = (token * NUM_STREAMS + source) * NUM_STREAMS + target
        weight = tl.load(comb + entry, mask=real, other=0.0).to(dtype).to(tl.float32)
        x = tl.load(cells + source * streams.stride_head, mask=inside, other=0.0)
        total += weight * x.to(tl.float32)[None, :]
    written = out + (token * NUM_STREAMS + target) * HIDDEN + channel[None, :]
    tl.store(written, total.to(dtype), mask=real & inside[None, :])
