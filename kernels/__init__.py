"""Paged attention for full and sliding-window layers: public names, loaded on first use.

Importing this package imports neither torch nor Triton. ``ops`` holds the public functions, ``reference`` their oracles,
``torch_impl`` the implementation for CPU tensors; ``paged``, ``paged_tiles``, ``merge``, ``cache_write`` and ``cache_write_e4m3`` hold
the Triton kernels. ``quant`` says what pages of e4m3 hold.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "merge_partials": "ops",
    "paged_attention": "ops",
    "sliding_window_attention": "ops",
    "workspace_numel": "ops",
    "write_kv": "ops",
}

__all__ = [
    "merge_partials",
    "paged_attention",
    "sliding_window_attention",
    "workspace_numel",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    """Load the module that defines a public name when the name is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*globals(), *_HOME])
