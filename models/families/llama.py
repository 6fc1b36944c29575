"""Llama text models. Families that differ in a little derive from these classes.

Source: transformers ``modeling_llama``, ``configuration_llama``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quire.kernels import norm_rope

from ..config import fields
from ..config.fields import only, read_fields
from ..config.keys import TextKeys, common_keys, read_rope
from ..config.model import FULL, ModelConfig
from ..layers.attention import Attend
from ..layers.basic import MLP, Linear, RMSNorm, Stacked, WeightPlacement
from .decoder import Decoder, Rotary
from .registry import Family, register_family


@dataclass(frozen=True, kw_only=True)
class LlamaKeys(TextKeys):
    """Keys of a ``model_type`` "llama" file."""

    vocab_size: fields.VocabSize = 32000
    hidden_size: fields.Width = 4096
    intermediate_size: fields.Width = 11008
    num_hidden_layers: fields.NumLayers = 32
    num_attention_heads: fields.NumHeads = 32
    max_position_embeddings: fields.NumTokens = 2048
    eos_token_id: fields.TokenIds = 2
    bos_token_id: fields.TokenId | None = 1
    attention_bias: fields.Flag = False
    tie_word_embeddings: fields.Flag = False
    mlp_bias: only(False) = False
    hidden_act: only("silu") = "silu"

    def model_config(self, family: str, name: str) -> ModelConfig:
        """The configuration of a model of ``family``."""
        rope = read_rope(self.rope_keys(), 1e4, self.max_position_embeddings)
        return self.config(
            name=name,
            family=family,
            layer_types=(FULL,) * self.num_hidden_layers,
            sliding=None,
            full=self.attention(rope),
        )


def config_from_hf(text: Mapping[str, Any], name: str) -> ModelConfig:
    """Read config.json."""
    return read_fields(LlamaKeys, text).model_config("llama", name)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write config.json."""
    more = {"hidden_act": "silu", "mlp_bias": False}
    return common_keys(config, "LlamaForCausalLM") | more


class Attention(nn.Module):
    """Projections and RoPE around the attention operator of one layer.

    has_sinks: True if every head has a logit that joins the denominator of its softmax only.
    """

    has_sinks: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int, place: WeightPlacement) -> None:
        super().__init__()
        shape, size, bias = config.attention(layer), config.hidden_size, config.attention_bias
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.layer = layer
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.q_proj = Linear(size, q_size, place, bias=bias)
        self.k_proj = Linear(size, kv_size, place, bias=bias)
        self.v_proj = Linear(size, kv_size, place, bias=bias)
        self.o_proj = Linear(q_size, size, place, bias=bias, group=place.group)
        self.qkv = Stacked(self.q_proj, self.k_proj, self.v_proj)
        self.sinks = place.empty(shape.num_heads) if self.has_sinks else None

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Attention of x [num_tokens, hidden_size], projections included."""
        sinks = None if self.sinks is None else self.sinks.float()
        qkv, count = self.qkv(x).view(x.shape[0], -1, self.head_dim), self.num_kv_heads
        qk = self.rotated(qkv, rotary, attend.impl)
        q, k, v = qk[:, :-count], qk[:, -count:], qkv[:, -count:]
        out = attend(self.layer, q, k, v, sinks=sinks)
        return self.o_proj(out.flatten(1))

    def rotated(self, qkv: Tensor, rotary: Rotary, impl: str | None) -> Tensor:
        """Queries and keys after RoPE; qkv: [num_tokens, all heads, head_dim]."""
        return norm_rope(qkv, *rotary, num_kv_heads=self.num_kv_heads, impl=impl)


class DecoderLayer(nn.Module):
    """``attention`` and ``mlp`` branches of one layer, with a norm before each."""

    def __init__(
        self, config: ModelConfig, layer: int, place: WeightPlacement, attention: nn.Module,
        mlp: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind = config.layer_types[layer]
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)

    def forward(
        self, x: Tensor, residual: Tensor, rotary: Rotary, attend: Attend, norm: RMSNorm
    ) -> Tensor:
        """The residual stream after the layer and ``norm``, the one that comes next.

        x: [num_tokens, hidden_size], normed; residual: in that shape, updated in place.
        """
        impl = attend.impl
        x = self.self_attn(x, rotary, attend)
        x = self.post_attention_layernorm.after(x, residual, impl=impl)
        return norm.after(self.mlp(x, impl), residual, impl=impl)


class Llama(Decoder):
    """A Llama model; attention: class of a layer's attention branch, called as `Attention`."""

    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, config: ModelConfig, **placement: Any) -> None:
        super().__init__(config, **placement)
        self.layers = nn.ModuleList()
        for layer in range(config.num_layers):
            attention, mlp = self.attention(config, layer, self.place), self.mlp(config)
            self.layers.append(DecoderLayer(config, layer, self.place, attention, mlp))

    def mlp(self, config: ModelConfig) -> nn.Module:
        """The MLP branch of a layer, called with [num_tokens, hidden_size] and impl."""
        size, width, place = config.hidden_size, config.intermediate_size, self.place
        return MLP(size, width, place, activation="silu", group=place.group)


register_family(Family("llama", ("llama",), config_from_hf, Llama, config_to_hf))
