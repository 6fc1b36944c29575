"""Gemma-4: what its config.json files say. `models.families.gemma` has the model.

Source: transformers ``configuration_gemma4``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import fields
from ..config.fields import read_fields, read_object, shown
from ..config.keys import read_rope
from ..config.model import FULL, SLIDING, ModelConfig, MoEConfig
from .gemma import Gemma
from .gemma3 import GemmaKeys, keys_of_both
from .registry import Family, register_family


@dataclass(frozen=True, kw_only=True)
class LayerKeys:
    head_dim: fields.HeadSize | None = None
    num_key_value_heads: fields.NumHeads | None = None


@dataclass(frozen=True, kw_only=True)
class Gemma4Keys(GemmaKeys):
    vocab_size: fields.VocabSize = 262144
    num_hidden_layers: fields.NumLayers = 30
    sliding_window: fields.NumTokens = 512
    global_head_dim: fields.HeadSize = 512
    num_global_key_value_heads: fields.NumHeads | None = None
    attention_k_eq_v: fields.Flag = False
    per_layer_config: dict[str, dict[str, Any]] | None = None
    # Absent means width 256 in transformers: a file must say 0 to have no per-layer embeddings.
    hidden_size_per_layer_input: fields.WidthOrNone = 256
    vocab_size_per_layer_input: fields.ints(0, 2**24) = 262144
    num_kv_shared_layers: fields.NumShared = 0
    use_double_wide_mlp: fields.Flag = False
    enable_moe_block: fields.Flag = False
    num_experts: fields.NumExperts | None = None
    top_k_experts: fields.NumExperts | None = None
    moe_intermediate_size: fields.Width | None = None


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedKeys(Gemma4Keys):
    """Keys of the unified Gemma-4, whose layers get no embeddings of their own."""

    max_position_embeddings: fields.NumTokens = 262144
    sliding_window: fields.NumTokens = 1024


def config_from_hf(text: Mapping[str, Any], name: str) -> ModelConfig:
    unified = text.get("model_type") in UNIFIED
    keys = read_fields(Gemma4UnifiedKeys if unified else Gemma4Keys, text)
    given = keys.rope_parameters or {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    }
    if keys.rope_parameters and not (given.get(SLIDING) and given.get(FULL)):
        raise ValueError(f"rope_parameters: expected {SLIDING!r} and {FULL!r}, got {shown(given)}")
    # transformers forces the last one, so weights have the shapes of a full layer.
    layer_types = (*keys.layers(pattern=6)[:-1], FULL)
    shapes = keys.shapes(
        sliding=read_rope(read_object(given, SLIDING), 1e4),
        full=read_rope(read_object(given, FULL), 1e6),
    )
    shapes["full"] = replace(shapes["full"], **_full_shapes(keys, layer_types))
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
    return keys.config(
        **shapes,
        name=name,
        family="gemma4",
        layer_types=layer_types,
        query_pre_attn_scalar=1.0,  # the q and k norms carry the scale
        moe=moe,
        per_layer_input_size=width,
        double_wide_mlp=keys.use_double_wide_mlp,
    )


def _full_shapes(keys: Gemma4Keys, layer_types: Sequence[str]) -> dict[str, Any]:
    """head_dim, num_kv_heads and k_eq_v of the full layers.

    transformers saves ``per_layer_config`` instead of the keys of Hub files; since 5.24, with
    numbers of layers of one length ("05").
    """
    kv_heads, head_dim = keys.num_key_value_heads, keys.global_head_dim
    if keys.attention_k_eq_v:
        kv_heads = keys.num_global_key_value_heads or kv_heads
    if (per_layer := keys.per_layer_config) is not None:
        full_layers = {str(i) for i, kind in enumerate(layer_types) if kind == FULL}
        per_layer = {layer.lstrip("0") or "0": entry for layer, entry in per_layer.items()}
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


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return keys_of_both(config) | {
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


def weight_name(stored: str, config: ModelConfig) -> str | None:
    """Some repositories ship keys and values of layers that use another layer's: not read."""
    found = re.match(r"layers\.(\d{1,6})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.", stored)
    return None if found and int(found[1]) >= config.num_kv_owners else stored


_ASSISTANT = "a drafter, which reads the keys and values of a Gemma-4: give it as drafter"
UNIFIED = ("gemma4_unified", "gemma4_unified_text")
register_family(
    Family(
        "gemma4",
        ("gemma4_text", "gemma4", *UNIFIED),
        config_from_hf,
        Gemma,
        config_to_hf,
        weight_name=weight_name,
        refused=dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _ASSISTANT),
    )
)
