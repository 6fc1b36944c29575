"""JSON files of a model's directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import fields
from .fields import NUM_NAMED, naming, read_fields, shown


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: naming the file when it is not one, has a key twice, or is too deep or too
            large to read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
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
        names = [name for name, _ in pairs]
        doubled = sorted({shown(name) for name in value if names.count(name) > 1})
        raise ValueError(f"keys twice: {', '.join(doubled[:NUM_NAMED])}")
    return value


@dataclass(frozen=True)
class GenerationKeys:
    """Keys of ``generation_config.json``.

    `quire.models.engine.request.SamplingParams` says which numbers it takes.
    """

    eos_token_id: fields.TokenIds = None
    do_sample: fields.Flag | None = None
    temperature: fields.NotNegative | None = None
    top_k: fields.ints(-1, 2**20) | None = None  # -1 = all, as 0
    top_p: fields.NotNegative | None = None
    min_p: fields.NotNegative | None = None
    repetition_penalty: fields.Positive | None = None


def read_generation_config(path: Path) -> dict[str, Any]:
    """The declared keys of ``generation_config.json`` that are not null; empty where there is none.

    Raises:
        ValueError: naming the file where it is no JSON, and the key where one has another type.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    data = read_json(file)
    with naming(file):
        keys = vars(read_fields(GenerationKeys, data))
    return {key: value for key, value in keys.items() if value is not None}
