"""Router and experts of Gemma-4 mixture-of-experts layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels import residual_norm, route_tokens

from ..config.named import ModelConfig
from ..layers.basic import Linear, empty_parameter
from ..layers.moe import run_experts
from ..parallel.group import Group


class Router(nn.Module):
    """Chooses experts by softmax over all of them, then scales each.

    The weights of the chosen ones are made to sum to one before.

    All of it in fp32: in bf16, near ties would choose other experts.

    Source: transformers ``modeling_gemma4`` Gemma4TextRouter.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None
        self.top_k = config.moe.top_k
        self.eps = config.rms_norm_eps
        self.proj = Linear(config.hidden_size, config.moe.num_experts, device, dtype)
        self.scale = empty_parameter(config.hidden_size, device=device, dtype=dtype)
        self.per_expert_scale = empty_parameter(config.moe.num_experts, device=device, dtype=dtype)

    def forward(self, x: Tensor, impl: str | None = None) -> tuple[Tensor, Tensor]:
        """Chooses the experts of every row.

        Args:
            x: [num_tokens, hidden_size].
            impl: "triton" or "torch"; default: by device.

        Returns:
            (expert_ids int64, weights fp32), both [num_tokens, top_k].
        """
        wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        z = residual_norm(x, self.scale, eps=self.eps, out=wide, impl=impl)
        return route_tokens(
            F.linear(z, self.proj.matrix(torch.float32)),
            top_k=self.top_k,
            score="softmax",
            logits_factor=x.shape[-1] ** -0.5,
            expert_scale=self.per_expert_scale,
            impl=impl,
        )


class Experts(nn.Module):
    """Gated MLPs of all experts. gate_up_proj.

    [num_experts, 2 * width, hidden_size]. down_proj: [num_experts, hidden_size, width].

    Args:
        group: ranks that have the rest of the width; None = all is here.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group = group
        assert config.moe is not None
        num_experts, width = config.moe.num_experts, config.moe.intermediate_size
        size = config.hidden_size
        self.gate_up_proj = empty_parameter(
            num_experts, 2 * width, size, device=device, dtype=dtype
        )
        self.down_proj = empty_parameter(num_experts, size, width, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, impl: str | None = None
    ) -> Tensor:
        """The weighted sum of every row's experts.

        Args:
            x: [num_tokens, hidden_size].
            expert_ids, weights: of the router.
            impl: "triton" or "torch"; default: by device.

        Returns:
            X's shape.
        """
        gate_up = self.gate_up_proj.unflatten(1, (2, -1))
        out = run_experts(
            x, expert_ids, weights, gate_up, self.down_proj, activation="gelu_tanh", impl=impl
        )
        return out if self.group is None else self.group.sum(out)
