"""Paged attention for full, sliding-window and latent layers, and the operators around it.

Public names are loaded on first use: importing this package imports neither torch nor Triton. An
operator is a file, or a folder whose ``api`` has the public functions. For all of them:

- The last stride of a tensor is 1 where nothing else is said; other strides are free.
- Tensors to fill share no memory with other arguments, and have no gradient.
- ``impl`` is "triton" (default for CUDA tensors) or "torch" (default for CPU tensors). No operator
  falls back to the other.
- A shape, dtype, stride, device or host value that is not as stated raises ValueError, and so does
  an id, a length or another value in a CPU tensor. Values in device memory are not checked.
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
    """Load the module that defines a public name when the name is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*globals(), *_HOME])
