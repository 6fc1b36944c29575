"""Reading and writing Hugging Face ``config.json`` files.

A key that a file leaves out has the value that transformers 5.23 gives it, because that is what the file's author ran. This file
has the Gemma families; `models.hf_llama` those whose layers all have the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.models import hf_llama
from quire.models.configs import (
    FAMILIES,
    FULL,
    SLIDING,
    AttentionConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from quire.models.deepseek_v4.config import MODEL_TYPE as DEEPSEEK_V4
from quire.models.deepseek_v4.hf import from_hf as deepseek_v4_from_hf
from quire.models.hf_common import common_fields, read_rope, refuse, write_common, write_rope


def from_hf(config: Mapping[str, Any], *, name: str | None = None) -> ModelConfig:
    """Reads a Hugging Face ``config.json``, text-only or multimodal (``text_config``).

    config: the parsed file. name: what to call the model; default: its ``model_type``.

    Returns: ModelConfig.
    Raises: NotImplementedError naming each feature of the file that is not supported; ValueError for contradictions.
    Source: transformers ``configuration_*`` of each family.
    """
    if config.get("model_type") == DEEPSEEK_V4:
        return deepseek_v4_from_hf(config, name=name)
    text = dict(config.get("text_config") or config)
    model_type = str(config.get("model_type", ""))
    kind = str(text.get("model_type", model_type)).removesuffix("_text")
    family = "gemma4" if kind == "gemma4_unified" else kind
    if family not in FAMILIES:
        raise NotImplementedError(
            f"model_type: supported are {FAMILIES} and their _text forms, and {DEEPSEEK_V4!r}; got {kind!r}"
        )
    # These may stand at the top of a multimodal file, outside of its text_config.
    for key in ("eos_token_id", "bos_token_id", "quantization_config"):
        if key in config:
            text[key] = config[key]
    if "tie_word_embeddings" in config:
        text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    text["name"] = name or model_type
    if family == "llama":
        return hf_llama.llama_from_hf(text)
    if family == "gpt_oss":
        return hf_llama.gpt_oss_from_hf(text)
    return _gemma_from_hf(text, family, unified=kind == "gemma4_unified")


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The text-only ``config.json`` of a model, with every key that a reader could default wrongly.

    Returns: dict that ``from_hf`` and transformers' ``AutoConfig`` read.
    """
    if config.family == "llama":
        return hf_llama.llama_to_hf(config)
    if config.family == "gpt_oss":
        return hf_llama.gpt_oss_to_hf(config)
    return _gemma_to_hf(config)


def _gemma_from_hf(text: Mapping[str, Any], family: str, *, unified: bool) -> ModelConfig:
    _refuse_unsupported(text, family)
    defaults = _HF_DEFAULTS | _HF_FAMILY_DEFAULTS[family]
    if unified:
        defaults |= {"sliding_window": 1024, "max_position_embeddings": 262144}
    value = {key: text.get(key, default) for key, default in defaults.items()}
    layer_types = _layer_types(text, family, value["num_hidden_layers"])
    ropes = _ropes(text, family)
    sliding = AttentionConfig(
        num_heads=value["num_attention_heads"],
        num_kv_heads=value["num_key_value_heads"],
        head_dim=value["head_dim"],
        rope=ropes[SLIDING],
        sliding_window=value["sliding_window"],
    )
    full = replace(sliding, rope=ropes[FULL], sliding_window=None)
    if family == "gemma4":
        full = replace(full, **_gemma4_full_shapes(text, layer_types, sliding.num_kv_heads))
    return ModelConfig(
        **common_fields({"eos_token_id": 1, "bos_token_id": 2} | dict(text)),
        family=family,
        vocab_size=value["vocab_size"],
        hidden_size=value["hidden_size"],
        intermediate_size=value["intermediate_size"],
        layer_types=layer_types,
        sliding=sliding,
        full=full,
        max_position_embeddings=value["max_position_embeddings"],
        query_pre_attn_scalar=text.get("query_pre_attn_scalar", 256)
        if family == "gemma3"
        else None,
        final_logit_softcapping=text.get("final_logit_softcapping"),
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        **(_gemma4_extras(text, value["vocab_size"], unified) if family == "gemma4" else {}),
    )


def _gemma4_extras(text: Mapping[str, Any], vocab_size: int, unified: bool) -> dict[str, Any]:
    """Experts, per-layer embeddings and shared layers, which Gemma-3 does not have."""
    # An absent key means width 256 in transformers: a file must say 0 to have no per-layer embeddings.
    width = 0 if unified else text.get("hidden_size_per_layer_input", 256)
    table = text.get("vocab_size_per_layer_input", 262144)
    if width and table != vocab_size:
        raise NotImplementedError(
            f"vocab_size_per_layer_input: supported is vocab_size={vocab_size}, got {table}"
        )
    moe = None
    if text.get("enable_moe_block", False):
        keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
        if absent := [key for key in keys if not text.get(key)]:
            raise ValueError(f"enable_moe_block: expected {absent} beside it")
        moe = MoEConfig(*(text[key] for key in keys))
    return {
        "moe": moe,
        "per_layer_input_size": width,
        "num_kv_shared_layers": text.get("num_kv_shared_layers", 0),
        "double_wide_mlp": text.get("use_double_wide_mlp", False),
    }


