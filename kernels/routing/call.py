"""The checks of the calls of ``route_tokens`` and ``combine_experts``."""

from __future__ import annotations

from typing import Any

import torch

from ..common.checks import MODEL_DTYPES, expect_int, expect_positive, expect_tensor

SCORES = ("sqrt_softplus", "softmax")


def check_route(
    logits: Any,
    top_k: Any,
    score: Any,
    scale: Any,
    logits_factor: Any,
    logits_bias: Any,
    expert_scale: Any,
    bias: Any,
    table: Any,
    token_ids: Any,
) -> None:
    """Check the arguments of ``route_tokens``, which says what they are and what is raised."""
    expect_tensor("logits", logits, (None, None), torch.float32)
    num_tokens, num_experts = logits.shape
    device = logits.device
    expect_int("logits: num_experts", num_experts, 1)
    expect_int("top_k", top_k, 1, num_experts)
    if score not in SCORES:
        raise ValueError(f"score: expected one of {list(SCORES)}, got {score!r}")
    expect_positive("scale", scale)
    expect_positive("logits_factor", logits_factor)
    if score == "softmax":
        others = {"bias": bias, "table": table}
    else:
        others = {"logits_bias": logits_bias, "expert_scale": expert_scale}
        if logits_factor != 1:
            raise ValueError(f"logits_factor: expected 1 with {score!r}, got {logits_factor!r}")
    for name, other in others.items():
        if other is not None:
            raise ValueError(f"{name}: expected None with {score!r}, got a tensor")
    for name, vector in (("logits_bias", logits_bias), ("expert_scale", expert_scale)):
        if vector is not None:
            expect_tensor(name, vector, (num_experts,), MODEL_DTYPES, device=device)
    if bias is not None:
        expect_tensor("bias", bias, (num_experts,), torch.float32, device=device)
    if (table is None) != (token_ids is None):
        missing = "table" if table is None else "token_ids"
        raise ValueError(f"{missing}: expected table and token_ids or neither, got None")
    if table is not None:
        if bias is not None:
            raise ValueError("bias: expected None with a table, got a tensor")
        expect_tensor("table", table, (None, top_k), torch.int64, device=device)
        expect_tensor("token_ids", token_ids, (num_tokens,), torch.int64, device=device)


def check_combine(rows: Any, weights: Any, addend: Any) -> None:
    """Check the arguments of ``combine_experts``, which says what they are and what is raised."""
    expect_tensor("weights", weights, (None, None), MODEL_DTYPES)
    num_tokens, k = weights.shape
    expect_int("weights: k", k, 1)
    device = weights.device
    expect_tensor("rows", rows, (num_tokens * k, None), MODEL_DTYPES, device=device)
    if addend is not None:
        expect_tensor("addend", addend, (num_tokens, rows.shape[1]), rows.dtype, device=device)
