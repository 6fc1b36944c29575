"""Peers as a second, independent oracle: every row of theirs and ours agrees, not only a sample."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from quire.bench.cases.expected import expect
from quire.bench.cases.problem import make_problem
from quire.bench.cases.shapes import (
    SHAPES,
    TINY_SHAPES,
    Case,
    case_of,
    main_cases,
    tiny_cases,
)
from quire.bench.peers.find import find_peers
from quire.bench.peers.peer import Unsupported
from quire.bench.peers.quire_calls import quire_calls
from tests.gpu.conftest import DRY_RUN
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.gpu

FOLDER = os.environ.get("QUIRE_PEERS")
CASES = [
    Case(dataclasses.replace(shape, rows=16), phase, 3, 27 if DRY_RUN else 3001)
    for shape in (TINY_SHAPES if DRY_RUN else SHAPES).values()
    for phase in (("mixed",) if DRY_RUN else ("decode", "prefill", "mixed"))
    if shape.op == "attention" and not shape.fp8
]


@pytest.fixture(scope="module")
def peers():
    found, missing = find_peers(Path(FOLDER) if FOLDER else None)
    return {peer.name: peer for peer in found}, missing


def latent_cases():
    """Cases that peers can run; in a dry run everything tiny, and decode alone."""
    if DRY_RUN:
        return [c for c in tiny_cases() if c.shape.op != "attention" and c.phase == "decode"]
    names = ["v4-flash/csa", "v4-pro/csa", "v4-flash/csa/tp8", "v4-flash/hca"]
    names += ["v4-flash/sliding", "v3/mla"]
    cases = [case_of(name, "decode", 3, 6144) for name in names]
    return [*cases, case_of("v4-flash/csa", "prefill", 1, 2048)]


def module_of(shape):
    """FlashInfer compiles a module for each of these, in a minute."""
    return shape.head_dim, shape.sliding_window is None


LATENT_CASES = latent_cases()
# The part "peers" of `bench.gpu` compiles the modules of the main cases.
COMPILED = {module_of(case.shape) for case in main_cases() if case.shape.op == "attention"}
COMPARED = [
    *[(name, case) for name in ("fa3", "vllm-triton", "sdpa") for case in CASES],
    *[("flashinfer", case) for case in CASES if DRY_RUN or module_of(case.shape) in COMPILED],
    *[
        (name, case)
        for name in ("flashmla", "flashinfer-mla")
        for case in LATENT_CASES
        if case.shape.op != "index"
    ],
]


def named(value):
    return value.name.replace(" ", "-") if isinstance(value, Case) else value


@pytest.mark.parametrize(("name", "case"), COMPARED, ids=named)
def test_a_peer_gives_the_same(name, case, peers):
    found, missing = peers
    if name not in found:
        pytest.skip(f"{name} is missing: {missing[name]}")
    problem = make_problem(case, torch.device(DEVICE), copies=1)
    try:
        [theirs] = found[name].calls(problem)
        [other] = theirs()
    except (Unsupported, NotImplementedError) as reason:
        pytest.skip(f"{name}: {reason}")
    expected = expect(problem)
    assert expected.wrong(other) is None, f"{name} itself is wrong"
    for in_step in (False, True):
        [ours] = quire_calls(problem, in_step=in_step, impl="triton")
        out, lse = ours()
        assert expected.wrong(out, lse) is None
        # Each may be off by the budget, on either side of the truth.
        assert ((out.double() - other.double())[expected.rows].abs() <= 2 * expected.budget).all()
