"""Gemma-3: what its config.json files say. `models.families.gemma` has the model.

Source: transformers ``configuration_gemma3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import fields
from ..config.fields import only, read_fields, read_object
from ..config.keys import LayeredKeys, common_keys, read_rope, write_rope
from ..config.model import FULL, SLIDING, AttentionConfig, ModelConfig, RopeConfig
from .gemma import Gemma
from .registry import Family, register_family


@dataclass(frozen=True, kw_only=True)
class GemmaKeys(LayeredKeys):
    hidden_size: fields.Width = 2304
    intermediate_size: fields.Width = 9216
    num_attention_heads: fields.NumHeads = 8
    num_key_value_heads: fields.NumHeads = 4
    head_dim: fields.HeadSize = 256
    max_position_embeddings: fields.NumTokens = 131072
    sliding_window: fields.NumTokens
    eos_token_id: fields.TokenIds = 1
    bos_token_id: fields.TokenId | None = 2
    final_logit_softcapping: fields.Positive | None = None
    attention_bias: only(False) = False
    hidden_activation: only("gelu_pytorch_tanh") = "gelu_pytorch_tanh"
    tie_word_embeddings: only(True) = True
    use_bidirectional_attention: only(None, False, "vision") = None

    def shapes(self, sliding: RopeConfig, full: RopeConfig) -> dict[str, AttentionConfig]:
        """Attention shapes of both kinds of layers, which may differ in their RoPE."""
        window = replace(self.attention(sliding), sliding_window=self.sliding_window)
        return {"sliding": window, "full": self.attention(full)}


def keys_of_both(config: ModelConfig) -> dict[str, Any]:
    ropes = {kind: write_rope(shape.rope) for kind, shape in config.shapes.items()}
    return common_keys(config) | {
        "rope_parameters": ropes,
        "final_logit_softcapping": config.final_logit_softcapping,
        "hidden_activation": "gelu_pytorch_tanh",
    }


@dataclass(frozen=True, kw_only=True)
class Gemma3Keys(GemmaKeys):
    vocab_size: fields.VocabSize = 262208
    num_hidden_layers: fields.NumLayers = 26
    sliding_window: fields.NumTokens = 4096
    query_pre_attn_scalar: fields.Positive = 256
    sliding_window_pattern: fields.NumLayers | None = None
    _sliding_window_pattern: fields.NumLayers = 6
    rope_theta: fields.Theta = 1e6
    rope_local_base_freq: fields.Theta = 1e4
    # transformers stores this key but never applies it, so no reference says what it should do.
    attn_logit_softcapping: only(None) = None


def config_from_hf(text: Mapping[str, Any], name: str) -> ModelConfig:
    keys = read_fields(Gemma3Keys, text)
    given = keys.rope_parameters or {}
    scaled = read_object(given, FULL) | (keys.rope_scaling or {})  # never applies to sliding layers
    return keys.config(
        **keys.shapes(
            sliding=read_rope(read_object(given, SLIDING), keys.rope_local_base_freq),
            full=read_rope(scaled, keys.rope_theta),
        ),
        name=name,
        family="gemma3",
        # Hub files may carry the pattern as an int.
        layer_types=keys.layers(keys.sliding_window_pattern or keys._sliding_window_pattern),
        norm_offset=1.0,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return keys_of_both(config) | {"query_pre_attn_scalar": config.query_pre_attn_scalar}


_GEMMA3N = "of Gemma-3n, AltUp streams, LAuReL blocks and activation sparsity are not supported"
register_family(
    Family(
        "gemma3",
        ("gemma3_text", "gemma3"),
        config_from_hf,
        Gemma,
        config_to_hf,
        refused=dict.fromkeys(("gemma3n", "gemma3n_text"), _GEMMA3N),
    )
)
