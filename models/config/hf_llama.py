"""``config.json`` files of Llama and gpt-oss models; see `models.config.hf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import fields
from .fields import only, read_fields
from .hf_common import LayeredKeys, TextKeys, read_rope
from .named import FULL, AttentionConfig, ModelConfig, MoEConfig


@dataclass(frozen=True, kw_only=True)
class LlamaKeys(TextKeys):
    """Keys of a ``model_type`` "llama" file. Source: transformers ``configuration_llama``."""

    vocab_size: fields.VocabSize = 32000
    hidden_size: fields.Width = 4096
    intermediate_size: fields.Width = 11008
    num_hidden_layers: fields.NumLayers = 32
    num_attention_heads: fields.NumHeads = 32
    num_key_value_heads: fields.NumHeads | None = None
    head_dim: fields.HeadSize | None = None
    max_position_embeddings: fields.NumTokens = 2048
    eos_token_id: fields.TokenIds = 2
    bos_token_id: fields.TokenId | None = 1
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    mlp_bias: only(False) = False
    hidden_act: only("silu") = "silu"


def llama_from_hf(text: Mapping[str, Any], name: str) -> ModelConfig:
    """Reads a ``model_type`` "llama" file."""
    keys = read_fields(LlamaKeys, text)
    attention = AttentionConfig(
        num_heads=keys.num_attention_heads,
        num_kv_heads=keys.num_key_value_heads or keys.num_attention_heads,
        head_dim=keys.head_dim or keys.hidden_size // keys.num_attention_heads,
        rope=read_rope(_rope_keys(keys), 10000.0, keys.max_position_embeddings),
    )
    return ModelConfig(
        **keys.common_fields(),
        name=name,
        family="llama",
        intermediate_size=keys.intermediate_size,
        layer_types=(FULL,) * keys.num_hidden_layers,
        sliding=None,
        full=attention,
        attention_bias=keys.attention_bias,
        tie_word_embeddings=keys.tie_word_embeddings,
    )


SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Constants of the experts of gpt-oss; every released model has these."""


@dataclass(frozen=True, kw_only=True)
class GptOssKeys(LayeredKeys):
    """Keys of a ``model_type`` "gpt_oss" file. Source: transformers ``configuration_gpt_oss``."""

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
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    hidden_act: only("silu") = "silu"
    swiglu_limit: only(SWIGLU["swiglu_limit"]) = SWIGLU["swiglu_limit"]
    swiglu_alpha: only(SWIGLU["swiglu_alpha"]) = SWIGLU["swiglu_alpha"]


def gpt_oss_from_hf(text: Mapping[str, Any], name: str) -> ModelConfig:
    """Reads a ``model_type`` "gpt_oss" file."""
    keys = read_fields(GptOssKeys, text)
    released = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    full = AttentionConfig(
        num_heads=keys.num_attention_heads,
        num_kv_heads=keys.num_key_value_heads,
        head_dim=keys.head_dim or keys.hidden_size // keys.num_attention_heads,
        rope=read_rope(_rope_keys(keys) or released, 150000.0),
    )
    return ModelConfig(
        **keys.common_fields(),
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
        attention_bias=keys.attention_bias,
        tie_word_embeddings=keys.tie_word_embeddings,
    )


def _rope_keys(keys: TextKeys) -> dict[str, Any]:
    """``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta``.

    Empty where the file has neither.
    """
    theta = {} if keys.rope_theta is None else {"rope_theta": keys.rope_theta}
    return theta | (keys.rope_parameters or keys.rope_scaling or {})
