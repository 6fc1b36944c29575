"""Implementations in torch record no gradients, as kernels do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P, R = ParamSpec("P"), TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.no_grad`` around a function; free where gradients are off already."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
