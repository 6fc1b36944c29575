"""Peers as a second, independent oracle: on the same tensors, every row of theirs and ours agrees, not only a sample."""

import os
from pathlib import Path

import pytest
import torch

from quire.bench.peers import Unsupported, find_peers, quire_calls
from quire.bench.problem import expect, make_problem
from quire.bench.shapes import SHAPES, TINY_SHAPES, Case
from tests.gpu.conftest import DRY_RUN
from tests.helpers import DEVICE

pytestmark = pytest.mark.gpu

FOLDER = os.environ.get("QUIRE_PEERS")
CASES = [
    Case(shape, phase, 3, 27 if DRY_RUN else 3001, 16)
    for shape in (TINY_SHAPES if DRY_RUN else SHAPES).values()
    for phase in ("decode", "prefill", "mixed")
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
    for fresh in (False, True):
        [ours] = quire_calls(problem, fresh=fresh, impl="triton")
        out, lse = ours()
        assert expected.wrong(out, lse) is None
        # Each may be off by the budget, on either side of the truth.
        assert (out.double() - other.double()).abs().max().item() <= 2 * expected.budget
