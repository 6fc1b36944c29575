"""JSON files of a model's directory: config.json, generation_config.json and others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..families.registry import family_of, family_of_type, refuse_type
from . import fields
from .fields import NUM_NAMED, checked, naming, read_fields, read_object, shown
from .keys import token_ids
from .model import ModelConfig

MAX_JSON = 2**25  # characters; an index of 50,000 tensors has 2**22


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
    """The text-only ``config.json`` of a model, for `from_hf` and transformers' ``AutoConfig``.

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


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError names one that is none, too large, or has a key twice."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_JSON + 1)
        if len(text) > MAX_JSON:
            raise ValueError(f"more than {MAX_JSON} characters")
        value = json.loads(text, object_pairs_hook=_object)
    except (ValueError, OSError) as error:
        raise ValueError(f"path: expected JSON in {str(path)!r}, got {error}") from None
    except (RecursionError, MemoryError) as error:
        raise ValueError(
            f"path: expected JSON of less depth and size in {str(path)!r}, got "
            f"{type(error).__name__}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"path: expected a JSON object in {str(path)!r}, got {shown(value)}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        doubled = sorted(shown(name) for name, count in counts.items() if count > 1)
        raise ValueError(f"keys twice: {', '.join(doubled[:NUM_NAMED])}")
    return value


@dataclass(frozen=True)
class GenerationKeys:
    """Keys of ``generation_config.json``; ``SamplingParams`` checks their numbers."""

    eos_token_id: fields.TokenIds = None
    do_sample: fields.Flag | None = None
    temperature: fields.NotNegative | None = None
    top_k: fields.ints(-1, 2**20) | None = None  # -1 = all, as 0
    top_p: fields.NotNegative | None = None
    min_p: fields.NotNegative | None = None
    repetition_penalty: fields.Positive | None = None


def read_generation_config(path: Path) -> dict[str, Any]:
    """The keys of ``generation_config.json`` that are not null, if any; raises as `load_config`."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    data = read_json(file)
    with naming(file):
        keys = vars(read_fields(GenerationKeys, data))
    return {key: value for key, value in keys.items() if value is not None}
