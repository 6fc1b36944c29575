"""Peers as a second, independent oracle: on the same tensors, every row of theirs and ours agrees, not only a sample."""

import os
from pathlib import Path

import pytest
import torch

from quire.bench.cases import latent_shapes
from quire.bench.cases.latent_problem import AttentionProblem
from quire.bench.cases.problem import expect, make_problem
from quire.bench.cases.shapes import SHAPES, TINY_SHAPES, Case
from quire.bench.kernels.families import family_of
from quire.bench.peers.attention import find_peers, quire_calls
from quire.bench.peers.latent import attention_calls, find_latent_peers, quire_latent_calls
from quire.bench.peers.peer import Unsupported
from tests.gpu.conftest import DRY_RUN
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.gpu

FOLDER = os.environ.get("QUIRE_PEERS")
CASES = [
    Case(shape, phase, 3, 27 if DRY_RUN else 3001, 16)
    for shape in (TINY_SHAPES if DRY_RUN else SHAPES).values()
    for phase in (("mixed",) if DRY_RUN else ("decode", "prefill", "mixed"))
]


@pytest.fixture(scope="module")
def peers():
    found, missing = find_peers(Path(FOLDER) if FOLDER else None)
    return {peer.name: peer for peer in found}, missing


# FlexAttention is left out: it would be compiled for each case.
@pytest.mark.parametrize("name", ["flashinfer", "fa3", "vllm-triton", "sdpa"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_peer_gives_the_same(name, case, peers):
    found, missing = peers
    if name not in found:
        pytest.skip(f"{name} is missing: {missing[name]}")
    problem = make_problem(case, torch.device(DEVICE), torch.bfloat16, copies=1)
    try:
        [theirs] = found[name].prepare(problem)
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


def latent_cases():
    """What peers can do; in a dry run everything tiny, and decode alone."""
    if DRY_RUN:
        tiny = [c for c in latent_shapes.tiny_cases() if c.fp8 or c.shape.head_dim < 512]
        return [c for c in tiny if c.phase == "decode"]
    names = ("v4-flash/csa", "v4-pro/csa", "v4-flash/csa/tp8", "v4-flash/hca", "v4-flash/sliding", "v3/mla")  # fmt: skip
    cases = [latent_shapes.case_of(name, "decode", 3, 6144) for name in names]
    return [*cases, latent_shapes.case_of("v4-flash/csa", "prefill", 1, 2048)]


LATENT_CASES = latent_cases()


@pytest.fixture(scope="module")
def latent_peers():
    found, missing = find_latent_peers(Path(FOLDER) if FOLDER else None)
    return {peer.name: peer for peer in found}, missing


def make_latents(case):
    problem = family_of(case).make(case, torch.device(DEVICE), 1)
    return problem, family_of(case).expect(problem)


@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_latent_kernels_are_right_at_the_shapes_that_are_measured(case):
    problem, expected = make_latents(case)
    several = [quire_latent_calls(problem, impl="triton")]
    if isinstance(problem, AttentionProblem):
        several.append(attention_calls(problem, in_step=True, impl="triton"))
    for [call] in several:
        assert expected.wrong(*call()) is None


@pytest.mark.parametrize("name", ["flashmla", "flashinfer-mla"])
@pytest.mark.parametrize(
    "case",
    [case for case in LATENT_CASES if case.shape.op in latent_shapes.ATTENTION],
    ids=lambda case: case.name.replace(" ", "-"),
)
def test_a_peer_gives_the_same_for_latents(name, case, latent_peers):
    found, missing = latent_peers
    if name not in found:
        pytest.skip(f"{name} is missing: {missing[name]}")
    problem, expected = make_latents(case)
    try:
        [theirs] = found[name].prepare(problem)
        [other] = theirs()
    except (Unsupported, NotImplementedError) as reason:
        pytest.skip(f"{name}: {reason}")
    assert expected.wrong(other) is None, f"{name} itself is wrong"
    [ours] = attention_calls(problem, in_step=False, impl="triton")
    out, lse = ours()
    assert expected.wrong(out, lse) is None
    assert ((out.double() - other.double())[expected.rows].abs() <= 2 * expected.budget).all()
