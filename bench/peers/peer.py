"""An implementation that the benchmarks call, and how those of others are loaded."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cases.problem import Problem

Call = Callable[[], tuple[Tensor, ...]]
"""Compute one copy. Returns arguments of ``Expected.wrong``, for attention (out,) or (out, lse):
[num_tokens, num_heads, head_dim] and [num_heads, num_tokens] in natural log.
"""
V4_OPS = ("window", "csa", "hca")
ALL_OPS = ("attention", "mla", *V4_OPS, "index")


class Unsupported(Exception):
    """An implementation cannot run a case; the message is the reason."""


@dataclass(frozen=True)
class Peer:
    """An implementation.

    Attributes:
        name: short, for tables and ``--impl``.
        version: version of the package.
        note: differences of its work, or "".
        prepare: problem -> one call for each copy; raises Unsupported. Work that depends on lengths
            alone (plans, masks, contiguous copies of pages) is done here and is not timed.
        ops: operators that it is compared on (`Shape.op`).
        ours: whether a wrong result is a bug of this repository.
    """

    name: str
    version: str
    note: str
    prepare: Callable[[Problem], list[Call]]
    ops: tuple[str, ...] = ("attention",)
    ours: bool = False

    def calls(self, problem: Problem) -> list[Call]:
        """One call for each copy; raises Unsupported."""
        shape = problem.case.shape
        if not self.ours and shape.op == "attention" and shape.fp8:
            raise Unsupported("e4m3 pages with a scale for each row")
        return self.prepare(problem)


def unwritten(problem: Problem) -> Tensor:
    """A tensor for results [num_tokens, num_heads, head_dim_v], NaN until they are written."""
    return torch.full_like(problem.results["out"], float("nan"))


def import_package(folder: Path | None, name: str) -> Any:
    """Import a module, installed or in a folder of unpacked wheels; raises ImportError."""
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def load_operators(folder: Path | None, name: str) -> Any:
    """Load the library of operators ``name``.abi3.so that vLLM's wheel has.

    It is searched for in the folder and in an installed vLLM, which is not imported.
    """
    spec = importlib.util.find_spec("vllm")
    installed = [] if spec is None else spec.submodule_search_locations or []
    for place in [folder, *map(Path, installed)]:
        for path in sorted(place.rglob(f"{name}.abi3.so")) if place is not None else []:
            torch.ops.load_library(str(path))
            return getattr(torch.ops, name)
    raise FileNotFoundError(f"{name}.abi3.so: expected in --peers or an installed vLLM, got none")
