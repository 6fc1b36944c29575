"""Header of a GGUF file: metadata, and where each tensor lies. Source: ggml's ``docs/gguf.md``.

Lengths are checked against the file and `MAX_HEADER` before they are used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_VERSIONS = (2, 3)
_MAX_DIMS = 4
MAX_HEADER = 2**25  # bytes; with a vocabulary of 2**18 it has 2**23


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: shape as in PyTorch, number of its type, place of its bytes.

    It has the methods of safetensors' slices that tell shape and dtype; it is read in float32.
    """

    shape: tuple[int, ...]
    type: int
    start: int
    num_bytes: int

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"


class Header:
    """A parsed header.

    Args:
        sizes: elements and bytes of a block, by number of the type; others are refused.

    Attributes:
        metadata: values by key, arrays of numbers as tuples, arrays of strings as their lengths.

    Raises:
        ValueError: no GGUF file, or a header that claims more than the file has.
        NotImplementedError: another version, or a type without ``sizes``.
    """

    def __init__(self, data: mmap.mmap, sizes: Mapping[int, tuple[int, int]]) -> None:
        self._data, self._at = data, 0
        if data[:4] != b"GGUF":
            raise ValueError("path: expected a GGUF file")
        self._at = 4
        if (version := self._number("I")) not in _VERSIONS:
            raise NotImplementedError(
                f"version: supported are {_VERSIONS} of GGUF, little-endian, got {version}"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            if (key := self._text()) in self.metadata:
                raise ValueError(f"path: expected every key once, got {key!r} again")
            self.metadata[key] = self._value(self._number("I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"path: expected an alignment above 0, got {alignment!r}")
        first = -(-self._at // alignment) * alignment
        self.tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in entries:
            if kind not in sizes:
                raise NotImplementedError(f"type {kind} of tensor {name!r} is not supported")
            block, block_bytes = sizes[kind]
            if not shape or shape[-1] % block or min(shape) < 1:
                raise ValueError(
                    f"path: expected rows of whole blocks of {block}, got {list(shape)} of {name!r}"
                )
            size = math.prod(shape) // block * block_bytes
            self._expect_room(first + offset, size, name, len(data))
            self.tensors[name] = StoredTensor(shape, kind, first + offset, size)

    def _expect_room(self, start: int, size: int, name: str, end: int) -> None:
        if start + size > end:
            raise ValueError(f"path: expected {size} bytes of {name} at {start}, got {end} in all")

    def _take(self, size: int, name: str) -> bytes:
        self._expect_room(self._at, size, name, min(MAX_HEADER, len(self._data)))
        self._at += size
        return self._data[self._at - size : self._at]

    def _number(self, code: str) -> Any:
        [value] = struct.unpack("<" + code, self._take(struct.calcsize("<" + code), "a number"))
        return value

    def _text(self) -> str:
        return self._take(self._number("Q"), "a text").decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"path: expected metadata of a type in 0..12, got {kind}")
        kind, length = self._number("I"), self._number("Q")
        if kind == _STRING:
            for _ in range(length):
                self._take(self._number("Q"), "a text")
            return length
        if kind not in _SCALARS:
            raise ValueError(f"path: expected arrays of numbers or texts, got type {kind}")
        data = self._take(struct.calcsize("<" + _SCALARS[kind]) * length, "an array")
        return struct.unpack(f"<{length}{_SCALARS[kind]}", data)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        if (num_dims := self._number("I")) > _MAX_DIMS:
            raise ValueError(
                f"path: expected at most {_MAX_DIMS} dimensions, got {num_dims} of {name!r}"
            )
        shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._number("I"), self._number("Q")
