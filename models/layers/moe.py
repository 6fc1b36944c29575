"""Mixture-of-experts feed-forward.

Every token through its experts, and the sum of what they give, in fp32 and in the router's order,
whatever else is in the batch. Shapes depend on the number of tokens alone: there are always
tokens * k rows, whoever they go to.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.kernels import combine_experts, expert_mlp


def run_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    impl: str | None = None,
    **options: Any,
) -> Tensor:
    """Sum over a token's experts e of weight * down[e](activation(gate[e] x, up[e] x)).

    Args:
        x: [num_tokens, hidden_size].
        expert_ids: [num_tokens, k] int64 below num_experts.
        expert_weights: [num_tokens, k], used in fp32.
        gate_up: [num_experts, 2, intermediate_size, hidden_size], of any strides.
        down: [num_experts, hidden_size, intermediate_size].
        impl: "triton" or "torch"; default: by device.
        options: the activation, scales and biases, as of `quire.kernels.expert_mlp`.

    Returns:
        [num_tokens, hidden_size] in the dtype of x.
    """
    rows = expert_mlp(x, expert_ids, gate_up, down, **options, impl=impl)
    return combine_experts(rows, expert_weights, impl=impl)
