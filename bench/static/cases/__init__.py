"""The cases that ``bench.static`` compiles: one module a family of kernels, each with ``cases() -> list[StaticCase]``.

A new family is a new module here, with a case marked ``sample`` for each of its kernels. A kernel whose name ends in ``prefill_kernel``,
``decode_kernel`` or ``scores_kernel`` is held to the rules about copies and bytes in flight as well; its constant BLOCK_N is the keys of a tile.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from quire.kernels.common.arch import Arch

# Streaming multiprocessors of A100, RTX 3090, RTX 4090, H100, B200, RTX 5090; what torch counts of
# MI300X and MI355X.
NUM_SMS = {
    "sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170,
    "gfx942": 304, "gfx950": 256,
}  # fmt: skip
ARCHS = tuple(NUM_SMS)
# What is compiled unless asked otherwise: every tile shape for the first, the samples for the others.
DEFAULT_ARCH, SAMPLE_ARCHS = "sm_90", ("sm_80", "sm_100", "gfx942", "gfx950")
# Each table of tile shapes, and e4m3 with and without an instruction: sm_89 adds nothing to these.
ALL_ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
# Kernels that walk tiles of keys, by how their names end.
PIPELINED = ("prefill_kernel", "decode_kernel", "scores_kernel")


@dataclasses.dataclass(frozen=True)
class StaticCase:
    """What one call of a public function launches at one shape.

    name: unique among all cases.
    phase: "prefill", "decode", or what else the call does.
    launches: architecture -> the ``Launch`` values of the call, over tensors without storage (``meta``).
    dtype: of the keys and values, a torch dtype by name.
    key_bytes: what one key takes of the K/V tile, values included; 0 if no kernel of the case has such tiles.
    scale_bytes: what the scales of one quantised key take; they are not counted in key_bytes.
    min_copy_bytes: the narrowest copy of a K/V tile that the case may have.
    sample: whether it stands for its kernels on SAMPLE_ARCHS.
    operator: the public function that is called.
    head_dim: channels of its rows in the pages; of MLA those that are values too.
    pages: dtype of its pages, "uint8" for DeepSeek-V4's quantised rows; "" without pages.
    block_sizes: rows of its pages, of each kind that it reads or writes.
    """

    name: str
    phase: str
    launches: Callable[[Arch], list[Any]]
    dtype: str = "bfloat16"
    key_bytes: int = 0
    scale_bytes: int = 0
    min_copy_bytes: int = 16
    sample: bool = False
    operator: str = ""
    head_dim: int = 0
    pages: str = ""
    block_sizes: tuple[int, ...] = ()


@functools.cache
def all_cases() -> dict[str, StaticCase]:
    """Every case of every module of this package, by name; ValueError if two share a name."""
    found: dict[str, StaticCase] = {}
    for module in pkgutil.iter_modules(__path__):
        for case in importlib.import_module(f"{__name__}.{module.name}").cases():
            if case.name in found:
                raise ValueError(f"name: expected one case of each name, got two of {case.name!r}")
            found[case.name] = case
    return found


def launches_of(case: StaticCase, arch: Arch) -> list[Any]:
    """The launches of a case on an architecture."""
    return case.launches(arch)


def meta(*shape: int, dtype: str = "bfloat16") -> Any:
    """A contiguous tensor without storage."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
