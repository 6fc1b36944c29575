"""gpt-oss text models.

Layers of Llama's order with attention sinks, sliding windows in every other layer, and experts as
MLP.

Source: transformers ``modeling_gpt_oss``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels import route_tokens

from ..config.hf_llama import SWIGLU
from ..config.named import ModelConfig
from ..layers.basic import Linear, empty_parameter, linear_fp32
from ..layers.moe import run_experts
from ..parallel.group import Group
from .decoder import Decoder
from .llama import DecoderLayer


class Experts(nn.Module):
    """Clamped SwiGLU MLPs with biases; the weights lie transposed, gate and up columns in turns.

    gate_up_proj: [num_experts, hidden_size, 2 * width], bias [num_experts, 2 * width].
    down_proj: [num_experts, width, hidden_size], bias [num_experts, hidden_size].

    After `keep_mxfp4` they are bytes of two values, not transposed, gate and up rows in turns:
    [num_experts, 2 * width, hidden_size / 2] and [num_experts, hidden_size, width / 2]. Their
    scales, gate_up_proj_scale and down_proj_scale, have a byte for each 32 columns.

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

        def empty(*shape: int) -> nn.Parameter:
            return empty_parameter(num_experts, *shape, device=device, dtype=dtype)

        self.gate_up_proj = empty(size, 2 * width)
        self.gate_up_proj_bias = empty(2 * width)
        self.down_proj = empty(width, size)
        self.down_proj_bias = empty(size)
        self.register_parameter("gate_up_proj_scale", None)
        self.register_parameter("down_proj_scale", None)

    def keep_mxfp4(self, name: str, values: Tensor, scale: Tensor) -> None:
        """Holds a weight as it is stored: 17 bytes for 32 values.

        Args:
            name: "gate_up_proj" or "down_proj"; both are to be held so.
            values: [num_experts, out_size, in_size / 2] uint8.
            scale: [num_experts, out_size, in_size / 32] uint8.
        """
        setattr(self, name, nn.Parameter(values, requires_grad=False))
        setattr(self, f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def forward(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, impl: str | None = None
    ) -> Tensor:
        """The weighted sum of every row's experts.

        Args:
            x: [num_tokens, hidden_size].
            expert_ids, weights: [num_tokens, top_k].
            impl: "triton" or "torch"; default: by device.

        Returns:
            X's shape.
        """
        gate_up, down, scale = self.gate_up_proj, self.down_proj, self.gate_up_proj_scale
        if scale is None:
            gate_up, down = gate_up.mT, down.mT
        group = self.group
        out = run_experts(
            x,
            expert_ids,
            weights,
            _apart(gate_up),
            down,
            gate_up_scale=None if scale is None else _apart(scale),
            down_scale=self.down_proj_scale,
            gate_up_bias=_apart(self.gate_up_proj_bias),
            # Once in the sum of all ranks.
            down_bias=self.down_proj_bias if group is None or group.rank == 0 else None,
            activation="silu",
            limit=SWIGLU["swiglu_limit"],
            alpha=SWIGLU["swiglu_alpha"],
            up_offset=1.0,
            impl=impl,
        )
        return out if group is None else group.sum(out)


def _apart(rows: Tensor) -> Tensor:
    """[num_experts, 2, width, ...]: gate and up of rows [num_experts, 2 * width, ...] in turns."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2)


class MoE(nn.Module):
    """Chooses the largest logits, in fp32; their softmax weighs the experts."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert config.moe is not None
        self.top_k = config.moe.top_k
        size, num_experts = config.hidden_size, config.moe.num_experts
        self.router = Linear(size, num_experts, device, dtype, bias=True)
        self.experts = Experts(config, device, dtype, group)

    def forward(self, x: Tensor, impl: str | None = None) -> Tensor:
        """The weighted sum of every row's experts.

        Args:
            x: [num_tokens, hidden_size].
            impl: "triton" or "torch"; default: by device.

        Returns:
            The same shape.
        """
        assert self.router.bias is not None
        ids, weights = route_tokens(
            linear_fp32(x, self.router.matrix(x.dtype)),
            top_k=self.top_k,
            score="softmax",
            logits_bias=self.router.bias,
            impl=impl,
        )
        return self.experts(x, ids, weights, impl)


class GptOss(Decoder):
    """A gpt-oss model with uninitialized weights; `models.loading.weights` fills them.

    Arguments as in `Decoder`.
    """

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, device=device, dtype=dtype, group=group)
        device = torch.device(device)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                layer,
                device,
                dtype,
                mlp=MoE(config, device, dtype, group),
                has_sinks=True,
                group=group,
            )
            for layer in range(config.num_layers)
        )
