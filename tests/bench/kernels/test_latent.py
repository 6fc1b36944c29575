"""bench.kernels on latent operators: shapes, float64 results, errors that are found, FlashMLA."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from quire.bench.cases.latent import latent_row
from quire.bench.cases.make import expect, make_problem
from quire.bench.cases.shapes import (
    LATENT_SHAPES,
    TINY_LATENT_SHAPES,
    Case,
    tiny_latent_cases,
)
from quire.bench.cases.work import case_bytes, case_flops
from quire.bench.common.bounds import bounding
from quire.bench.peers import flashmla
from quire.bench.peers.peer import Unsupported
from quire.bench.peers.quire_calls import quire_calls
from quire.kernels import flash_mla_with_kvcache, mla_attention
from tests.kernels.oracles import compressed_attention as oracle_compressed
from tests.kernels.oracles import indexer as oracle_indexer
from tests.kernels.oracles import mla_attention as oracle_mla
from tests.support.helpers import assert_equal_in_float64

CPU = torch.device("cpu")
ATTENTION = [case for case in tiny_latent_cases() if case.shape.op != "index"]


def named(case):
    return case.name.replace(" ", "-")


def tiny(name, phase="decode", context=40, copies=1):
    return make_problem(Case(TINY_LATENT_SHAPES[name], phase, 2, context), CPU, copies=copies)


@pytest.mark.parametrize("case", ATTENTION, ids=named)
def test_the_attention_oracle_is_the_one_with_loops(case):
    problem = make_problem(case, CPU, copies=1)
    oracle = oracle_compressed.compressed_attention
    if case.shape.op == "mla":
        oracle = oracle_mla.mla_attention
    lse = problem.results["lse"].double()
    left_out = ("workspace", "num_decodes", "max_seq_len")
    shared = {name: x for name, x in problem.shared.items() if name not in left_out}
    exact = oracle(**problem.each[0], **shared, lse=lse)
    q_len = case.q_lens[0]
    for token in range(0, case.num_tokens, 1 if case.phase == "decode" else 13):
        with bounding():
            out, out_lse = latent_row(problem, token // q_len, token % q_len)
        assert_equal_in_float64("out", exact[token], out[0])
        assert_equal_in_float64("lse", lse[:, token], out_lse[0])


@pytest.mark.parametrize("name", ["tiny/index", "tiny/index-bf16"])
def test_the_index_oracle_is_the_one_with_loops(name):
    problem = tiny(name)
    shape, tensors, shared = problem.case.shape, problem.each[0], problem.shared
    lengths = (shared["block_table"], shared["seq_lens"], shared["cu_seqlens_q"])
    exact = oracle_indexer.index_scores(
        tensors["q"], shared["weights"], tensors["pages"].data, shape.rows, *lengths,
        compress_ratio=shape.ratio,
    )  # fmt: skip
    expected = expect(problem)
    assert expected.tokens == [0, 1] and len(expected.scores[0]) == 10
    for scores, loops in zip(expected.scores, exact, strict=True):
        assert_equal_in_float64("scores", loops, scores)


@pytest.mark.parametrize("name", ["tiny/mla", "tiny/csa", "tiny/hca", "tiny/sliding"])
def test_a_page_that_is_not_read_is_an_error(name):
    problem = tiny(name, context=72)
    expected, shape = expect(problem), problem.case.shape
    assert expected.wrong(*quire_calls(problem)[0]()) is None
    tables = {"mla": "block_table", "window": "window_table"}
    field = tables.get(shape.op, "compressed_table")
    table, page = problem.shared[field].clone(), 0
    if shape.op == "window":
        page = 71 // shape.window_rows % table.shape[1]
    if shape.op == "csa":
        page = int(problem.each[0]["topk_indices"][0, 0]) // shape.rows
    # Its rows are read from its neighbour, which the sequence sees anyway.
    table[0, page] = table[0, (page + 1) % table.shape[1]]
    broken = dataclasses.replace(problem, shared=problem.shared | {field: table})
    assert "error" in expected.wrong(*quire_calls(broken)[0]())


def test_wrong_topk_indices_are_refused():
    problem = tiny("tiny/index-bf16")
    expected = expect(problem)
    indices, lens = quire_calls(problem)[0]()
    assert expected.wrong(indices, lens) is None
    worst, twice, unseen = indices.clone(), indices.clone(), indices.clone()
    worst[0, 0] = expected.scores[0].value.argmin()
    twice[1, 1] = twice[1, 0]
    unseen[0, 3] = 10
    assert "left out scores" in expected.wrong(worst, lens)
    assert "twice" in expected.wrong(twice, lens)
    assert "does not see" in expected.wrong(unseen, lens)
    assert "expected 4 of token 1, got 3" in expected.wrong(indices, lens - torch.tensor([0, 1]))


def fake_flashmla():
    """FlashMLA's operators, by functions of this repository that follow its conventions."""

    def sparse(q, cache, rows, lens, sinks, meta, splits, extra, extra_rows, *rest):
        _, dim, scale, *_ = rest
        assert q.shape[2] in (64, 128) and rows.shape[2] % 64 == 0
        out, lse = flash_mla_with_kvcache(
            q, cache, None, None, dim, softmax_scale=scale, is_fp8_kvcache=True, indices=rows,
            attn_sink=sinks, extra_k_cache=extra, extra_indices_in_kvcache=extra_rows,
        )  # fmt: skip
        return out, lse, "schedule", "splits"

    def dense(q, cache, dim, seq_lens, table, scale, causal, meta, splits, out):
        assert causal and q.shape[1] == 1 and cache.shape[2] == 1
        cu_seqlens_q = torch.arange(len(q) + 1, dtype=torch.int32)
        options = {"max_seqlen_q": 1, "softmax_scale": scale, "head_dim_v": dim}
        out = mla_attention(q[:, 0], cache[:, :, 0], table, seq_lens, cu_seqlens_q, **options)
        return out[:, None], None, "schedule", "splits"

    return SimpleNamespace(sparse_decode_fwd=sparse, dense_decode_fwd=dense)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["tiny-wide/csa", "tiny-wide/hca"])
