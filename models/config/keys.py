"""Keys of ``config.json`` that several families share.

A key that a file leaves out has the value that transformers 5.23 gives it, because that is what the
file's author ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

from . import fields
from .fields import only, read_fields
from .model import FULL, SLIDING, AttentionConfig, LayerTypes, ModelConfig, RopeConfig


@dataclass(frozen=True)
class WeightKeys:
    type: only("float") = None
    num_bits: only(8) = None


@dataclass(frozen=True)
class GroupKeys:
    weights: WeightKeys | None = None


@dataclass(frozen=True)
class QuantizationKeys:
    """``quantization_config``; weight_block_size: rows and columns that share a scale."""

    quant_method: only("fp8", "compressed-tensors", "mxfp4") = None
    config_groups: dict[str, GroupKeys] | None = None
    weight_block_size: tuple[fields.Width, ...] | None = None

    def __post_init__(self) -> None:
        block = self.weight_block_size
        if block is not None and (len(block) != 2 or any(size & (size - 1) for size in block)):
            raise NotImplementedError(
                f"weight_block_size: supported are two powers of two, got {list(block)}"
            )


@dataclass(frozen=True, kw_only=True)
class TextKeys:
    """Keys of every family; those without a default here have one in each family."""

    vocab_size: fields.VocabSize
    hidden_size: fields.Width
    intermediate_size: fields.Width
    num_hidden_layers: fields.NumLayers
    num_attention_heads: fields.NumHeads
    num_key_value_heads: fields.NumHeads | None = None
    head_dim: fields.HeadSize | None = None
    max_position_embeddings: fields.NumTokens
    rms_norm_eps: fields.Epsilon = 1e-6
    eos_token_id: fields.TokenIds = None
    bos_token_id: fields.TokenId | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: fields.Theta | None = None
    quantization_config: QuantizationKeys | None = None

    def config(self, **more: Any) -> ModelConfig:
        same = {f.name for f in fields_of(ModelConfig)} & {f.name for f in fields_of(self)}
        given = {name: getattr(self, name) for name in same}
        return ModelConfig(**given | {"eos_token_ids": token_ids(self.eos_token_id)} | more)

    def attention(self, rope: RopeConfig) -> AttentionConfig:
        return AttentionConfig(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            rope=rope,
        )

    def rope_keys(self) -> dict[str, Any]:
        """``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta``, if any."""
        theta = {} if self.rope_theta is None else {"rope_theta": self.rope_theta}
        return theta | (self.rope_parameters or self.rope_scaling or {})


@dataclass(frozen=True, kw_only=True)
class LayeredKeys(TextKeys):
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


def read_rope(
    params: Mapping[str, Any],
    theta: float,
    max_positions: int | None = None,
    name: str = "rope_parameters",
) -> RopeConfig:
    """One entry of ``rope_parameters``, or keys of the older ``rope_scaling`` and ``rope_theta``.

    theta, max_positions: default rope_theta, and original_max_position_embeddings of "llama3".
    name: of the entry, for errors.
    """
    given = {key: value for key, value in params.items() if value is not None}
    default: dict[str, Any] = {"rope_theta": theta, "rope_type": given.get("type", "default")}
    if given.get("rope_type", default["rope_type"]) == "llama3":
        default["original_max_position_embeddings"] = max_positions
    return read_fields(RopeConfig, default | given, name)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    default, always = RopeConfig(), ("rope_type", "rope_theta")
    return {k: v for k, v in vars(rope).items() if k in always or v != getattr(default, k)}


def token_ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The ids of a key that may hold one, several or none."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


def common_keys(config: ModelConfig) -> dict[str, Any]:
    """Keys that every family writes; the reverse of `TextKeys` and `LayeredKeys`."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings",
        "rms_norm_eps", "bos_token_id", "attention_bias", "tie_word_embeddings",
    )  # fmt: skip
    shape, keys = config.full, {name: getattr(config, name) for name in names}
    if config.sliding is not None:
        shape = config.sliding
        keys |= {"layer_types": list(config.layer_types), "sliding_window": shape.sliding_window}
    return keys | {
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rope_parameters": write_rope(config.full.rope),
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": 0,
    }
