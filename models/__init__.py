"""Text models on paged attention, their weights, and a continuous-batching runner.

Gemma-3, Gemma-4, Llama, gpt-oss and DeepSeek-V4.

The only package where the integers of ``kvcore`` and the tensors of ``kernels`` meet. Public names
load on first use.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

# The module of each public name. A stub, which editors and type checkers read, too.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {
    alias.name: f"{__name__}.{node.module}"
    for node in ast.parse(_STUB).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Load the module that defines a public name when the name is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted([*globals(), *_HOME])
