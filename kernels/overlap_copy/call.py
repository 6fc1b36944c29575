"""The checks of one call of ``copy_overlap``."""

from __future__ import annotations

from typing import Any

import torch

from ..common.checks import expect_apart, expect_tensor

FP32, INT64 = torch.float32, torch.int64


def check_overlap(
    kv: Any,
    gate: Any,
    ape: Any,
    state: Any,
    pages: Any,
    from_pages: Any,
    state_index: Any,
    state_rows: Any,
    tokens: Any,
    to_pages: Any,
) -> None:
    """Check the arguments of ``copy_overlap``, which says what they are and what is raised."""
    expect_tensor("pages", pages, (None, None, 2, None), FP32)
    expect_apart("pages", pages)
    _, ratio, _, width = pages.shape
    device, channels = pages.device, 2 * width
    expect_tensor("kv", kv, (None, channels), FP32, device=device)
    expect_tensor("gate", gate, tuple(kv.shape), FP32, device=device)
    expect_tensor("ape", ape, (ratio, channels), FP32, device=device)
    expect_tensor("state", state, (None, None, 2, channels), FP32, device=device)
    expect_apart("state", state)
    expect_tensor("from_pages", from_pages, (None,), INT64, device=device)
    num_seqs = from_pages.shape[0]
    expect_tensor("state_index", state_index, (num_seqs,), INT64, device=device)
    expect_tensor("state_rows", state_rows, (num_seqs, ratio), INT64, device=device)
    expect_tensor("tokens", tokens, (None,), INT64, device=device)
    if tokens.shape[0] % max(1, ratio):
        raise ValueError(f"tokens: expected a multiple of {ratio}, got {tokens.shape[0]}")
    expect_tensor("to_pages", to_pages, (tokens.shape[0],), INT64, device=device)
