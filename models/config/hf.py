"""Reading Hugging Face ``config.json`` files.

A key that a file leaves out has the value that transformers 5.23 gives it, because that is what the
file's author ran. This file has the Gemma families; `models.config.hf_llama` those whose layers all
have the same shapes. Types, ranges and defaults of keys are declared once each, as
`models.config.fields` has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..deepseek_v4.config import MODEL_TYPE as DEEPSEEK_V4
from ..deepseek_v4.hf import from_hf as deepseek_v4_from_hf
from . import fields, hf_llama
from .fields import checked, naming, only, read_fields, shown
from .files import read_generation_config, read_json
from .hf_common import LayeredKeys, read_rope, token_ids
from .named import FAMILIES, FULL, SLIDING, AttentionConfig, ModelConfig, MoEConfig, RopeConfig


def from_hf(config: Mapping[str, Any], *, name: str | None = None) -> ModelConfig:
    """Reads a Hugging Face ``config.json``, text-only or multimodal (``text_config``).

    Args:
        config: the parsed file.
        name: what to call the model; default: its ``model_type``.

    Returns:
        ModelConfig.

    Raises:
        NotImplementedError: naming each feature of the file that is not supported.
        ValueError: keys of another type or range, and for contradictions.

    Source: transformers ``configuration_*`` of each family.
    """
    model_type = checked(str, "model_type", config.get("model_type", ""))
    if model_type == DEEPSEEK_V4:
        return deepseek_v4_from_hf(config, name=name)
    text = dict(_object(config, "text_config") or config)
    kind = checked(str, "model_type", text.get("model_type", model_type)).removesuffix("_text")
    if kind not in (*FAMILIES, "gemma4_unified"):
        raise NotImplementedError(
            f"model_type: supported are {FAMILIES} and their _text forms, and {DEEPSEEK_V4!r}; "
            f"got {kind!r}"
        )
    # These may stand at the top of a multimodal file, outside of its text_config.
    for key in ("eos_token_id", "bos_token_id", "quantization_config"):
        if key in config:
            text[key] = config[key]
    if "tie_word_embeddings" in config:
        text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    name = name or model_type
    if kind == "llama":
        return hf_llama.llama_from_hf(text, name)
    if kind == "gpt_oss":
        return hf_llama.gpt_oss_from_hf(text, name)
    if kind == "gemma3":
        return _gemma3_from_hf(text, name)
    return _gemma4_from_hf(text, name, unified=kind == "gemma4_unified")


@dataclass(frozen=True, kw_only=True)
class GemmaKeys(LayeredKeys):
    """Keys of both Gemma families."""

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

    def model_fields(self, sliding: RopeConfig, full: RopeConfig) -> dict[str, Any]:
        """Fields of ModelConfig; full layers have the shapes of sliding ones.

        Args:
            sliding, full: RoPE of both kinds.
        """
        attention = AttentionConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rope=sliding,
            sliding_window=self.sliding_window,
        )
        return self.common_fields() | {
            "intermediate_size": self.intermediate_size,
            "sliding": attention,
            "full": replace(attention, rope=full, sliding_window=None),
            "final_logit_softcapping": self.final_logit_softcapping,
        }


@dataclass(frozen=True, kw_only=True)
class Gemma3Keys(GemmaKeys):
    """Keys of Gemma-3, older names among them."""

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


@dataclass(frozen=True, kw_only=True)
class LayerKeys:
    """What ``per_layer_config`` says of a layer."""

    head_dim: fields.HeadSize | None = None
    num_key_value_heads: fields.NumHeads | None = None


@dataclass(frozen=True, kw_only=True)
class Gemma4Keys(GemmaKeys):
    """Keys of Gemma-4."""

    vocab_size: fields.VocabSize = 262144
    num_hidden_layers: fields.NumLayers = 30
    sliding_window: fields.NumTokens = 512
    global_head_dim: fields.HeadSize = 512
    num_global_key_value_heads: fields.NumHeads | None = None
    attention_k_eq_v: bool = False
    per_layer_config: dict[str, dict[str, Any]] | None = None
    # Absent means width 256 in transformers: a file must say 0 to have no per-layer embeddings.
    hidden_size_per_layer_input: fields.WidthOrNone = 256
    vocab_size_per_layer_input: fields.VocabSize = 262144
    num_kv_shared_layers: fields.NumShared = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: fields.NumExperts | None = None
    top_k_experts: fields.NumExperts | None = None
    moe_intermediate_size: fields.Width | None = None


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedKeys(Gemma4Keys):
    """Keys of the unified Gemma-4, whose layers get no embeddings of their own."""

    max_position_embeddings: fields.NumTokens = 262144
    sliding_window: fields.NumTokens = 1024


def _gemma3_from_hf(text: Mapping[str, Any], name: str) -> ModelConfig:
    keys = read_fields(Gemma3Keys, text)
    given = keys.rope_parameters or {}
    scaled = _object(given, FULL) | (keys.rope_scaling or {})  # never applies to sliding layers
    return ModelConfig(
        **keys.model_fields(
            sliding=read_rope(_object(given, SLIDING), keys.rope_local_base_freq),
            full=read_rope(scaled, keys.rope_theta),
        ),
        name=name,
        family="gemma3",
        # Hub files may carry the pattern as an int.
        layer_types=keys.layers(keys.sliding_window_pattern or keys._sliding_window_pattern),
        query_pre_attn_scalar=keys.query_pre_attn_scalar,
    )


def _gemma4_from_hf(text: Mapping[str, Any], name: str, *, unified: bool) -> ModelConfig:
    keys = read_fields(Gemma4UnifiedKeys if unified else Gemma4Keys, text)
    given = keys.rope_parameters or {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    }
    if keys.rope_parameters and not (given.get(SLIDING) and given.get(FULL)):
        raise ValueError(f"rope_parameters: expected {SLIDING!r} and {FULL!r}, got {shown(given)}")
    # transformers forces the last one, so weights have the shapes of a full layer.
    layer_types = (*keys.layers(pattern=6)[:-1], FULL)
    shared = keys.model_fields(
        sliding=read_rope(_object(given, SLIDING), 1e4), full=read_rope(_object(given, FULL), 1e6)
    )
    shared["full"] = replace(shared["full"], **_gemma4_full_shapes(keys, layer_types))
    width, moe = 0 if unified else keys.hidden_size_per_layer_input, None
    if width and keys.vocab_size_per_layer_input != keys.vocab_size:
        raise NotImplementedError(
            f"vocab_size_per_layer_input: supported is vocab_size={keys.vocab_size}, got "
            f"{keys.vocab_size_per_layer_input}"
        )
    if keys.enable_moe_block:
        wanted = ("num_experts", "top_k_experts", "moe_intermediate_size")
        if absent := [key for key in wanted if getattr(keys, key) is None]:
            raise ValueError(f"enable_moe_block: expected {absent} beside it")
        moe = MoEConfig(*(getattr(keys, key) for key in wanted))
    return ModelConfig(
        **shared,
        name=name,
        family="gemma4",
        layer_types=layer_types,
        moe=moe,
        per_layer_input_size=width,
        num_kv_shared_layers=keys.num_kv_shared_layers,
        double_wide_mlp=keys.use_double_wide_mlp,
    )


def _object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within another; empty where there is none."""
    return checked(dict[str, Any] | None, key, data.get(key)) or {}