def _gemma_to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.sliding is not None
    out = write_common(config) | {
        "architectures": [
            "Gemma3ForCausalLM" if config.family == "gemma3" else "Gemma4ForCausalLM"
        ],
        "model_type": f"{config.family}_text",
        "num_key_value_heads": config.sliding.num_kv_heads,
        "head_dim": config.sliding.head_dim,
        "sliding_window": config.sliding.sliding_window,
        "layer_types": list(config.layer_types),
        "rope_parameters": {
            SLIDING: write_rope(config.sliding.rope),
            FULL: write_rope(config.full.rope),
        },
        "final_logit_softcapping": config.final_logit_softcapping,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if config.family == "gemma3":
        return out | {
            "query_pre_attn_scalar": config.query_pre_attn_scalar,
            "attn_logit_softcapping": None,
        }
    return out | {
        "global_head_dim": config.full.head_dim,
        "num_global_key_value_heads": config.full.num_kv_heads,
        "attention_k_eq_v": config.full.k_eq_v,
        "hidden_size_per_layer_input": config.per_layer_input_size,
        "vocab_size_per_layer_input": config.vocab_size,
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "use_double_wide_mlp": config.double_wide_mlp,
        "enable_moe_block": config.moe is not None,
        "num_experts": config.moe and config.moe.num_experts,
        "top_k_experts": config.moe and config.moe.top_k,
        "moe_intermediate_size": config.moe and config.moe.intermediate_size,
    }


_HF_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
_HF_FAMILY_DEFAULTS = {
    "gemma3": {"vocab_size": 262208, "num_hidden_layers": 26, "sliding_window": 4096},
    "gemma4": {"vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512},
}


def _refuse_unsupported(text: Mapping[str, Any], family: str) -> None:
    """Raises one NotImplementedError that names every feature of the file which this runner lacks."""
    found = []
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        found.append(f"use_bidirectional_attention={text['use_bidirectional_attention']!r}")
    if text.get("attention_bias", False):
        found.append("attention_bias=True")
    if (act := text.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        found.append(f"hidden_activation={act!r}")
    # transformers stores this key for Gemma-3 but never applies it, so no reference says what it should do.
    if text.get("attn_logit_softcapping") is not None:
        found.append(f"attn_logit_softcapping={text['attn_logit_softcapping']}")
    if not text.get("tie_word_embeddings", True):
        found.append("tie_word_embeddings=False")
    refuse(
        text,
        found,
        f"{family} text models with causal attention, gelu_pytorch_tanh and tied embeddings",
    )


def _layer_types(text: Mapping[str, Any], family: str, num_layers: int) -> tuple[str, ...]:
    """The list of the file, or the pattern that transformers fills in."""
    listed = text.get("layer_types")
    if listed is None:
        # Hub files of Gemma-3 may carry the pattern as an int; Gemma-4 never reads one.
        pattern = 6
        if family == "gemma3":
            pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", 6))
        listed = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    if len(listed) != num_layers:
        raise ValueError(
            f"layer_types: expected num_hidden_layers={num_layers} entries, got {len(listed)}"
        )
    types = list(listed)
    if family == "gemma4":
        types[-1] = FULL  # transformers forces this, so weights have the shapes of a full layer
    return tuple(types)


def _ropes(text: Mapping[str, Any], family: str) -> dict[str, RopeConfig]:
    """RoPE of both kinds of layers, from ``rope_parameters`` or the three older Gemma-3 keys."""
    given = text.get("rope_parameters") or {}
    sliding = dict(given.get(SLIDING) or {})
    if family == "gemma4" and not given:
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    else:
        full = dict(given.get(FULL) or {})
    if family == "gemma4" and given and not (full and sliding):
        raise ValueError(f"rope_parameters: expected {SLIDING!r} and {FULL!r}, got {sorted(given)}")
    if family == "gemma3":
        full = full | (text.get("rope_scaling") or {})  # never applies to sliding layers
        full.setdefault("rope_theta", text.get("rope_theta", 1e6))
        sliding.setdefault("rope_theta", text.get("rope_local_base_freq", 1e4))
    return {SLIDING: read_rope(sliding, 1e4), FULL: read_rope(full, 1e6)}


def _gemma4_full_shapes(
    text: Mapping[str, Any], layer_types: Sequence[str], sliding_kv_heads: int
) -> dict[str, Any]:
    """head_dim, num_kv_heads and k_eq_v of the full layers.

    Hub files say ``global_head_dim`` and ``num_global_key_value_heads``; files that transformers 5.23 saved say
    ``per_layer_config`` = {layer: {key: value}} instead.
    """
    k_eq_v = bool(text.get("attention_k_eq_v", False))
    kv_heads = text.get("num_global_key_value_heads") if k_eq_v else None
    shapes = {
        "head_dim": text.get("global_head_dim", 512),
        "num_kv_heads": sliding_kv_heads if kv_heads is None else kv_heads,
        "k_eq_v": k_eq_v,
    }
    per_layer = text.get("per_layer_config")
    if per_layer is None:
        return shapes
    per_layer = {int(layer): dict(entry) for layer, entry in per_layer.items()}
    full_layers = {i for i, kind in enumerate(layer_types) if kind == FULL}
    entries = [per_layer.get(i, {}) for i in sorted(full_layers)]
    keys = {key for entry in per_layer.values() for key in entry}
    if (
        set(per_layer) - full_layers
        or any(entry != entries[0] for entry in entries)
        or keys - {"head_dim", "num_key_value_heads"}
    ):
        raise NotImplementedError(
            "per_layer_config: supported are head_dim and num_key_value_heads, the same in all full-attention layers; "
            f"got {per_layer}"
        )
    shapes["head_dim"] = entries[0].get("head_dim", text.get("head_dim", 256))
    shapes["num_kv_heads"] = entries[0].get("num_key_value_heads", sliding_kv_heads)
    return shapes
