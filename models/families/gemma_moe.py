"""Router and experts of Gemma-4 mixture-of-experts layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.named import ModelConfig
from ..layers.basic import Linear, empty_parameter, gelu_tanh, rms_norm
from ..layers.moe import run_experts


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

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses the experts of every row.

        Args:
            x: [num_tokens, hidden_size].

        Returns:
            (expert_ids int64, weights fp32), both [num_tokens, top_k].
        """
        scale = self.scale.float() * x.shape[-1] ** -0.5
        z = rms_norm(x.float(), scale, self.eps)
        probabilities = F.linear(z, self.proj.matrix(torch.float32)).softmax(dim=-1)
        weights, ids = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights * self.per_expert_scale.float()[ids]


class Experts(nn.Module):
    """Gated MLPs of all experts. gate_up_proj.

    [num_experts, 2 * width, hidden_size]. down_proj: [num_experts, hidden_size, width].
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None
        num_experts, width = config.moe.num_experts, config.moe.intermediate_size
        size = config.hidden_size
        self.gate_up_proj = empty_parameter(
            num_experts, 2 * width, size, device=device, dtype=dtype
        )
        self.down_proj = empty_parameter(num_experts, size, width, device=device, dtype=dtype)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of every row's experts.

        Args:
            x: [num_tokens, hidden_size].
            expert_ids, weights: of the router.

        Returns:
            X's shape.
        """
        return run_experts(x, expert_ids, weights, self.gate_up_proj, self.down_proj, _gated_gelu)


def _gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return gelu_tanh(gate) * up
