"""gpt-oss text models: Llama with attention sinks, windows in every other layer, and experts.

Source: transformers ``modeling_gpt_oss``, ``configuration_gpt_oss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels import combine_experts, expert_mlp, route_tokens

from ..config import fields
from ..config.fields import only, read_fields
from ..config.keys import LayeredKeys, common_keys, read_rope
from ..config.model import ModelConfig, MoEConfig
from ..layers.basic import Linear, WeightPlacement, linear_fp32
from ..loading.random_weights import draw
from .decoder import Attention
from .llama import Llama
from .registry import Family, register_family

SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Constants of the experts of gpt-oss; every released model has these."""


@dataclass(frozen=True, kw_only=True)
class GptOssKeys(LayeredKeys):
    vocab_size: fields.VocabSize = 201088
    hidden_size: fields.Width = 2880
    intermediate_size: fields.Width = 2880
    num_hidden_layers: fields.NumLayers = 36
    num_attention_heads: fields.NumHeads = 64
    num_key_value_heads: fields.NumHeads = 8
    head_dim: fields.HeadSize | None = 64
    max_position_embeddings: fields.NumTokens = 131072
    rms_norm_eps: fields.Epsilon = 1e-5
    sliding_window: fields.NumTokens = 128
    num_local_experts: fields.NumExperts | None = None
    num_experts: fields.NumExperts = 128
    num_experts_per_tok: fields.NumExperts = 4
    attention_bias: fields.Flag = True
    tie_word_embeddings: fields.Flag = False
    hidden_act: only("silu") = "silu"
    swiglu_limit: only(SWIGLU["swiglu_limit"]) = SWIGLU["swiglu_limit"]
    swiglu_alpha: only(SWIGLU["swiglu_alpha"]) = SWIGLU["swiglu_alpha"]


def config_from_hf(text: Mapping[str, Any], name: str) -> ModelConfig:
    keys = read_fields(GptOssKeys, text)
    released = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    full = keys.attention(read_rope(keys.rope_keys() or released, 150000.0))
    return keys.config(
        name=name,
        family="gpt_oss",
        intermediate_size=0,
        layer_types=keys.layers(pattern=2),
        sliding=replace(full, sliding_window=keys.sliding_window),
        full=full,
        moe=MoEConfig(
            num_experts=keys.num_local_experts or keys.num_experts,
            top_k=keys.num_experts_per_tok,
            intermediate_size=keys.intermediate_size,
        ),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    more = {
        "intermediate_size": config.moe.intermediate_size,
        "hidden_act": "silu",
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
    }
    return common_keys(config) | SWIGLU | more


class Experts(nn.Module):
    """Clamped SwiGLU MLPs with biases; the weights lie transposed, gate and up columns in turns.

    gate_up_proj: [num_experts, hidden_size, 2 * width]; down_proj: [num_experts, width,
    hidden_size]. After `keep_mxfp4` they are bytes of two values, not transposed, with a byte of
    scale for each 32 columns.
    """

    def __init__(self, config: ModelConfig, place: WeightPlacement) -> None:
        super().__init__()
        self.group = place.group
        assert config.moe is not None
        num_experts, width = config.moe.num_experts, config.moe.intermediate_size
        size = config.hidden_size
        self.gate_up_proj = place.empty(num_experts, size, 2 * width)
        self.gate_up_proj_bias = place.empty(num_experts, 2 * width)
        self.down_proj = place.empty(num_experts, width, size)
        self.down_proj_bias = place.empty(num_experts, size)
        self.register_parameter("gate_up_proj_scale", None)
        self.register_parameter("down_proj_scale", None)

    def keep_mxfp4(self, name: str, values: Tensor, scale: Tensor) -> None:
        """Hold "gate_up_proj" or "down_proj" as it is stored: 17 bytes for 32 values.

        values: [num_experts, out_size, in_size / 2] uint8; scale: [num_experts, out_size, in_size /
        32] uint8.
        """
        setattr(self, name, nn.Parameter(values, requires_grad=False))
        setattr(self, f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def forward(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, impl: str | None = None
    ) -> Tensor:
        gate_up, down, scale = self.gate_up_proj, self.down_proj, self.gate_up_proj_scale
        if scale is None:
            gate_up, down = gate_up.mT, down.mT
        group = self.group
        # The bias counts once in the sum of all ranks.
        down_bias = self.down_proj_bias if group is None or group.rank == 0 else None
        rows = expert_mlp(
            x, expert_ids, _apart(gate_up), down,
            gate_up_scale=None if scale is None else _apart(scale),
            down_scale=self.down_proj_scale, gate_up_bias=_apart(self.gate_up_proj_bias),
            down_bias=down_bias, activation="silu", limit=SWIGLU["swiglu_limit"],
            alpha=SWIGLU["swiglu_alpha"], up_offset=1.0, impl=impl,
        )  # fmt: skip
        out = combine_experts(rows, weights, impl=impl)
        return out if group is None else group.sum(out)


def _apart(rows: Tensor) -> Tensor:
    """[num_experts, 2, width, ...]: gate and up of rows [num_experts, 2 * width, ...] in turns."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2)


class MoE(nn.Module):
    """Chooses the largest logits, in fp32; their softmax weighs the experts."""

    def __init__(self, config: ModelConfig, place: WeightPlacement) -> None:
        super().__init__()
        assert config.moe is not None
        self.top_k = config.moe.top_k
        self.router = Linear(config.hidden_size, config.moe.num_experts, place, bias=True)
        self.experts = Experts(config, place)

    def forward(self, x: Tensor, impl: str | None = None) -> Tensor:
        """The weighted sum of every row's experts; x: [num_tokens, hidden_size]."""
        assert self.router.bias is not None
        ids, weights = route_tokens(
            linear_fp32(x, self.router.matrix(x.dtype)),
            top_k=self.top_k,
            score="softmax",
            logits_bias=self.router.bias,
            impl=impl,
        )
        return self.experts(x, ids, weights, impl)


class SinkAttention(Attention):
    has_sinks = True


class GptOss(Llama):
    """A gpt-oss model: attention has sinks, experts stand for the MLP."""

    attention = SinkAttention

    def mlp(self, config: ModelConfig) -> nn.Module:
        return MoE(config, self.place)


def draw_transposed(
    name: str, weight: Tensor, config: ModelConfig, generator: torch.Generator
) -> None:
    """As `draw`, of transposed experts, and biases with which some gates pass their limit."""
    if weight.ndim == 3:
        weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    elif name.endswith("gate_up_proj_bias"):
        weight.normal_(0.0, 4.0, generator=generator)
    else:
        draw(name, weight, config, generator)


register_family(
    Family("gpt_oss", ("gpt_oss",), config_from_hf, GptOss, config_to_hf, draw=draw_transposed)
)
