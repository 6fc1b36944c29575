"""The checks of one call of ``expert_mlp``."""

from __future__ import annotations

from typing import Any

import torch

from ..common.checks import E4M3, MODEL_DTYPES, expect_int, expect_tensor
from ..gating.call import check_options

# Rows and columns of a block that shares a scale, in e4m3; columns that do, in e2m1.
FP8_BLOCK = 128
FP4_GROUP = 32


def weight_format(weight: torch.Tensor) -> str:
    """How the values of a weight are stored: "plain", "fp8" or "fp4"."""
    return {E4M3: "fp8", torch.uint8: "fp4"}.get(weight.dtype, "plain")


def check_expert_mlp(
    x: Any,
    ids: Any,
    gate_up: Any,
    down: Any,
    activation: Any,
    limit: Any,
    alpha: Any,
    up_offset: Any,
    gate_up_scale: Any,
    down_scale: Any,
    gate_up_bias: Any,
    down_bias: Any,
) -> None:
    """Check the arguments of ``expert_mlp``, which says what they are and what is raised."""
    expect_tensor("x", x, (None, None), MODEL_DTYPES)
    num_tokens, hidden = x.shape
    expect_int("x: hidden_size", hidden, 1)
    expect_tensor("ids", ids, (num_tokens, None), torch.int64, device=x.device)
    expect_int("ids: k", ids.shape[1], 1)
    expect_tensor("gate_up", gate_up, (None, 2, None, None), (x.dtype, E4M3, torch.uint8), any_stride=True)  # fmt: skip
    num_experts, _, width, _ = gate_up.shape
    expect_int("gate_up: num_experts", num_experts, 1)
    expect_int("gate_up: width", width, 1)
    _check_weight("gate_up", gate_up, gate_up_scale, (num_experts, 2), width, hidden, x)
    expect_tensor("down", down, (None, None, None), gate_up.dtype, any_stride=True)
    _check_weight("down", down, down_scale, (num_experts,), hidden, width, x)
    check_options(activation, limit, alpha, up_offset)
    for name, bias, shape in (
        ("gate_up_bias", gate_up_bias, (num_experts, 2, width)),
        ("down_bias", down_bias, (num_experts, hidden)),
    ):
        if bias is not None:
            expect_tensor(name, bias, shape, MODEL_DTYPES, device=x.device, any_stride=True)


def _check_weight(
    name: str, weight: torch.Tensor, scale: Any, lead: tuple[int, ...], rows: int, columns: int,
    x: torch.Tensor,
) -> None:  # fmt: skip
    """A stack of matrices [*lead, rows, columns] and its scale."""
    kind = weight_format(weight)
    if kind == "fp4" and columns % FP4_GROUP:
        raise ValueError(
            f"{name}: expected rows of a multiple of {FP4_GROUP} values in uint8, got {columns}"
        )
    stored = columns // 2 if kind == "fp4" else columns
    expect_tensor(
        name, weight, (*lead, rows, stored), weight.dtype, device=x.device,
        any_stride=kind == "plain",
    )  # fmt: skip
    if kind == "plain":
        if scale is not None:
            raise ValueError(f"{name}_scale: expected None with plain weights, got a tensor")
    elif kind == "fp8":
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        expect_tensor(f"{name}_scale", scale, (*lead, *blocks), torch.float32, device=x.device)
    else:
        groups = (rows, columns // FP4_GROUP)
        expect_tensor(f"{name}_scale", scale, (*lead, *groups), torch.uint8, device=x.device)
