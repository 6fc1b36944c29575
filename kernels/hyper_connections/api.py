"""``collapse_streams`` and ``expand_streams``: checks, and the choice between ``kernel`` and
``torch_impl``."""

from __future__ import annotations

import torch

from ..common.checks import MODEL_DTYPES, expect_int, expect_positive, expect_tensor, implementation

# Limits of the Triton kernels.
MAX_STREAMS = 8
MAX_HIDDEN = 16384


def collapse_streams(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
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
        out  = sum over i of pre[i] streams[i], rounded, then RMS norm with ``norm_weight``

    The arithmetic is fp32. A ``fn`` with n rows (that before the model's head) gives only ``out``.

    Args:
        streams: [num_tokens, n, hidden_size] bf16, fp16 or fp32, last stride 1.
        fn: [n or (2 + n) * n, n * hidden_size] fp32.
        base: [rows of fn] fp32.
        scale: [3] fp32, [1] where fn has n rows.
        norm_weight: [hidden_size] bf16, fp16 or fp32, weight of the RMS norm of the result; None =
            no norm.
        norm_eps: added to the mean squares of both norms, in 2**-100 .. 2**30.
        eps: added to pre, to the softmax and to Sinkhorn's divisors, in the same range.
        iterations: normalizations of columns (over j), >= 1, with one of rows (over k) between
            consecutive two.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        (out [num_tokens, hidden_size] in the dtype of streams, post [num_tokens, n] fp32, comb
        [num_tokens, n, n] fp32). post and comb are None where fn has n rows.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: Triton with more than 8 streams or 16384 channels.

    Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
    """
    chosen = implementation(impl, streams)
    _check_collapse(streams, fn, base, scale, norm_weight, norm_eps, eps, iterations)
    if chosen == "triton":
        _expect_supported(streams)
        from .kernel import collapse
    else:
        from .torch_impl import collapse
    return collapse(streams, fn, base, scale, norm_weight, norm_eps, eps, iterations)


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
    """Add the output of a sub-block to the streams: post[k] z + sum over j of comb[j, k] streams[j].

    z is y. With ``rows`` it is y + the sum of weight * row over a token's rows, in their order and
    not rounded. post and comb are first rounded to the dtype of the streams; the arithmetic is
    fp32.

    Args:
        streams: [num_tokens, n, hidden_size] bf16, fp16 or fp32, last stride 1.
        y: [num_tokens, hidden_size] in the same dtype, output of the sub-block; with rows, output
            of the shared expert.
        post, comb: [num_tokens, n] and [num_tokens, n, n] fp32, from ``collapse_streams``.
        rows: [num_tokens * k, hidden_size] in the same dtype, contiguous, from ``expert_mlp``; None
            = no rows.
        weights: [num_tokens, k] fp32, contiguous, from ``route_tokens``; given with rows.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        [num_tokens, n, hidden_size], new memory.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.
        NotImplementedError: Triton with more than 8 streams or 16384 channels.

    Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
    """
    chosen = implementation(impl, streams)
    _check_expand(streams, y, post, comb, rows, weights)
    if chosen == "triton":
        _expect_supported(streams)
        from .kernel import expand
    else:
        from .torch_impl import expand
    return expand(streams, y, post, comb, rows, weights)


def _check_collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> None:
    num_streams, hidden_size = _check_streams(streams)
    device, fp32 = streams.device, torch.float32
    expect_tensor("fn", fn, (None, num_streams * hidden_size), fp32, device=device)
    rows, layer_rows = fn.shape[0], (2 + num_streams) * num_streams
    if rows not in (num_streams, layer_rows):
        raise ValueError(
            f"fn: expected {num_streams} or {layer_rows} rows for {num_streams} streams, got {rows}"
        )
    expect_tensor("base", base, (rows,), fp32, device=device)
    expect_tensor("scale", scale, (1 if rows == num_streams else 3,), fp32, device=device)
    if norm_weight is not None:
        expect_tensor("norm_weight", norm_weight, (hidden_size,), MODEL_DTYPES, device=device)
    expect_positive("norm_eps", norm_eps, least=-100)
    expect_positive("eps", eps, least=-100)
    expect_int("iterations", iterations, 1)


def _check_expand(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> None:
    n, hidden_size = _check_streams(streams)
    num_tokens, device, fp32 = streams.shape[0], streams.device, torch.float32
    expect_tensor("y", y, (num_tokens, hidden_size), streams.dtype, device=device)
    expect_tensor("post", post, (num_tokens, n), fp32, device=device)
    expect_tensor("comb", comb, (num_tokens, n, n), fp32, device=device)
    if (rows is None) != (weights is None):
        missing = "rows" if rows is None else "weights"
        raise ValueError(f"{missing}: expected rows and weights or neither, got None")
    contiguous = {"post": post, "comb": comb}
    if rows is not None and weights is not None:
        expect_tensor("weights", weights, (num_tokens, None), fp32, device=device)
        k = weights.shape[1]
        expect_int("weights: k", k, 1)
        expect_tensor("rows", rows, (num_tokens * k, hidden_size), streams.dtype, device=device)
        contiguous |= {"rows": rows, "weights": weights}
    for name, tensor in contiguous.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got {tensor.stride()}")


def _check_streams(streams: torch.Tensor) -> tuple[int, int]:
    expect_tensor("streams", streams, (None, None, None), MODEL_DTYPES)
    _, num_streams, hidden_size = streams.shape
    expect_int("streams: n", num_streams, 1)
    expect_int("streams: hidden_size", hidden_size, 1)
    return num_streams, hidden_size


def _expect_supported(streams: torch.Tensor) -> None:
    for axis, name, most in ((1, "n", MAX_STREAMS), (2, "hidden_size", MAX_HIDDEN)):
        size = streams.shape[axis]
        if size > most:
            raise NotImplementedError(f"streams: {name}: supported are up to {most}, got {size}")
