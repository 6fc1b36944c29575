"""What tells calls apart that are checked, or launched, in different ways."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

from .latent_pages import IndexPages, LatentPages

# Remembered checks; all are dropped when there are more.
LIMIT = 4096
# Arguments that hold a tensor and are described by it and by their ``format``.
PAGES = (LatentPages, IndexPages)
TENSORS = (Tensor, *PAGES)
HOST_VALUES = frozenset((int, float, bool))

_CHECKED: set[Hashable] = set()


def key(what: Hashable, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides of a call: all of its arguments but the addresses of tensors.

    Args:
        what: which function this is, and what else its launches depend on.
        arguments: of the call, by name.
    """
    # The most of what a cached call costs: one flat tuple, made and hashed once. What most
    # arguments are is told by their class.
    parts: list[Any] = [what]
    add = parts.append
    for value in arguments.values():
        if value is None:
            add(None)
            continue
        tensor, kind = value, value.__class__
        if kind is not Tensor:
            if kind in HOST_VALUES or not isinstance(value, TENSORS):
                add(kind)  # True is no 1
                add(value)
                continue
            if isinstance(value, PAGES):
                add(value.format)
                tensor = value.data
        add(tensor.shape)
        add(tensor.stride())
        add(tensor.dtype)
        index = tensor.get_device()
        add(index if index >= 0 else tensor.device)  # -1 is a CPU, and what has no storage
    return tuple(parts)


def check_once(check: Callable[..., None], arguments: dict[str, Any]) -> None:
    """``check(**arguments)``, unless a call like this one has passed it.

    Args:
        check: raises by sizes, strides, dtypes, devices and host values alone.
        arguments: of the call, by name.
    """
    found = key(check, arguments)
    try:
        if found in _CHECKED:
            return
    except TypeError:  # an argument that has no hash: the check refuses it
        check(**arguments)
        return
    check(**arguments)
    if len(_CHECKED) >= LIMIT:
        _CHECKED.clear()
    _CHECKED.add(found)
