"""FlashInfer's adapter, whose calls are those of the runner, over its stand-in."""

import pytest
import torch

from quire.bench.cases.problem import expect, make_problem
from quire.bench.cases.shapes import Case, Shape
from quire.bench.peers.flashinfer import flashinfer_peer
from quire.bench.peers.peer import Unsupported
from tests.support import flashinfer_stand_in


@pytest.mark.parametrize("phase", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 24])
def test_the_adapter_gives_what_is_expected(phase, window, monkeypatch):
    flashinfer_stand_in.install(monkeypatch)
    case = Case(Shape("", 4, 2, 16, window, 0.3), phase, 2, 40, 16)
    problem = make_problem(case, torch.device("cpu"), torch.bfloat16, copies=1)
    peer = flashinfer_peer(None)
    assert peer.version == "stand-in"
    [call] = peer.prepare(problem)
    [out] = call()
    assert expect(problem).wrong(out) is None


def test_what_it_cannot_do_is_refused(monkeypatch):
    flashinfer_stand_in.install(monkeypatch)
    case = Case(Shape("", 4, 2, 16, 24, sinks=True), "decode", 2, 40, 16)
    problem = make_problem(case, torch.device("cpu"), torch.bfloat16, copies=1)
    with pytest.raises(Unsupported, match="sinks"):
        flashinfer_peer(None).prepare(problem)
