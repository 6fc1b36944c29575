"""Cases of bench.kernels with e4m3 pages: tensors, oracle, bytes, and who is compared."""

import dataclasses

import pytest
import torch

from quire.bench.cases.problem import attention_rows, expect, make_problem
from quire.bench.cases.shapes import FP8_SHAPES, SHAPES, TINY_SHAPES, Case, all_cases, fp8_cases
from quire.bench.common.bounds import bounding
from quire.bench.kernels import __main__ as kernels
from quire.bench.peers.attention import quire_calls
from quire.bench.peers.peer import Peer
from quire.kernels.attention.call import AttentionCall
from tests.kernels.oracles import attention as reference
from tests.support.helpers import assert_equal_in_float64

CPU = torch.device("cpu")
SHAPE = TINY_SHAPES["tiny/local/fp8"]


@pytest.mark.parametrize("phase", ["decode", "mixed"])
def test_the_oracle_is_the_one_with_loops(phase):
    problem = make_problem(Case(SHAPE, phase, 2, 37, 16), CPU, torch.float32)
    lse = torch.empty(SHAPE.num_heads, problem.q.shape[1], dtype=torch.float64)
    call = AttentionCall(
        problem.q[0], problem.k_pages(0), problem.v_pages(0), problem.block_table, problem.seq_lens, problem.cu_seqlens_q,
        max_seqlen_q=max(problem.case.q_lens), softmax_scale=problem.softmax_scale, sinks=problem.sinks, sliding_window=SHAPE.sliding_window,
        lse=lse, **problem.row_scales(0),
    )  # fmt: skip
    exact = reference.attention(call, torch.float64)
    start = 0
    for seq, q_len in enumerate(problem.case.q_lens):
        with bounding():
            rows, rows_lse = attention_rows(problem, seq, list(range(q_len)), torch.float64)
        part = slice(start, start + q_len)
        assert_equal_in_float64("rows", exact[part], rows)
        assert_equal_in_float64("lse", lse[:, part], rows_lse.T)
        start += q_len


def test_wrong_scales_are_found_and_peers_are_not_compared():
    problem = make_problem(Case(SHAPE, "decode", 2, 37, 16), CPU, torch.bfloat16)
    expected = expect(problem)
    for in_step in (False, True):
        [call] = quire_calls(problem, in_step=in_step)
        assert expected.wrong(*call()) is None
    swapped = dataclasses.replace(problem, scales=problem.scales.flip(2))
    [call] = quire_calls(swapped, in_step=False)
    assert "error" in expected.wrong(*call())
    other = Peer("other", "1", "", lambda problem: [])
    with pytest.raises(kernels.Unsupported, match="e4m3 pages"):
        kernels._measure(other, problem, expected, CPU, 0.01)


def test_bytes_count_quantized_values_and_scales():
    for name, shape in FP8_SHAPES.items():
        plain = SHAPES[name.removesuffix("/fp8")]
        share = (shape.head_dim + 4) / (2 * shape.head_dim)
        assert shape.kv_token_bytes == share * plain.kv_token_bytes
    assert set(fp8_cases()) <= set(all_cases())
    assert {case.shape.name for case in fp8_cases()} == set(FP8_SHAPES)
