"""bench.kernels on attention: named shapes, the float64 result, adapters of peers."""

import dataclasses

import pytest
import torch

from quire.bench.cases.attention import attention_rows
from quire.bench.cases.make import expect, make_problem
from quire.bench.cases.shapes import (
    TINY_SHAPES,
    Case,
    tiny_cases,
)
from quire.bench.common.bounds import bounding
from quire.bench.peers.peer import Peer, Unsupported
from quire.bench.peers.quire_calls import quire_calls
from quire.kernels.attention.api import AttentionCall
from tests.kernels.oracles import attention as reference
from tests.support.helpers import assert_equal_in_float64

CPU = torch.device("cpu")


def tiny(name, phase, context=37):
    return Case(TINY_SHAPES[name], phase, 2, context)


@pytest.mark.parametrize(
    "case",
    [c for c in tiny_cases() if c.shape.name in TINY_SHAPES],
    ids=lambda c: c.name.replace(" ", "-"),
)
def test_the_vectorised_oracle_is_the_one_with_loops(case):
    problem = make_problem(dataclasses.replace(case, context=37), CPU, torch.float32)
    case, lse = problem.case, problem.results["lse"].double()
    shared = {n: x for n, x in problem.shared.items() if n not in ("workspace", "num_decodes")}
    call = AttentionCall(**problem.each[0], **shared, lse=lse)
    exact, start = reference.attention(call), 0
    for seq, q_len in enumerate(case.q_lens):
        with bounding():
            rows, rows_lse = attention_rows(problem, seq, list(range(q_len)))
        part = slice(start, start + q_len)
        assert_equal_in_float64("rows", exact[part], rows)
        assert_equal_in_float64("lse", lse[:, part], rows_lse.T)
        start += q_len


def test_an_unread_page_is_an_error():
    """The budget is tight enough: a result over all keys but one tile is refused."""
    problem = make_problem(tiny("tiny/global", "decode", 640), CPU)
    expected = expect(problem)
    [call] = quire_calls(problem)
    assert expected.wrong(*call()) is None
    for skipped in range(0, 40, 8):
        # The keys of one page become those of another one that the sequence sees anyway.
        table = problem.shared["block_table"].clone()
        table[0, skipped] = table[0, (skipped + 1) % 40]
        broken = dataclasses.replace(problem, shared=problem.shared | {"block_table": table})
        assert "error" in expected.wrong(*quire_calls(broken)[0]())
    out = torch.full_like(problem.results["out"], float("nan"))
    assert expected.wrong(out) == "out: not finite"


def test_wrong_scales_are_found_and_peers_are_not_compared():
    problem = make_problem(tiny("tiny/local/fp8", "decode"), CPU)
    expected = expect(problem)
    for in_step in (False, True):
        [call] = quire_calls(problem, in_step=in_step)
        assert expected.wrong(*call()) is None
    [tensors] = problem.each
    tensors |= {"k_scale": tensors["v_scale"], "v_scale": tensors["k_scale"]}
    assert "error" in expected.wrong(*quire_calls(problem)[0]())
    with pytest.raises(Unsupported, match="e4m3 pages"):
        Peer("other", "1", "", lambda problem: []).calls(problem)
