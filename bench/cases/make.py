"""The problem of a case and its expected result, whatever the operator."""

from __future__ import annotations

from typing import Any

import torch

from .attention import expect_attention, make_attention
from .latent import expect_latent_attention, make_latent_attention
from .latent_rows import expect_rows, expect_topk, make_index, make_rows
from .problem import Problem
from .shapes import Case, Shape

# Of latent shapes by operator; the others are attention.
MAKERS = {"index": make_index, "compress": make_rows, "write": make_rows}
EXPECTATIONS = {"index": expect_topk, "compress": expect_rows, "write": expect_rows}


def make_problem(
    case: Case,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    copies: int | None = None,
    seed: int = 0,
) -> Problem:
    """Random tensors for a case.

    Args:
        case: shape and batch.
        device: to make them on.
        dtype: of queries and plain K/V pages; latent cases are bf16.
        copies: calls that read different tensors; default: enough to exceed the L2 cache.
        seed: of the random numbers.
    """
    if isinstance(case.shape, Shape):
        return make_attention(case, device, dtype, copies, seed)
    return MAKERS.get(case.shape.op, make_latent_attention)(case, device, copies, seed)


def expect(problem: Problem) -> Any:
    """The expected result: an object with ``wrong(*result of a call)``, a message or None."""
    shape = problem.case.shape
    if isinstance(shape, Shape):
        return expect_attention(problem)
    return EXPECTATIONS.get(shape.op, expect_latent_attention)(problem)