def _gemma4_full_shapes(keys: Gemma4Keys, layer_types: Sequence[str]) -> dict[str, Any]:
    """head_dim, num_kv_heads and k_eq_v of the full layers.

    Hub files say ``global_head_dim`` and ``num_global_key_value_heads``; files that transformers
    5.23 saved say ``per_layer_config`` = {layer: {key: value}} instead.
    """
    kv_heads, head_dim = keys.num_key_value_heads, keys.global_head_dim
    if keys.attention_k_eq_v:
        kv_heads = keys.num_global_key_value_heads or kv_heads
    if (per_layer := keys.per_layer_config) is not None:
        full_layers = {str(i) for i, kind in enumerate(layer_types) if kind == FULL}
        entries = [per_layer.get(i, {}) for i in full_layers]
        known = {"head_dim", "num_key_value_heads"}
        if (
            set(per_layer) - full_layers
            or any(entry != entries[0] for entry in entries)
            or set(entries[0]) - known
        ):
            raise NotImplementedError(
                f"per_layer_config: supported are {sorted(known)}, the same in all layers that "
                f"layer_types calls full; got {shown(per_layer)}"
            )
        layer = read_fields(LayerKeys, entries[0], "per_layer_config")
        head_dim = layer.head_dim or keys.head_dim
        kv_heads = layer.num_key_value_heads or keys.num_key_value_heads
    return {"head_dim": head_dim, "num_kv_heads": kv_heads, "k_eq_v": keys.attention_k_eq_v}


def load_config(path: str | Path) -> ModelConfig:
    """Reads ``config.json``, and the stop ids of ``generation_config.json`` where there is one.

    Raises:
        ValueError: there is no config.json, or naming file and key where one is no JSON or a key
            has another type or range.
        NotImplementedError: unsupported models.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"path: expected a directory with a config.json, got {str(path)!r}")
    data = read_json(path / "config.json")
    with naming(path / "config.json"):
        config = from_hf(data, name=path.name)
    eos = read_generation_config(path).get("eos_token_id")
    if eos is None:
        return config
    with naming(path / "generation_config.json"):
        return replace(config, eos_token_ids=token_ids(eos))
