"""The calls that ``bench.static`` compiles, a module for each part of a model."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from quire.kernels.common.arch import Arch

from ..launches import Launch, record

# Compiled by default: each tile shape for the first, the samples for the others.
DEFAULT_ARCH, SAMPLE_ARCHS = "sm_90", ("sm_80", "sm_100", "gfx942", "gfx950")


@dataclasses.dataclass(frozen=True)
class StaticCase:
    """One call of a public operator at one shape.

    Attributes:
        name: unique among all cases.
        call: makes the call over tensors on the device "meta", with ``impl="triton"``.
        dtype: a torch dtype by name, of the keys and values if there are any.
        key_bytes: bytes of a key and its value in the pages; 0: no kernel has tiles of keys. The
            constant BLOCK_N of a kernel that has them is the keys of a tile.
        sample: whether it is compiled for SAMPLE_ARCHS.
    """

    name: str
    call: Callable[[], object]
    dtype: str = "bfloat16"
    key_bytes: int = 0
    sample: bool = False


@functools.cache
def all_cases() -> dict[str, StaticCase]:
    """All cases of the modules of this package by name."""
    found: dict[str, StaticCase] = {}
    for module in pkgutil.iter_modules(__path__):
        for case in importlib.import_module(f"{__name__}.{module.name}").cases():
            if case.name in found:
                raise ValueError(f"name: expected one case of each name, got two of {case.name!r}")
            found[case.name] = case
    return found


def launches_of(case: StaticCase, arch: Arch) -> list[Launch]:
    """The launches of a case on an architecture."""
    return record(case.call, arch)


def meta(*shape: int, dtype: str = "bfloat16") -> Any:
    """A contiguous tensor without storage."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
