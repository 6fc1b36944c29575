"""Mixture of experts of DeepSeek-V4: router, routed experts and the shared one.

`quire.kernels` does it in three steps: ``route_tokens`` chooses; ``expert_mlp`` gives a row for each
token and chosen expert, in x's dtype; ``expand_streams`` adds a token's rows by their weights, in
fp32 and in the router's order, to what the shared expert gives, and writes the sum to the streams.
Where ranks have parts of each expert, ``combine_experts`` adds them up first, for an all-reduce.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels import combine_experts, expert_mlp, gated_product, route_tokens

from ..layers.basic import Linear, Stacked, empty_parameter, linear_fp32
from ..layers.packed_experts import PackedExperts
from ..parallel.group import Group
from .config import HASH_MOE, DeepseekV4Config


def clamped_swiglu_options(config: DeepseekV4Config) -> dict[str, Any]:
    """Of `gated_product`: silu(min(gate, limit)) * clamp(up, -limit, limit).

    The gate is bounded only from above, and before silu.
    """
    return {"activation": "silu", "limit": config.swiglu_limit}


class Router(nn.Module):
    """Which experts a token goes to.

    Those of the best scores, or of a table by token id (hash layers), and their weights.

    score = sqrt(softplus(x W^T)); weight = scale * score / sum of the chosen scores. The correction
    bias takes part in the choice only, never in the weights.
    """

    def __init__(
        self, config: DeepseekV4Config, kind: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        self.weight = empty_parameter(
            config.num_experts, config.hidden_size, device=device, dtype=dtype
        )
        if kind == HASH_MOE:
            self.tid2eid = empty_parameter(
                config.vocab_size, self.top_k, device=device, dtype=torch.int64
            )
            self.e_score_correction_bias = None
        else:
            self.tid2eid = None
            self.e_score_correction_bias = empty_parameter(
                config.num_experts, device=device, dtype=torch.float32
            )

    def forward(
        self, x: Tensor, input_ids: Tensor, impl: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Chooses the experts of every row.

        Args:
            x: [num_tokens, hidden_size].
            input_ids: [num_tokens] int64.
            impl: "triton" or "torch"; default: by device.

        Returns:
            (expert ids [num_tokens, top_k] int64, weights [num_tokens, top_k] fp32).
        """
        return route_tokens(
            linear_fp32(x, self.weight),
            top_k=self.top_k,
            scale=self.scale,
            bias=self.e_score_correction_bias,
            table=self.tid2eid,
            token_ids=None if self.tid2eid is None else input_ids,
            impl=impl,
        )


class Experts(nn.Module):
    """The routed experts, stacked.

    gate_up_proj: [num_experts, 2 * width, hidden_size], rows of the gate first. down_proj:
    [num_experts, hidden_size, width].
    """

    def __init__(self, config: DeepseekV4Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        experts, width = config.num_experts, config.moe_intermediate_size
        hidden = config.hidden_size
        self.options = clamped_swiglu_options(config)
        self.gate_up_proj = empty_parameter(experts, 2 * width, hidden, device=device, dtype=dtype)
        self.down_proj = empty_parameter(experts, hidden, width, device=device, dtype=dtype)

    def forward(self, x: Tensor, ids: Tensor, impl: str | None = None) -> Tensor:
        """down_e(act(gate_e x, up_e x)) of each expert e of each row.

        act is that of `clamped_swiglu_options`.

        Args:
            x: [num_tokens, hidden_size].
            ids: [num_tokens, k] of the router.
            impl: "triton" or "torch"; default: by device.

        Returns:
            [num_tokens * k, hidden_size], as of `quire.kernels.expert_mlp`.
        """
        gate_up = self.gate_up_proj.unflatten(1, (2, -1))
        return expert_mlp(x, ids, gate_up, self.down_proj, impl=impl, **self.options)


class SharedExpert(nn.Module):
    """The expert that every token goes to, with weight 1."""

    def __init__(self, config: DeepseekV4Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.options = clamped_swiglu_options(config)
        self.gate_proj = Linear(hidden, width, device, dtype)
        self.up_proj = Linear(hidden, width, device, dtype)
        self.down_proj = Linear(width, hidden, device, dtype)
        self.gate_up = Stacked(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor, impl: str | None = None) -> Tensor:
        """down(act(gate x, up x)).

        Args:
            x: [num_tokens, hidden_size].
            impl: "triton" or "torch"; default: by device.

        Returns:
            The same shape.
        """
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down_proj(gated_product(gate, up, **self.options, impl=impl))


class MoE(nn.Module):
    """Routed experts and the shared one; ``gate`` is the router, as in checkpoints.

    Args:
        expert_format: "fp8" or "fp4" for experts that stay packed, None for plain ones.
        group: ranks that have the rest of each expert's width; None = all is here.
    """

    def __init__(
        self, config: DeepseekV4Config, kind: str, device: torch.device, dtype: torch.dtype,
        expert_format: str | None = None, group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group = group
        self.gate = Router(config, kind, device, dtype)
        if expert_format is None:
            self.experts = Experts(config, device, dtype)
        else:
            self.experts = PackedExperts(
                expert_format, config.num_experts, config.hidden_size, config.moe_intermediate_size,
                clamped_swiglu_options(config), device,
            )  # fmt: skip
        self.shared_experts = SharedExpert(config, device, dtype)

    def forward(
        self, x: Tensor, input_ids: Tensor, impl: str | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The parts of experts(x) + shared_experts(x), the experts of each row chosen by the router.

        Args:
            x: [num_tokens, hidden_size].
            input_ids: [num_tokens] int64, for hash layers.
            impl: "triton" or "torch"; default: by device.

        Returns:
            (y [num_tokens, hidden_size], rows [num_tokens * k, hidden_size], weights [num_tokens, k]
            fp32) for ``expand_streams``: the result is y + the sum over a token's rows of weight *
            row. With a group it is y, and the others are None.
        """
        ids, weights = self.gate(x, input_ids, impl)
        shared = self.shared_experts(x, impl)
        rows = self.experts(x, ids, impl)
        if self.group is None:
            return shared, rows, weights
        out = combine_experts(rows, weights, addend=shared, impl=impl)
        return self.group.sum(out), None, None
