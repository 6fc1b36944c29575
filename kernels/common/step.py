"""Values of a step's metadata that torch implementations read once for all layers of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

R = TypeVar("R")
_results: ContextVar[dict[Any, Any] | None] = ContextVar("results", default=None)


@contextmanager
def one_step() -> Iterator[None]:
    """Within it, the lengths, block tables and slots that operators are given do not change."""
    token = _results.set({})
    try:
        yield
    finally:
        _results.reset(token)


def once_a_step(function: Callable[..., R], *args: Any) -> R:
    """``function(*args)``, made once within ``one_step`` for the same tensors and equal values."""
    results = _results.get()
    if results is None:
        return function(*args)
    key = function, *(id(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    if key not in results:
        results[key] = args, function(*args)  # args are kept, so that no id is given again
    return results[key][1]
