"""Hugging Face ``config.json`` files, read by the family that has their ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..families.registry import family_of, family_of_type, refuse_type
from .fields import checked, naming, read_object
from .files import read_generation_config, read_json
from .keys import token_ids
from .model import ModelConfig


def from_hf(config: Mapping[str, Any], *, name: str | None = None) -> ModelConfig:
    """Read a parsed ``config.json``, text-only or multimodal (``text_config``).

    Args:
        name: of the model; default: its ``model_type``.

    Raises:
        NotImplementedError: naming each feature of the file that is not supported.
        ValueError: keys of another type or range, or that contradict each other.
    """
    model_type = checked(str, "model_type", config.get("model_type", ""))
    refuse_type(model_type)
    text = dict(read_object(config, "text_config") or config)
    # These may stand at the top of a multimodal file, outside of its text_config.
    for key in ("eos_token_id", "bos_token_id", "quantization_config"):
        if key in config:
            text[key] = config[key]
    if "tie_word_embeddings" in config:
        text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    text["model_type"] = checked(str, "model_type", text.get("model_type", model_type))
    return family_of_type(text["model_type"]).config_from_hf(text, name or model_type)


def to_hf(config: Any) -> dict[str, Any]:
    """The text-only ``config.json`` of a model, as `from_hf` and transformers' ``AutoConfig`` read it.

    Raises:
        NotImplementedError: a family without ``config_to_hf``.
    """
    family = family_of(config)
    if family.config_to_hf is None:
        raise NotImplementedError(
            f"config_to_hf: the family {family.name!r} has none, its checkpoints are not written"
        )
    return {"model_type": family.model_types[0]} | family.config_to_hf(config)


def load_config(path: str | Path) -> ModelConfig:
    """Read ``config.json``, and the stop ids of ``generation_config.json`` where there is one.

    Raises:
        ValueError: naming file and key where one is no JSON or a key has another type or range.
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
