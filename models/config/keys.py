"""Keys of ``config.json`` that several families share.

A key that a file leaves out has the value that transformers 5.23 gives it, because that is what the
file's author ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import fields
from .fields import only, read_fields
from .model import FULL, SLIDING, LayerTypes, ModelConfig, RopeConfig


@dataclass(frozen=True)
class WeightKeys:
    """Storage of a group of weights of compressed-tensors."""

    type: only("float") = None
    num_bits: only(8) = None


@dataclass(frozen=True)
class GroupKeys:
    """A group of weights of compressed-tensors."""

    weights: WeightKeys | None = None


@dataclass(frozen=True)
class QuantizationKeys:
    """The ``quantization_config`` of weights that `models.loading.weights` reads.

    Attributes:
        weight_block_size: rows and columns of a matrix that share a scale, where the file says so.
    """

    quant_method: only("fp8", "compressed-tensors", "mxfp4") = None
    config_groups: dict[str, GroupKeys] | None = None
    weight_block_size: tuple[fields.Width, ...] | None = None

    def __post_init__(self) -> None:
        block = self.weight_block_size
        if block is not None and (len(block) != 2 or any(size & (size - 1) for size in block)):
            raise NotImplementedError(
                f"weight_block_size: supported are two powers of two, got {list(block)}"
            )


# Keys that are fields of ModelConfig under the same name, in every family.
_SAME_NAME = (
    "vocab_size", "hidden_size", "max_position_embeddings", "rms_norm_eps", "bos_token_id",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TextKeys:
    """Keys of every family.

    Those without a default here have one in each family, that of transformers.
    """

    vocab_size: fields.VocabSize
    hidden_size: fields.Width
    intermediate_size: fields.Width
    num_hidden_layers: fields.NumLayers
    num_attention_heads: fields.NumHeads
    max_position_embeddings: fields.NumTokens
    rms_norm_eps: fields.Epsilon = 1e-6
    eos_token_id: fields.TokenIds = None
    bos_token_id: fields.TokenId | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: fields.Theta | None = None
    quantization_config: QuantizationKeys | None = None

    def common_fields(self) -> dict[str, Any]:
        """Fields of ModelConfig whose keys are the same in every family."""
        same = {name: getattr(self, name) for name in _SAME_NAME}
        return same | {"eos_token_ids": token_ids(self.eos_token_id)}

    def rope_keys(self) -> dict[str, Any]:
        """``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta``.

        Empty where the file has neither.
        """
        theta = {} if self.rope_theta is None else {"rope_theta": self.rope_theta}
        return theta | (self.rope_parameters or self.rope_scaling or {})


@dataclass(frozen=True, kw_only=True)
class LayeredKeys(TextKeys):
    """Keys of families with two kinds of layers."""

    layer_types: LayerTypes | None = None

    def layers(self, pattern: int) -> tuple[str, ...]:
        """``layer_types``, or every ``pattern``-th layer full where the file has none."""
        num_layers = self.num_hidden_layers
        if self.layer_types is None:
            return tuple(FULL if i % pattern == pattern - 1 else SLIDING for i in range(num_layers))
        if len(self.layer_types) != num_layers:
            raise ValueError(
                f"layer_types: expected num_hidden_layers={num_layers} entries, got "
                f"{len(self.layer_types)}"
            )
        return self.layer_types


@dataclass(frozen=True)
class RopeKeys:
    """One entry of ``rope_parameters``, or the older ``rope_scaling``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: fields.Theta = 1e4
    factor: fields.Factor | None = None
    partial_rotary_factor: fields.Share | None = None
    original_max_position_embeddings: fields.NumTokens | None = None
    low_freq_factor: fields.Positive | None = None
    high_freq_factor: fields.Positive | None = None
    beta_slow: fields.Positive | None = None
    beta_fast: fields.Positive | None = None
    truncate: fields.Flag = True
    attention_factor: fields.Positive | None = None
    mscale: fields.NotNegative | None = None
    mscale_all_dim: fields.NotNegative | None = None

    @property
    def kind(self) -> str:
        """The rope_type, under its newer or its older name."""
        return self.rope_type or self.type or "default"

    def config(self, max_positions: int | None = None) -> RopeConfig:
        """The RoPE of the keys; ValueError for keys that its kind needs and the file lacks.

        max_positions: default of ``original_max_position_embeddings`` of llama3.

        Source: transformers ``modeling_rope_utils``.
        """
        needed: dict[str, tuple[str, ...]] = {
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }
        if absent := [key for key in needed.get(self.kind, ()) if getattr(self, key) is None]:
            raise ValueError(f"rope_parameters: expected {absent} with rope_type {self.kind!r}")
        factor, trained = float(self.factor or 1.0), self.original_max_position_embeddings
        more: dict[str, Any] = {"partial_rotary_factor": float(self.partial_rotary_factor or 1.0)}
        if self.kind == "llama3":
            more = {
                "original_max_positions": trained or max_positions,
                "low": float(self.low_freq_factor),
                "high": float(self.high_freq_factor),
            }
        elif self.kind == "yarn":
            more = {
                "original_max_positions": trained,
                "low": float(self.beta_slow or 1),
                "high": float(self.beta_fast or 32),
                "truncate": self.truncate,
                "amplitude": self._amplitude(factor),
            }
        return RopeConfig(self.kind, float(self.rope_theta), factor=factor, **more)

    def _amplitude(self, factor: float) -> float:
        """Factor of cosine and sine of yarn."""
        if self.attention_factor is not None:
            return float(self.attention_factor)

        def amplitude(mscale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

        over, under = self.mscale, self.mscale_all_dim
        return amplitude(over) / amplitude(under) if over and under else amplitude(1.0)


def read_rope(
    params: Mapping[str, Any], base: float, max_positions: int | None = None
) -> RopeConfig:
    """One entry of ``rope_parameters``, or keys of the older ``rope_scaling`` and ``rope_theta``.

    base: rope_theta where the file has none; max_positions: as in `RopeKeys.config`.
    """
    keys = read_fields(RopeKeys, {"rope_theta": base} | params, "rope_parameters")
    return keys.config(max_positions)


def token_ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The ids of a key that may hold one, several or none."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


def common_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys that every family writes alike; the reverse of `TextKeys.common_fields`."""
    names = (*_SAME_NAME, "intermediate_size", "attention_bias", "tie_word_embeddings")
    return {name: getattr(config, name) for name in names} | {
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.full.num_heads,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": 0,
    }


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """The ``rope_parameters`` entry of a RoPE; the reverse of `read_rope`."""
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
