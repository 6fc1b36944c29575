"""Reading and writing ``config.json`` files of DeepSeek-V4, with the keys of the released models or those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.deepseek_v4.config import (
    CSA,
    HASH_MOE,
    HCA,
    MODEL_TYPE,
    MOE,
    DeepseekV4Config,
    YarnConfig,
    layer_types_of,
)
from quire.models.hf_common import token_ids


def from_hf(config: Mapping[str, Any], *, name: str | None = None) -> DeepseekV4Config:
    """Reads a ``config.json``, with the keys of the released models or with those of transformers.

    config: the parsed file. name: what to call the model; default: its ``model_type``.

    Returns: DeepseekV4Config.
    Raises: NotImplementedError naming each feature that is not supported; ValueError for keys that are missing or contradict.
    Source: transformers ``configuration_deepseek_v4``; the config.json of the released models.
    """
    _refuse_unsupported(config)
    value = _HF_DEFAULTS | dict(config)
    num_layers = value["num_hidden_layers"]
    layer_types, num_mtp_layers = _layer_types(value, num_layers)
    rates = {CSA: 4, HCA: 128} | (value.get("compress_rates") or {})
    rates |= {kind: value[key] for kind, key in ((CSA, "compress_rate_csa"), (HCA, "compress_rate_hca")) if key in value}  # fmt: skip
    rope = _rope(value)
    return DeepseekV4Config(
        name=name or MODEL_TYPE,
        layer_types=layer_types,
        mlp_layer_types=_mlp_layer_types(value, num_layers),
        num_mtp_layers=num_mtp_layers,
        num_heads=value["num_attention_heads"],
        csa_ratio=rates[CSA],
        hca_ratio=rates[HCA],
        index_num_heads=value["index_n_heads"],
        num_experts=value.get("n_routed_experts", value.get("num_local_experts", 256)),
        moe_intermediate_size=value.get("moe_intermediate_size", 2048),
        eos_token_ids=token_ids(value["eos_token_id"]),
        **rope,
        **{key: value[key] for key in _SAME_NAME},
    )


def to_hf(config: DeepseekV4Config) -> dict[str, Any]:
    """The ``config.json`` of a model with transformers' keys.

    Returns: dict that :func:`from_hf` and transformers' ``AutoConfig`` read.
    """
    partial = {"partial_rotary_factor": config.rope_dim / config.head_dim}
    main = {"rope_type": "default", "rope_theta": config.rope_theta} | partial
    compress = {"rope_type": "default", "rope_theta": config.compress_rope_theta} | partial
    if config.yarn is not None:
        compress |= {"rope_type": "yarn", "attention_factor": 1.0} | vars(config.yarn)
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": config.num_layers,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "layer_types": list(config.layer_types),
        "mlp_layer_types": list(config.mlp_layer_types),
        "compress_rates": {CSA: config.csa_ratio, HCA: config.hca_ratio},
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 1,
        "index_n_heads": config.index_num_heads,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": config.moe_intermediate_size,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "partial_rotary_factor": config.rope_dim / config.head_dim,
        "rope_parameters": {"main": main, "compress": compress},
        "eos_token_id": list(config.eos_token_ids),
        "tie_word_embeddings": False,
    } | {key: getattr(config, key) for key in _SAME_NAME}


_SAME_NAME = (
    "vocab_size", "hidden_size", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window",
    "index_head_dim", "index_topk", "num_experts_per_tok", "routed_scaling_factor", "swiglu_limit",
    "max_position_embeddings", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "bos_token_id",
)  # fmt: skip
# What transformers 5.23 assumes where a file says nothing. The layer schedule is not among them: its default is no released
# model's.
_HF_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "num_experts_per_tok": 6, "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0, "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
}  # fmt: skip
_ONLY = {
    "model_type": (MODEL_TYPE,), "num_key_value_heads": (1,), "n_shared_experts": (1,), "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",), "norm_topk_prob": (True,), "attention_bias": (False,), "mlp_bias": (False,),
    "tie_word_embeddings": (False,), "n_group": (None, 1), "topk_group": (None, 1),
}  # fmt: skip


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    problems = [
        f"{key}: supported is {' or '.join(map(repr, known))}, got {config.get(key)!r}"
        for key, known in _ONLY.items()
        if (key in config or key == "model_type") and config.get(key) not in known
    ]
    quantization = config.get("quantization_config") or {}
    if quantization and quantization.get("quant_method") != "fp8":
        problems.append(f"quantization_config: supported is quant_method 'fp8', got {quantization}")
    if problems:
        raise NotImplementedError("; ".join(problems))


def _layer_types(value: Mapping[str, Any], num_layers: int) -> tuple[tuple[str, ...], int]:
    """Layer types of the trunk, and the number of drafter layers."""
    num_mtp_layers = value.get("num_nextn_predict_layers")
    if value.get("layer_types") is not None:
        return tuple(value["layer_types"][:num_layers]), num_mtp_layers or 0
    ratios = value.get("compress_ratios")
    if ratios is None:
        raise ValueError("layer_types: expected layer_types or compress_ratios, got neither")
    if len(ratios) < num_layers:
        raise ValueError(f"compress_ratios: expected at least {num_layers} numbers, got {len(ratios)}")  # fmt: skip
    drafters = ratios[num_layers:]
    if any(drafters) or num_mtp_layers not in (None, len(drafters)):
        raise ValueError(
            f"compress_ratios: expected a 0 for each of num_nextn_predict_layers={num_mtp_layers} "
            f"after {num_layers} layers, got {list(drafters)}"
        )
    return layer_types_of(ratios[:num_layers]), len(drafters)


def _mlp_layer_types(value: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    if value.get("mlp_layer_types") is not None:
        return tuple(value["mlp_layer_types"][:num_layers])
    num_hash_layers = min(value.get("num_hash_layers", 3), num_layers)
    return (HASH_MOE,) * num_hash_layers + (MOE,) * (num_layers - num_hash_layers)


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields rope_dim, rope_theta, compress_rope_theta and yarn: from nested or flat parameters."""
    nested = value.get("rope_parameters") or value.get("rope_scaling") or {}
    main = nested.get("main", {})
    compress = nested.get("compress", {}) if "main" in nested else nested
    partial = value.get("partial_rotary_factor", main.get("partial_rotary_factor"))
    rope_dim = value.get("qk_rope_head_dim")
    if rope_dim is None:
        rope_dim = int(value["head_dim"] * (64 / 512 if partial is None else partial))
    kind = compress.get("rope_type", compress.get("type", "default"))
    yarn = None
    if kind == "yarn":
        keys = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        yarn = YarnConfig(**{key: compress[key] for key in keys if key in compress})
    if kind not in ("default", "yarn") or compress.get("attention_factor", 1.0) != 1.0:
        raise NotImplementedError(
            f"rope_parameters: supported are 'default', and 'yarn' with attention_factor 1.0, got {dict(compress)}"
        )
    if main.get("rope_type", "default") != "default":
        raise NotImplementedError(f"rope_parameters: supported is a 'default' main RoPE, got {main}")  # fmt: skip
    # A flat rope_theta is the main one: only the nested form says what compressed layers use.
    compress_theta = compress.get("rope_theta") if "main" in nested else None
    return {
        "rope_dim": rope_dim,
        "rope_theta": main.get("rope_theta", value["rope_theta"]),
        "compress_rope_theta": compress_theta or value["compress_rope_theta"],
        "yarn": yarn,
    }
