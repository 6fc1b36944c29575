"""What the safetensors files of a Hugging Face directory hold, read from their headers: names, shapes, where each tensor is.

Source: tensor names of transformers 5.23 and of the older multimodal repositories; ``weight_scale_inv`` (fine-grained fp8),
``weight_scale`` (compressed-tensors), ``_blocks`` and ``_scales`` (mxfp4 of gpt-oss).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.models.configs import ModelConfig

INDEX_FILE = "model.safetensors.index.json"

# Text tensors have one of these prefixes, longest first; the rest of the name is the same in every repository.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# Towers of multimodal checkpoints, tables that old checkpoints carry, scales of activations.
_IGNORED = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|vision_embedder|embed_vision|embed_audio)\."
    r"|.*\.rotary_emb\.inv_freq$|.*\.(input|activation)_scale$"
)
_FP8 = "F8_E4M3"
MXFP4_BLOCK = 32  # weights that share a scale
NUM_NAMED = 20  # tensors that an error names


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its name there, shape, and safetensors' name of its dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        """The tensor, on the CPU."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as tensors:
            return tensors.get_tensor(self.name)


@dataclass(frozen=True)
class Source:
    """What a parameter is made from: ``value`` as it is; with ``scale`` and kind "fp8" or "mxfp4", quantised weights."""

    value: Stored
    scale: Stored | None = None
    kind: str = "plain"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises ValueError naming the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"path: expected JSON in {str(path)!r}, got {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"path: expected a JSON object in {str(path)!r}")
    return value


def read_generation_config(path: Path) -> dict[str, Any]:
    """``generation_config.json`` of a directory; empty where there is none. Raises as `read_json`."""
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def read_headers(path: Path) -> list[Stored]:
    """Every tensor of a directory's files; raises ValueError naming files that are missing, cut off or unreadable."""
    from safetensors import SafetensorError, safe_open

    stored = []
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                    view = tensors.get_slice(name)
                    stored.append(Stored(file, name, tuple(view.get_shape()), view.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"path: expected a complete safetensors file, got {str(file)!r}: {error}"
            ) from None
    return stored


def catalogue(path: Path, config: ModelConfig) -> dict[str, Stored]:
    """All tensors that the text model could want, by the name that it gives them. path: the directory; raises as `read_headers`."""
    named = ((text_name(stored.name, config), stored) for stored in read_headers(path))
    return {name: stored for name, stored in named if name is not None}


def weight_files(path: Path) -> list[Path]:
    """The files that the index names, or the only one; raises ValueError naming those that do not exist."""
    if (path / INDEX_FILE).is_file():
        weight_map = read_json(path / INDEX_FILE).get("weight_map")
        names = (
            sorted({str(file) for file in weight_map.values()})
            if isinstance(weight_map, dict)
            else []
        )
        if not names:
            raise ValueError(f"path: expected a weight_map in {str(path / INDEX_FILE)!r}")
    else:
        names = ["model.safetensors"]
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise ValueError(f"path: expected the files {absent} in {str(path)!r}")
    return [path / name for name in names]


def text_name(stored: str, config: ModelConfig) -> str | None:
    """The model's name of a stored tensor; the stored name itself when no rule knows it; None = ignore."""
    if _IGNORED.match(stored):
        return None
    if stored.endswith("lm_head.weight"):
        return None if config.tie_word_embeddings else "lm_head.weight"
    prefix = next((p for p in _TEXT_PREFIXES if stored.startswith(p)), "")
    name = stored.removeprefix(prefix)
    # Some repositories ship keys and values of layers that use another layer's.
    shared = re.match(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.", name)
    return None if shared and int(shared[1]) >= config.num_kv_owners else name


def match(
    path: Path, found: Mapping[str, Stored], expected: Mapping[str, Sequence[int]]
) -> dict[str, Source]:
    """Where each parameter comes from.

    expected: {parameter: shape}.

    Raises: ValueError naming missing, unexpected and misshaped tensors at once.
    """
    sources: dict[str, Source] = {}
    missing, misshaped, used = [], [], set()
    for name, shape in expected.items():
        source = _source(found, name)
        if source is None:
            missing.append(name)
            continue
        used |= {s.name for s in (source.value, source.scale) if s is not None}
        want = list(shape)
        if source.kind == "mxfp4":  # stored by output channel, in blocks of 16 bytes
            experts, in_size, out_size = want
            want = [experts, out_size, in_size // MXFP4_BLOCK, MXFP4_BLOCK // 2]
        if list(source.value.shape) != want:
            misshaped.append(f"{name} {list(source.value.shape)} (expected {want})")
        sources[name] = source
    unexpected = [name for name, stored in found.items() if stored.name not in used]
    refuse_misfits(path, missing=missing, unexpected=unexpected, misshaped=misshaped)
    return sources


def refuse_misfits(path: Path, **misfits: Sequence[str]) -> None:
    """Raises ValueError if tensors of a directory do not fit, naming by what is wrong with them the first ones, and how many more."""
    problems = []
    for what, names in misfits.items():
        more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
        if names:
            problems.append(f"{what} {sorted(names)[:NUM_NAMED]}{more}")
    if problems:
        raise ValueError(
            f"path: tensors of {str(path)!r} do not fit its config.json: {'; '.join(problems)}"
        )


def _source(found: Mapping[str, Stored], name: str) -> Source | None:
    blocks, scales = found.get(f"{name}_blocks"), found.get(f"{name}_scales")
    if blocks is not None and scales is not None:
        return Source(blocks, scales, "mxfp4")
    value = found.get(name)
    if value is None or value.dtype != _FP8:
        return value and Source(value)
    scale = found.get(f"{name}_scale_inv") or found.get(f"{name}_scale")
    return scale and Source(value, scale, "fp8")
