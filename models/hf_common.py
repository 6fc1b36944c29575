"""What the readers and writers of ``config.json`` share: rotary embeddings, token ids, refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.models.configs import ModelConfig, RopeConfig

QUANTIZATIONS = ("fp8", "compressed-tensors", "mxfp4")
"""Values of ``quant_method`` that `models.weights` reads."""

_REQUIRED = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def read_rope(
    params: Mapping[str, Any], base: float, max_positions: int | None = None
) -> RopeConfig:
    """One entry of ``rope_parameters``.

    params: its keys, or those of the older ``rope_scaling`` with ``rope_theta`` beside them.
    base: rope_theta where the file has none. max_positions: ``max_position_embeddings``, what llama3 falls back to.

    Source: transformers ``modeling_rope_utils``.
    """
    kind = params.get("rope_type", params.get("type", "default"))
    theta = float(params.get("rope_theta", base))
    factor = float(params.get("factor") or 1.0)
    if absent := [key for key in _REQUIRED.get(kind, ()) if params.get(key) is None]:
        raise ValueError(f"rope_parameters: expected {absent} with rope_type {kind!r}")
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            factor=factor,
            original_max_positions=params.get("original_max_position_embeddings", max_positions),
            low=float(params["low_freq_factor"]),
            high=float(params["high_freq_factor"]),
        )
    if kind == "yarn":
        return RopeConfig(
            kind,
            theta,
            factor=factor,
            original_max_positions=params["original_max_position_embeddings"],
            low=float(params.get("beta_slow") or 1),
            high=float(params.get("beta_fast") or 32),
            truncate=params.get("truncate", True),
            amplitude=_yarn_amplitude(params, factor),
        )
    return RopeConfig(
        kind=kind,
        base=theta,
        factor=factor,
        partial_rotary_factor=float(params.get("partial_rotary_factor", 1.0)),
    )


def _yarn_amplitude(params: Mapping[str, Any], factor: float) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def amplitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    over, under = params.get("mscale"), params.get("mscale_all_dim")
    return amplitude(over) / amplitude(under) if over and under else amplitude(1.0)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
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


def common_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Name and special tokens of a model, as fields of ModelConfig."""
    return {
        "name": text["name"],
        "eos_token_ids": token_ids(text.get("eos_token_id")),
        "bos_token_id": text.get("bos_token_id"),
    }


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """The ids of a key that may hold one, several or none; raises ValueError for what is no id."""
    ids = tuple(value) if isinstance(value, Sequence) else () if value is None else (value,)
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"eos_token_id: expected an id or a list of ids, got {value!r}")
    return ids


def write_common(config: ModelConfig) -> dict[str, Any]:
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


def refuse(text: Mapping[str, Any], found: list[str], supported: str) -> None:
    """Raises NotImplementedError if ``found`` names anything, or weights are stored in a way that no reader knows."""
    quantization = text.get("quantization_config") or {}
    if quantization and quantization.get("quant_method") not in QUANTIZATIONS:
        found.append(
            f"quantization_config={quantization.get('quant_method')!r} (supported are {QUANTIZATIONS})"
        )
    for group in (quantization.get("config_groups") or {}).values():  # of compressed-tensors
        weights = group.get("weights") or {"type": "float", "num_bits": 8}
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            found.append(
                f"weights of type {weights.get('type')!r} with {weights.get('num_bits')} bits (supported is 'float' with 8)"
            )
    if found:
        raise NotImplementedError(
            f"config: supported are {supported}; this one has {', '.join(found)}"
        )
