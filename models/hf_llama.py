"""``config.json`` files of Llama and gpt-oss models; see `models.hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.configs import FULL, SLIDING, AttentionConfig, ModelConfig, MoEConfig
from quire.models.hf_common import common_fields, read_rope, refuse, write_common, write_rope


def llama_from_hf(text: Mapping[str, Any]) -> ModelConfig:
    """Reads a ``model_type`` "llama" file. Source: transformers ``configuration_llama``."""
    found = []
    if text.get("mlp_bias", False):
        found.append("mlp_bias=True")
    if (act := text.get("hidden_act", "silu")) != "silu":
        found.append(f"hidden_act={act!r}")
    refuse(text, found, "llama models with silu and without MLP biases")
    hidden = text.get("hidden_size", 4096)
    num_heads = text.get("num_attention_heads", 32)
    max_positions = text.get("max_position_embeddings", 2048)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=text.get("num_key_value_heads") or num_heads,
        head_dim=text.get("head_dim") or hidden // num_heads,
        rope=read_rope(_rope_keys(text), 10000.0, max_positions),
    )
    return ModelConfig(
        **common_fields({"eos_token_id": 2, "bos_token_id": 1} | dict(text)),
        family="llama",
        vocab_size=text.get("vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=text.get("intermediate_size", 11008),
        layer_types=(FULL,) * text.get("num_hidden_layers", 32),
        sliding=None,
        full=attention,
        max_position_embeddings=max_positions,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        attention_bias=text.get("attention_bias", False),
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )


def llama_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The file of a llama model."""
    return write_common(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": config.full.num_kv_heads,
        "head_dim": config.full.head_dim,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": write_rope(config.full.rope),
    }


SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Constants of the experts of gpt-oss; every released model has these."""


def gpt_oss_from_hf(text: Mapping[str, Any]) -> ModelConfig:
    """Reads a ``model_type`` "gpt_oss" file. Source: transformers ``configuration_gpt_oss``."""
    found = [f"{key}={text[key]}" for key, usual in SWIGLU.items() if text.get(key, usual) != usual]
    if (act := text.get("hidden_act", "silu")) != "silu":
        found.append(f"hidden_act={act!r}")
    refuse(text, found, f"gpt_oss models with silu and {SWIGLU}")
    hidden = text.get("hidden_size", 2880)
    num_heads = text.get("num_attention_heads", 64)
    num_layers = text.get("num_hidden_layers", 36)
    listed = text.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(num_layers)]
    if len(listed) != num_layers:
        raise ValueError(
            f"layer_types: expected num_hidden_layers={num_layers} entries, got {len(listed)}"
        )
    released = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    full = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=text.get("num_key_value_heads", 8),
        head_dim=text.get("head_dim", 64) or hidden // num_heads,
        rope=read_rope(_rope_keys(text) or released, 150000.0),
    )
    return ModelConfig(
        **common_fields(text),
        family="gpt_oss",
        vocab_size=text.get("vocab_size", 201088),
        hidden_size=hidden,
        intermediate_size=0,
        layer_types=tuple(listed),
        sliding=replace(full, sliding_window=text.get("sliding_window", 128)),
        full=full,
        max_position_embeddings=text.get("max_position_embeddings", 131072),
        rms_norm_eps=text.get("rms_norm_eps", 1e-5),
        moe=MoEConfig(
            num_experts=text.get("num_local_experts", text.get("num_experts", 128)),
            top_k=text.get("num_experts_per_tok", 4),
            intermediate_size=text.get("intermediate_size", 2880),
        ),
        attention_bias=text.get("attention_bias", True),
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )


def gpt_oss_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The file of a gpt-oss model."""
    assert config.sliding is not None and config.moe is not None
    return (
        write_common(config)
        | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "intermediate_size": config.moe.intermediate_size,
            "num_key_value_heads": config.full.num_kv_heads,
            "head_dim": config.full.head_dim,
            "hidden_act": "silu",
            "sliding_window": config.sliding.sliding_window,
            "layer_types": list(config.layer_types),
            "rope_parameters": write_rope(config.full.rope),
            "num_local_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.top_k,
        }
        | SWIGLU
    )


def _rope_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta``; empty where the file has neither."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    theta = {"rope_theta": text["rope_theta"]} if "rope_theta" in text else {}
    return theta | dict(given)
