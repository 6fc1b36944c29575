"""Writes models as Hugging Face checkpoints: ``config.json`` and safetensors files.

Benchmarks and tests read them back, and let transformers read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quire.models.config.hf_llama import SWIGLU
from quire.models.config.model import FULL, SLIDING, ModelConfig, RopeConfig
from quire.models.deepseek_v4.config import CSA, HCA, MODEL_TYPE, DeepseekV4Config
from quire.models.deepseek_v4.hf import SAME_NAME
from quire.models.loading.checkpoint import INDEX_FILE


def save_checkpoint(
    model: nn.Module, path: str | Path, *, max_shard_bytes: int = 5 * 2**30
) -> None:
    """Writes files that `load_model` and transformers' ``from_pretrained`` read.

    Args:
        model: of any family; of DeepSeek-V4 its drafters too, which transformers ignores.
        path: directory, made if absent.
        max_shard_bytes: a file closes before it would grow past this.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    dtype = str(model.dtype).removeprefix("torch.")
    (path / "config.json").write_text(
        json.dumps(to_hf(model.config) | {"dtype": dtype}, indent=2) + "\n"
    )
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, weight in model.named_parameters():
        num_bytes = weight.numel() * weight.element_size()
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        stored = name if name.startswith(("lm_head.", "mtp.")) else f"model.{name}"
        shards[-1][stored] = weight.detach()
        size += num_bytes
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (path / INDEX_FILE).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n"
    )


def to_hf(config: ModelConfig | DeepseekV4Config) -> dict[str, Any]:
    """The text-only ``config.json`` of a model, with every key that a reader could default wrongly.

    Returns:
        dict that `quire.models.config.hf.from_hf` and transformers' ``AutoConfig`` read.
    """
    if isinstance(config, DeepseekV4Config):
        return _deepseek_v4_to_hf(config)
    if config.family == "llama":
        return _llama_to_hf(config)
    if config.family == "gpt_oss":
        return _gpt_oss_to_hf(config)
    return _gemma_to_hf(config)


def _gemma_to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.sliding is not None
    out = _common(config) | {
        "architectures": [
            "Gemma3ForCausalLM" if config.family == "gemma3" else "Gemma4ForCausalLM"
        ],
        "model_type": f"{config.family}_text",
        "num_key_value_heads": config.sliding.num_kv_heads,
        "head_dim": config.sliding.head_dim,
        "sliding_window": config.sliding.sliding_window,
        "layer_types": list(config.layer_types),
        "rope_parameters": {
            SLIDING: _rope(config.sliding.rope),
            FULL: _rope(config.full.rope),
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


def _llama_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The file of a llama model."""
    return _common(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": config.full.num_kv_heads,
        "head_dim": config.full.head_dim,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": _rope(config.full.rope),
    }


def _gpt_oss_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The file of a gpt-oss model."""
    assert config.sliding is not None and config.moe is not None
    return (
        _common(config)
        | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "intermediate_size": config.moe.intermediate_size,
            "num_key_value_heads": config.full.num_kv_heads,
            "head_dim": config.full.head_dim,
            "hidden_act": "silu",
            "sliding_window": config.sliding.sliding_window,
            "layer_types": list(config.layer_types),
            "rope_parameters": _rope(config.full.rope),
            "num_local_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.top_k,
        }
        | SWIGLU
    )


def _deepseek_v4_to_hf(config: DeepseekV4Config) -> dict[str, Any]:
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
    } | {key: getattr(config, key) for key in SAME_NAME}


def _common(config: ModelConfig) -> dict[str, Any]:
    """Keys that every family writes alike."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.full.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "pad_token_id": 0,
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """The ``rope_parameters`` entry of ``rope``."""
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.base}
    if rope.kind == "proportional":
        out["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.factor != 1.0:
        out["factor"] = rope.factor
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    if rope.kind == "yarn":
        out |= {"beta_slow": rope.low, "beta_fast": rope.high, "truncate": rope.truncate}
        out["attention_factor"] = rope.amplitude
    if rope.original_max_positions is not None:
        out["original_max_position_embeddings"] = rope.original_max_positions
    return out
