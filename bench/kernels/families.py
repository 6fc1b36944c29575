"""What `bench.kernels` has to know of a family of cases: its tensors, what a result has to be, its
work, who can do it.

A family is what one type of case belongs to; the flow (check, time, check again, rates, table) is
the same for all. A new family is an entry of ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cases.latent_problem import expect_attention, make_attention
from ..cases.latent_rows import expect_rows, expect_topk, make_index, make_rows
from ..cases.latent_shapes import LatentCase
from ..cases.problem import expect, make_problem
from ..cases.shapes import Case
from ..cases.work import attention_bytes, attention_flops, latent_bytes, latent_flops
from ..peers.attention import find_peers
from ..peers.latent import find_latent_peers
from ..peers.peer import Peer


@dataclass(frozen=True)
class Family:
    """Functions of a family's cases.

    Attributes:
        make: (case, device, copies or None) -> a problem: tensors, of which ``copies`` calls read
            different ones.
        expect: (problem) -> an object whose ``wrong(*result of a call)`` is a message or None.
        case_bytes, case_flops: (case) -> bytes that must move, and operations of what must be
            computed.
        find_peers: (folder or None) -> implementations, this repository's first, and {name: why} of
            those that are missing.
    """

    make: Callable[[Any, torch.device, int | None], Any]
    expect: Callable[[Any], Any]
    case_bytes: Callable[[Any], float]
    case_flops: Callable[[Any], float]
    find_peers: Callable[[Path | None], tuple[list[Peer], dict[str, str]]]


def _make_latents(case: LatentCase, device: torch.device, copies: int | None) -> Any:
    makers = {"index": make_index, "compress": make_rows, "write": make_rows}
    make = makers.get(case.shape.op, make_attention)
    return make(case, device, case_bytes=latent_bytes(case), copies=copies)


def _expect_latents(problem: Any) -> Any:
    expectations = {"index": expect_topk, "compress": expect_rows, "write": expect_rows}
    return expectations.get(problem.case.shape.op, expect_attention)(problem)


FAMILIES = {
    Case: Family(
        lambda case, device, copies: make_problem(case, device, torch.bfloat16, copies=copies),
        expect,
        attention_bytes,
        attention_flops,
        find_peers,
    ),
    LatentCase: Family(
        _make_latents,
        _expect_latents,
        latent_bytes,
        latent_flops,
        find_latent_peers,
    ),
}


def family_of(case: Any) -> Family:
    """The family of a case."""
    return FAMILIES[type(case)]
