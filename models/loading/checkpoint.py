"""Headers of the safetensors files of a Hugging Face directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.fields import NUM_NAMED, naming, one_line, read_fields, shown
from ..config.hf import read_json
from .gguf import GGUF_FILE, GGUFFile

INDEX_FILE = "model.safetensors.index.json"
# dtypes as safetensors names them
FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"
_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")  # of weights, readable or not


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its name there, shape, and safetensors' name of its dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} in {self.file.name}"


def read_headers(path: Path) -> list[Stored]:
    """Every tensor of a directory's files.

    ValueError names files that are missing, cut off or unreadable, and tensors that they lack.
    """
    from safetensors import SafetensorError

    listed = weight_files(path)
    stored = []
    for name in listed:
        file = path / name
        try:
            with open_tensors(file) as tensors:
                for tensor in tensors.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                    view = tensors.get_slice(tensor)
                    stored.append(Stored(file, tensor, tuple(view.get_shape()), view.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"path: expected a complete safetensors file, got {str(file)!r}: {one_line(error)}"
            ) from None
    held = {(one.file.name, one.name) for one in stored}
    for name, tensors in listed.items():
        if absent := sorted(tensor for tensor in tensors if (name, tensor) not in held):
            raise ValueError(
                f"path: expected in {str(path / name)!r} what {INDEX_FILE} says is there, got "
                f"none of {_some(absent)}"
            )
    return stored


def open_tensors(file: Path) -> Any:
    """A file of tensors as safetensors' ``safe_open`` gives it, also a GGUF file."""
    from safetensors import safe_open

    return GGUFFile(file) if file.name == GGUF_FILE else safe_open(file, framework="pt")


def weight_files(path: Path) -> dict[str, list[str]]:
    """The files of a directory, each with the tensors that the index, if any, puts there.

    A file may be a link to another place, as in Hugging Face's cache; a name may not lead out.
    """
    if _is_file(path / GGUF_FILE):
        return {GGUF_FILE: []}
    files: dict[str, list[str]] = {"model.safetensors": []}
    if (path / INDEX_FILE).is_file():
        index = read_json(path / INDEX_FILE)
        with naming(path / INDEX_FILE):
            weight_map = read_fields(IndexKeys, index).weight_map
            files = {name: [] for name in sorted(set(weight_map.values()))}
            for name in files:
                if not re.fullmatch(r"[^/\\\0]{1,255}", name) or name in (".", ".."):
                    raise ValueError(
                        f"weight_map: expected names of files in the directory, got {shown(name)}"
                    )
            if not files:
                raise ValueError("weight_map: expected a file, got none")
        for tensor, name in weight_map.items():
            files[name].append(tensor)
    absent = [name for name in files if not _is_file(path / name)]
    if absent:
        there = sorted(file.name for file in path.glob("*") if file.suffix in _SUFFIXES)
        raise ValueError(
            f"path: expected the files {_some(absent)} in {str(path)!r}, got "
            f"{_some(there) if there else 'no weights'}"
        )
    return files


@dataclass(frozen=True)
class IndexKeys:
    weight_map: dict[str, str]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def refuse_misfits(path: Path, **misfits: Sequence[str]) -> None:
    """Raise ValueError for misfits, with the first names of each kind and how many more."""
    problems = [f"{what} {_some(sorted(names))}" for what, names in misfits.items() if names]
    if problems:
        raise ValueError(
            f"path: tensors of {str(path)!r} do not fit its config.json: "
            f"{one_line('; '.join(problems))}"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"{one_line(list(names[:NUM_NAMED]))}{more}"


def differs(stored: Stored, got: Any, expected: tuple[Any, ...]) -> list[str]:
    """The text of a tensor with another shape or dtype than expected, if it has."""
    if got == expected or got in expected:
        return []
    got = list(got) if isinstance(got, tuple) else got
    return [f"{stored.name} {got} (expected {list(expected)}) in {stored.file.name}"]
