"""Common parts of the implementations in torch: no gradients, and values read once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P, R = ParamSpec("P"), TypeVar("R")
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
    key = [function]
    for arg in args:
        key.append(id(arg) if isinstance(arg, torch.Tensor) else arg)
    signature = tuple(key)
    if signature not in results:
        results[signature] = args, function(*args)  # args are kept, so that no id is given again
    return results[signature][1]


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.no_grad`` around a function; free where gradients are off already."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
