"""The checks of the calls of ``collapse_streams`` and ``expand_streams``."""

from __future__ import annotations

from typing import Any

import torch

from ..common.checks import MODEL_DTYPES, expect_int, expect_positive, expect_tensor

FP32 = torch.float32
# What the Triton kernels hold of a token.
MAX_STREAMS = 8
MAX_HIDDEN = 16384


def check_collapse(
    streams: Any,
    fn: Any,
    base: Any,
    scale: Any,
    norm_weight: Any,
    norm_eps: Any,
    eps: Any,
    iterations: Any,
) -> None:
    """Check the arguments of ``collapse_streams``, which says what they are and what is raised."""
    num_streams, hidden_size = _check_streams(streams)
    device = streams.device
    expect_tensor("fn", fn, (None, num_streams * hidden_size), FP32, device=device)
    rows = fn.shape[0]
    if rows not in (num_streams, (2 + num_streams) * num_streams):
        raise ValueError(
            f"fn: expected {num_streams} or {(2 + num_streams) * num_streams} rows for "
            f"{num_streams} streams, got {rows}"
        )
    expect_tensor("base", base, (rows,), FP32, device=device)
    expect_tensor("scale", scale, (1 if rows == num_streams else 3,), FP32, device=device)
    if norm_weight is not None:
        expect_tensor("norm_weight", norm_weight, (hidden_size,), MODEL_DTYPES, device=device)
    expect_positive("norm_eps", norm_eps, least=-100)
    expect_positive("eps", eps, least=-100)
    expect_int("iterations", iterations, 1)


def check_expand(streams: Any, y: Any, post: Any, comb: Any, rows: Any, weights: Any) -> None:
    """Check the arguments of ``expand_streams``, which says what they are and what is raised."""
    num_streams, hidden_size = _check_streams(streams)
    num_tokens, device = streams.shape[0], streams.device
    expect_tensor("y", y, (num_tokens, hidden_size), streams.dtype, device=device)
    expect_tensor("post", post, (num_tokens, num_streams), FP32, device=device)
    expect_tensor("comb", comb, (num_tokens, num_streams, num_streams), FP32, device=device)
    dense = {"post": post, "comb": comb}
    if (rows is None) != (weights is None):
        missing = "rows" if rows is None else "weights"
        raise ValueError(f"{missing}: expected rows and weights or neither, got None")
    if weights is not None:
        expect_tensor("weights", weights, (num_tokens, None), FP32, device=device)
        k = weights.shape[1]
        expect_int("weights: k", k, 1)
        expect_tensor("rows", rows, (num_tokens * k, hidden_size), streams.dtype, device=device)
        dense |= {"rows": rows, "weights": weights}
    for name, tensor in dense.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got {tensor.stride()}")


def expect_supported(num_streams: int, hidden_size: int) -> None:
    """Require what the Triton kernels hold of a token."""
    for name, size, most in (
        ("n", num_streams, MAX_STREAMS), ("hidden_size", hidden_size, MAX_HIDDEN),
    ):  # fmt: skip
        if size > most:
            raise NotImplementedError(f"streams: {name}: supported are up to {most}, got {size}")


def _check_streams(streams: Any) -> tuple[int, int]:
    expect_tensor("streams", streams, (None, None, None), MODEL_DTYPES)
    _, num_streams, hidden_size = streams.shape
    expect_int("streams: n", num_streams, 1)
    expect_int("streams: hidden_size", hidden_size, 1)
    return num_streams, hidden_size