def test_flashmla_is_given_what_it_takes(name, phase):
    problem = tiny(name, phase, context=12 if phase == "prefill" else 40, copies=2)
    calls = flashmla.sparse_calls(fake_flashmla(), problem)
    expected = expect(problem)
    assert len(calls) == 2
    assert expected.wrong(*calls[0]()) is None
    assert "error" in expected.wrong(*calls[1]())  # each copy is another problem


def test_flashmla_takes_dense_decodes_of_its_pages_only(monkeypatch):
    problem = tiny("tiny/mla")
    with pytest.raises(Unsupported, match="pages of 4 rows"):
        flashmla.dense_calls(fake_flashmla(), problem)
    monkeypatch.setattr(flashmla, "DENSE_ROWS", 4)
    [call] = flashmla.dense_calls(fake_flashmla(), problem)
    assert expect(problem).wrong(*call()) is None
    with pytest.raises(Unsupported, match="prefill"):
        flashmla.dense_calls(fake_flashmla(), tiny("tiny/mla", "prefill"))
    with pytest.raises(Unsupported, match="plain rows"):
        flashmla.sparse_calls(fake_flashmla(), tiny("tiny/csa"))


def test_bytes_and_operations_of_a_case():
    # 128 raw rows and 512 selected rows of 584 bytes; q and out; indices. Products over 640 keys.
    case = Case(LATENT_SHAPES["v4-flash/csa"], "decode", 16, 32768)
    assert case_bytes(case) == 16 * (640 * 584 + 2 * 64 * 512 * 2 + 4 * 512)
    assert case_flops(case) == 16 * 640 * 4 * 64 * 512
    assert LATENT_SHAPES["v4-flash/index"].shard(2) is None
    case = Case(LATENT_SHAPES["v4-flash/index"], "decode", 1, 32768)
    assert case_flops(case) == 2 * 8192 * 64 * 128
    case = Case(LATENT_SHAPES["v3/mla"], "decode", 1, 4096)
    assert case_bytes(case) == 4096 * 1152 + 128 * (576 + 512) * 2
    # A chunk at the start: query p sees p + 1 rows.
    case = Case(LATENT_SHAPES["v3/mla"], "prefill", 1, 4096)
    assert case_flops(case) == 2 * 128 * (576 + 512) * 4096 * 4097 // 2
