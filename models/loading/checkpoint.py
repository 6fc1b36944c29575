"""What the safetensors files of a Hugging Face directory hold, read from their headers: names, shapes, where each tensor is.

Source: tensor names of transformers 5.23 and of the older multimodal repositories; ``weight_scale_inv`` (fine-grained fp8),
``weight_scale`` (compressed-tensors), ``_blocks`` and ``_scales`` (mxfp4 of gpt-oss).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..config import fields
from ..config.fields import naming, read_fields, shown
from ..config.named import ModelConfig
from ..layers.basic import block_size

INDEX_FILE = "model.safetensors.index.json"
Key = TypeVar("Key", bound=Hashable)

# Text tensors have one of these prefixes, longest first; the rest of the name is the same in every repository.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# Towers of multimodal checkpoints, tables that old checkpoints carry, scales of activations.
_IGNORED = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|vision_embedder|embed_vision|embed_audio)\."
    r"|.*\.rotary_emb\.inv_freq$|.*\.(input|activation)_scale$"
)
# What safetensors calls dtypes, by what a tensor is for. fp8 scales of E8M0 are powers of two.
FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"
_FP8_SCALES = ("F32", "F16", "BF16", "F8_E8M0")
_MXFP4 = ("U8",)
MXFP4_BLOCK = 32  # weights that share a scale
NUM_NAMED = 20  # tensors that an error names


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its name there, shape, and safetensors' name of its dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} in {self.file.name}"

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
    """A JSON object; raises ValueError naming the file when it is not one, has a key twice, or is too deep or too large to read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (ValueError, OSError) as error:
        raise ValueError(f"path: expected JSON in {str(path)!r}, got {error}") from None
    except (RecursionError, MemoryError) as error:
        raise ValueError(
            f"path: expected JSON of less depth and size in {str(path)!r}, got {type(error).__name__}"
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
    """What is read of ``generation_config.json``. `quire.models.engine.request.SamplingParams` says which numbers it takes."""

    eos_token_id: fields.TokenIds = None
    do_sample: bool | None = None
    temperature: fields.NotNegative | None = None
    top_k: fields.WidthOrNone | None = None
    top_p: fields.NotNegative | None = None
    min_p: fields.NotNegative | None = None
    repetition_penalty: fields.Positive | None = None


def read_generation_config(path: Path) -> dict[str, Any]:
    """The declared keys of a directory's ``generation_config.json`` that are not null; empty where there is none.

    Raises: ValueError naming the file where it is no JSON, and the key where one has another type.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    data = read_json(file)
    with naming(file):
        keys = vars(read_fields(GenerationKeys, data))
    return {key: value for key, value in keys.items() if value is not None}


def read_headers(path: Path) -> list[Stored]:
    """Every tensor of a directory's files.

    Raises: ValueError naming files that are missing, cut off or unreadable, and tensors that the index puts in files which lack them.
    """
    from safetensors import SafetensorError, safe_open

    listed = weight_files(path)
    stored = []
    for name in listed:
        file = path / name
        try:
            with safe_open(file, framework="pt") as tensors:
                for tensor in tensors.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                    view = tensors.get_slice(tensor)
                    stored.append(Stored(file, tensor, tuple(view.get_shape()), view.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"path: expected a complete safetensors file, got {str(file)!r}: {error}"
            ) from None
    held = {(one.file.name, one.name) for one in stored}
    for name, tensors in listed.items():
        if absent := sorted(tensor for tensor in tensors if (name, tensor) not in held):
            raise ValueError(
                f"path: expected in {str(path / name)!r} what {INDEX_FILE} says is there, got none of {_some(absent)}"
            )
    return stored


def catalogue(path: Path, config: ModelConfig) -> dict[str, Stored]:
    """All tensors that the text model could want, by the name that it gives them. path: the directory; raises as `read_headers` and `unique`."""
    return unique(path, ((text_name(one.name, config), one) for one in read_headers(path)))


def unique(path: Path, named: Iterable[tuple[Key | None, Stored]]) -> dict[Key, Stored]:
    """Tensors by what they are for, those for nothing (None) left out; raises ValueError naming two that are for the same."""
    found: dict[Key, Stored] = {}
    doubled = []
    for key, stored in named:
        if key is not None and (first := found.setdefault(key, stored)) is not stored:
            doubled.append(f"{first} and {stored}")
    refuse_misfits(path, doubled=doubled)
    return found


def weight_files(path: Path) -> dict[str, list[str]]:
    """The names of the files in a directory, each with the tensors that the index puts there: of the index, or the only one.

    A file may be a link to another place, as in Hugging Face's cache; a name may not lead out of the directory.

    Raises: ValueError for an index that names no file or something else than a file of the directory, and naming files that do not exist.
    """
    files: dict[str, list[str]] = {"model.safetensors": []}
    if (path / INDEX_FILE).is_file():
        index = read_json(path / INDEX_FILE)
        with naming(path / INDEX_FILE):
            weight_map = read_fields(IndexKeys, index).weight_map
            files = {name: [] for name in sorted(set(weight_map.values()))}
            for name in files:
                if not re.fullmatch(r"[^/\\\0]{1,255}", name) or name in (".", ".."):
                    raise ValueError(f"weight_map: expected names of files in the directory, got {shown(name)}")  # fmt: skip
            if not files:
                raise ValueError("weight_map: expected a file, got none")
        for tensor, name in weight_map.items():
            files[name].append(tensor)
    absent = [name for name in files if not _is_file(path / name)]
    if absent:
        raise ValueError(f"path: expected the files {_some(absent)} in {str(path)!r}")
    return files


@dataclass(frozen=True)
class IndexKeys:
    """What is read of the index of shards: the file of each tensor."""

    weight_map: dict[str, str]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def text_name(stored: str, config: ModelConfig) -> str | None:
    """The model's name of a stored tensor; the stored name itself when no rule knows it; None = ignore."""
    if _IGNORED.match(stored):
        return None
    if stored.endswith("lm_head.weight"):
        return None if config.tie_word_embeddings else "lm_head.weight"
    prefix = next((p for p in _TEXT_PREFIXES if stored.startswith(p)), "")
    name = stored.removeprefix(prefix)
    # Some repositories ship keys and values of layers that use another layer's.
    shared = re.match(r"layers\.(\d{1,6})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.", name)
    return None if shared and int(shared[1]) >= config.num_kv_owners else name


def match(
    path: Path,
    found: Mapping[str, Stored],
    expected: Mapping[str, Sequence[int]],
    fp8_block: Sequence[int] | None = None,
) -> dict[str, Source]:
    """Where each parameter comes from.

    expected: {parameter: shape}. fp8_block: rows and columns of fp8 weights that share a scale; None = what the scales' shapes say.

    Raises: ValueError naming at once the tensors that are missing, unexpected, of another shape or dtype, or without their scales.
    """
    sources = {name: source for name in expected if (source := _source(found, name)) is not None}
    used = {s.name for source in sources.values() for s in (source.value, source.scale) if s}
    misshaped, mistyped, unscaled = [], [], []
    for name, source in sources.items():
        value, scale, want = source.value, source.scale, tuple(expected[name])
        value_dtypes, scale_dtypes = _DTYPES[source.kind]
        if source.kind == "mxfp4":  # stored by output channel, in blocks of 16 bytes
            experts, in_size, out_size = want
            want = (experts, out_size, in_size // MXFP4_BLOCK, MXFP4_BLOCK // 2)
        misshaped += differs(value, value.shape, want)
        mistyped += differs(value, value.dtype, value_dtypes)
        if scale is not None:
            mistyped += differs(scale, scale.dtype, scale_dtypes)
            if source.kind == "mxfp4":
                misshaped += differs(scale, scale.shape, want[:-1])
            elif not scale_fits(scale.shape, want, fp8_block):
                of = f"{list(want)} in blocks of {fp8_block or 'some size'}"
                misshaped.append(f"{scale.name} {list(scale.shape)} (expected scales of {of}) in {scale.file.name}")  # fmt: skip
        elif source.kind != "plain":
            unscaled.append(str(value))
    refuse_misfits(
        path,
        missing=[name for name in expected if name not in sources],
        unexpected=[str(stored) for stored in found.values() if stored.name not in used],
        misshaped=misshaped,
        mistyped=mistyped,
        unscaled=unscaled,
    )
    return sources


def scale_fits(scale: Sequence[int], weight: Sequence[int], block: Sequence[int] | None) -> bool:
    """Whether fp8 scales of one shape are those of weights of another, as `quire.models.layers.basic.dequantize` takes them."""
    if block is not None and len(weight) > 1:
        blocks = (-(-size // b) for size, b in zip(weight[-2:], block, strict=True))
        return tuple(scale) == (*weight[:-2], *blocks)
    if math.prod(scale) == 1 or len(scale) > len(weight):
        return len(scale) <= len(weight)
    return all(
        n in (1, size) or (0 < n < size and -(-size // block_size(size, n)) == n)
        for n, size in zip(scale, weight, strict=False)
    )


def refuse_misfits(path: Path, **misfits: Sequence[str]) -> None:
    """Raises ValueError if tensors of a directory do not fit, naming by what is wrong with them the first ones, and how many more."""
    problems = [f"{what} {_some(sorted(names))}" for what, names in misfits.items() if names]
    if problems:
        raise ValueError(
            f"path: tensors of {str(path)!r} do not fit its config.json: {'; '.join(problems)}"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"{list(names[:NUM_NAMED])}{more}"


def differs(stored: Stored, got: Any, expected: tuple[Any, ...]) -> list[str]:
    """That a tensor has another shape, or another dtype than these; nothing where it has not."""
    if got == expected or got in expected:
        return []
    got = list(got) if isinstance(got, tuple) else got
    return [f"{stored.name} {got} (expected {list(expected)}) in {stored.file.name}"]


def _source(found: Mapping[str, Stored], name: str) -> Source | None:
    """The tensors of a parameter; None where its values are missing."""
    if (blocks := found.get(f"{name}_blocks")) is not None:
        return Source(blocks, found.get(f"{name}_scales"), "mxfp4")
    value = found.get(name)
    if value is None or value.dtype != FP8:
        return value and Source(value)
    scale = found.get(f"{name}_scale_inv") or found.get(f"{name}_scale")
    return Source(value, scale, "fp8")


_DTYPES = {"plain": (FLOATS, ()), "fp8": ((FP8,), _FP8_SCALES), "mxfp4": (_MXFP4, _MXFP4)}
