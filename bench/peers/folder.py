"""Packages of others: installed, or unpacked wheels in a folder for a machine that cannot install."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch


def import_package(folder: Path | None, name: str) -> Any:
    """Import a module, installed or of the folder; raises ImportError."""
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def load_operators(folder: Path | None, name: str) -> Any:
    """Load the library of operators ``name``.abi3.so that vLLM's wheel has.

    It is searched for in the folder and in an installed vLLM, which is not imported.

    Raises:
        FileNotFoundError: no such library; OSError: it cannot be loaded.
    """
    spec = importlib.util.find_spec("vllm")
    installed = [] if spec is None else spec.submodule_search_locations or []
    for place in [folder, *map(Path, installed)]:
        for path in sorted(place.rglob(f"{name}.abi3.so")) if place is not None else []:
            torch.ops.load_library(str(path))
            return getattr(torch.ops, name)
    raise FileNotFoundError(f"{name}.abi3.so: expected in --peers or an installed vLLM, got none")
