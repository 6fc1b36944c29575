"""Calls of quire's operators."""

from __future__ import annotations

from typing import Any

import torch

from ..cases.problem import Problem
from .peer import Call


def quire_calls(problem: Problem, *, in_step: bool = False, impl: str | None = None) -> list[Call]:
    """One call for each copy; all write the same results.

    Args:
        in_step: hand over the step's own rows beside the pages.
        impl: as in ``quire.kernels``.
    """
    # Garbage where the operator has to write.
    results = {
        name: torch.full_like(empty, float("nan") if empty.is_floating_point() else -2)
        for name, empty in problem.results.items()
    }
    written, rest = tuple(results.values()), problem.shared | results | {"impl": impl}
    rows = problem.in_step if in_step else [{}] * problem.copies

    def call(arguments: dict[str, Any]) -> Call:
        def run() -> tuple[torch.Tensor, ...]:
            problem.operator(**arguments)
            return written

        return run

    return [call(rest | one | own) for one, own in zip(problem.each, rows, strict=True)]
