"""Llama text models. Families that differ in a little derive from `Llama`.

Source: transformers ``modeling_llama``, ``configuration_llama``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config import fields
from ..config.fields import only, read_fields
from ..config.keys import TextKeys, common_keys, read_rope
from ..config.model import FULL, ModelConfig
from ..layers.basic import MLP
from .decoder import Attention, Decoder, DecoderLayer
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
    return read_fields(LlamaKeys, text).model_config("llama", name)


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


register_family(Family("llama", ("llama",), config_from_hf, Llama, common_keys))
