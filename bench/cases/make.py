"""The problem of a case and its expected result, whatever the operator."""

from __future__ import annotations

from typing import Any

import torch

from .attention import expect_attention, make_attention
from .index import expect_topk, make_index
from .latent import expect_latent_attention, make_latent_attention
from .problem import Problem
from .shapes import Case, LatentShape


def make_problem(
    case: Case,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    copies: int | None = None,
    seed: int = 0,
) -> Problem:
    """Random tensors for a case; on the device "meta" they have no values.

    Args:
        dtype: dtype of queries and plain pages.
        copies: calls that read different tensors; default: enough to exceed the L2 cache.
    """
    make = make_attention
    if isinstance(case.shape, LatentShape):
        make = make_index if case.shape.op == "index" else make_latent_attention
    return make(case, device, dtype, copies, seed)


def expect(problem: Problem) -> Any:
    """The expected result: an object with ``wrong(*result of a call)``, a message or None."""
    if not isinstance(problem.case.shape, LatentShape):
        return expect_attention(problem)
    is_index = problem.case.shape.op == "index"
    return expect_topk(problem) if is_index else expect_latent_attention(problem)
