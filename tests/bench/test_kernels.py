"""bench.kernels: float64 results, errors that are found, operations, FlashMLA; nothing wrong is timed."""

import dataclasses
import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from triton import language as tl

from quire.bench.cases.expected import attention_row, expect
from quire.bench.cases.problem import make_problem
from quire.bench.cases.shapes import SHAPES, TINY_SHAPES, Case, tiny_cases
from quire.bench.common import timing
from quire.bench.common.floors import Rates
from quire.bench.common.timing import time_calls
from quire.bench.kernels import __main__ as kernels
from quire.bench.peers import flashmla, vllm_triton
from quire.bench.peers.find import find_peers
from quire.bench.peers.peer import ALL_OPS, Peer, Unsupported
from quire.bench.peers.quire_calls import quire_calls
from quire.kernels import flash_mla_with_kvcache, mla_attention
from quire.kernels.attention.api import AttentionCall
from tests.kernels.oracles import attention, compressed_attention, indexer
from tests.kernels.oracles import mla_attention as oracle_mla
from tests.support.helpers import assert_equal_in_float64

CPU = torch.device("cpu")


def named(value):
    return value.name.replace(" ", "-") if isinstance(value, Case) else value


def tiny(name, phase="decode", context=40, copies=1):
    return make_problem(Case(TINY_SHAPES[name], phase, 2, context), CPU, copies=copies)


ATTENTION = [case for case in tiny_cases() if case.shape.op != "index"]


@pytest.mark.parametrize("case", ATTENTION, ids=named)
def test_attention_is_that_of_oracles_with_loops(case):
    dtype = torch.float32 if case.shape.op == "attention" else torch.bfloat16
    problem = make_problem(dataclasses.replace(case, context=37), CPU, dtype, copies=1)
    case, lse = problem.case, problem.results["lse"].double()
    arguments = problem.shared | problem.each[0]
    del arguments["num_decodes"]
    if case.shape.op == "attention":
        exact = attention.attention(AttentionCall(**arguments, lse=lse))
    else:
        del arguments["max_seq_len"]
        is_mla = case.shape.op == "mla"
        oracle = oracle_mla.mla_attention if is_mla else compressed_attention.compressed_attention
        exact = oracle(**arguments, lse=lse)
    tokens = [(seq, row) for seq, q_len in enumerate(case.q_lens) for row in range(q_len)]
    for token, (seq, row) in list(enumerate(tokens))[:: 1 if case.phase == "decode" else 7]:
        out, out_lse = attention_row(problem, seq, row, torch.float32)
        assert_equal_in_float64("out", exact[token], out)
        assert_equal_in_float64("lse", lse[:, token], out_lse)


@pytest.mark.parametrize("name", ["tiny/index", "tiny/index-bf16"])
def test_index_scores_are_those_of_the_oracle_with_loops(name):
    problem = tiny(name)
    shape, tensors, shared = problem.case.shape, problem.each[0], problem.shared
    exact = indexer.index_scores(
        tensors["q"], shared["weights"], tensors["pages"].data, shape.rows, shared["block_table"],
        shared["seq_lens"], shared["cu_seqlens_q"], compress_ratio=shape.ratio,
    )  # fmt: skip
    expected = expect(problem)
    assert expected.tokens == [0, 1] and len(expected.scores[0]) == 10
    for scores, loops in zip(expected.scores, exact, strict=True):
        assert_equal_in_float64("scores", loops, scores)


TABLES = [
    *[("tiny/global", "block_table", page) for page in range(0, 40, 8)],
    ("tiny/mla", "block_table", 0),
    ("tiny/csa", "compressed_table", None),
    ("tiny/hca", "compressed_table", 0),
    ("tiny/sliding", "window_table", 71 // 4),
]


@pytest.mark.parametrize(("name", "table", "page"), TABLES)
def test_a_page_that_is_not_read_is_an_error(name, table, page):
    """The budget is tight enough: a result over all keys but those of one page is refused."""
    problem = tiny(name, context=640 if name == "tiny/global" else 72)
    expected, changed = expect(problem), problem.shared[table].clone()
    assert expected.wrong(*quire_calls(problem)[0]()) is None
    if page is None:  # of an entry that is selected
        page = int(problem.each[0]["topk_indices"][0, 0]) // problem.case.shape.rows
    # Its rows are read from its neighbour, which the sequence sees anyway.
    page, width = page % changed.shape[1], changed.shape[1]
    changed[0, page] = changed[0, (page + 1) % width]
    broken = dataclasses.replace(problem, shared=problem.shared | {table: changed})
    assert "error" in expected.wrong(*quire_calls(broken)[0]())
    out, lse = quire_calls(problem)[0]()
    assert "lse: error" in expected.wrong(out, lse + 0.1)
    assert expected.wrong(torch.full_like(out, float("nan"))) == "out: not finite"


def test_wrong_scales_are_found_and_peers_are_not_compared():
    problem = tiny("tiny/local/fp8")
    expected = expect(problem)
    for in_step in (False, True):
        [call] = quire_calls(problem, in_step=in_step)
        assert expected.wrong(*call()) is None
    [tensors] = problem.each
    tensors |= {"k_scale": tensors["v_scale"], "v_scale": tensors["k_scale"]}
    assert "error" in expected.wrong(*quire_calls(problem)[0]())
    with pytest.raises(Unsupported, match="e4m3 pages"):
        Peer("other", "1", "", lambda problem: []).calls(problem)


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
    own, other = flashmla.sparse_calls(fake_flashmla(), problem)
    expected = expect(problem)
    assert expected.wrong(*own()) is None
    assert "error" in expected.wrong(*other())  # each copy is another problem


def test_flashmla_takes_dense_decodes_of_its_pages_only(monkeypatch):
    problem, fake = tiny("tiny/mla"), fake_flashmla()
    with pytest.raises(Unsupported, match="pages of 4 rows"):
        flashmla.dense_calls(fake, problem)
    monkeypatch.setattr(flashmla, "DENSE_ROWS", 4)
    [call] = flashmla.dense_calls(fake, problem)
    assert expect(problem).wrong(*call()) is None
    for calls, case, message in (
        (flashmla.dense_calls, tiny("tiny/mla", "prefill"), "prefill"),
        (flashmla.sparse_calls, tiny("tiny/csa"), "plain rows"),
    ):
        with pytest.raises(Unsupported, match=message):
            calls(fake, case)


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_copies_share_no_memory(name):
    """Calls on them in turn find nothing in the L2 cache."""
    one, two = tiny(name, copies=2).each
    for key, tensor in one.items():
        assert tensor.data.data_ptr() != two[key].data.data_ptr(), key


# 128 raw rows and 512 selected rows of 584 bytes; q and out; indices. Products over 640 keys. A
# chunk at the start: query p sees p + 1 rows.
WORK = [
    ("v4-flash/csa", "decode", 16, 32768, 16 * (640 * 584 + 2 * 64 * 512 * 2 + 4 * 512),
     16 * 640 * 4 * 64 * 512),
    ("v4-flash/index", "decode", 1, 32768, 8192 * 132 + 64 * (256 + 4) + 4 * 512,
     2 * 8192 * 64 * 128),
    ("v3/mla", "decode", 1, 4096, 4096 * 1152 + 128 * (576 + 512) * 2, 4096 * 2 * 128 * (576 + 512)),
    ("v3/mla", "prefill", 1, 4096, 4096 * (1152 + 128 * (576 + 512) * 2),
     2 * 128 * (576 + 512) * 4096 * 4097 // 2),
    ("gemma-4-31b/local", "decode", 2, 4096, 2 * (1024 * 16 * 2 * 256 * 2 + 2 * 32 * 256 * 2),
     2 * 1024 * 4 * 32 * 256),
    ("gemma-4-31b/global/fp8", "decode", 1, 4096, 4096 * 4 * 2 * (512 + 4) + 2 * 32 * 512 * 2,
     4096 * 4 * 32 * 512),
    # A chunk of 8192 tokens sees the raw rows of 127 before it, and all entries of 4 tokens.
    ("v4-flash/csa", "prefill", 1, 32768,
     (8319 + 8192) * 584 + 8192 * (2 * 64 * 512 * 2 + 4 * 512), 8192 * 640 * 4 * 64 * 512),
]  # fmt: skip


@pytest.mark.parametrize(("name", "phase", "batch", "context", "num_bytes", "flops"), WORK)
def test_bytes_and_operations_of_a_case(name, phase, batch, context, num_bytes, flops):
    case = Case(SHAPES[name], phase, batch, context)
    assert (case.num_bytes, case.flops) == (num_bytes, flops)


RATES = {"copy_bytes_per_s": 1e9, "matmul_flops_per_s": 1e12}
CASE = Case(TINY_SHAPES["tiny/global"], "decode", 2, 37)
LATENT = Case(TINY_SHAPES["tiny/csa"], "decode", 2, 40)


def row_of(prepare, ours=False, case=CASE):
    peer = Peer("test", "1", "", prepare, ALL_OPS, ours=ours)
    [row] = kernels.run_case(case, [peer], CPU, RATES, 0.0)
    return row


@pytest.mark.parametrize("case", [CASE, LATENT], ids=["attention", "latent"])
@pytest.mark.parametrize("right_calls", [0, 1])
def test_a_wrong_result_is_not_reported(case, right_calls):
    """Neither one that is wrong at once, nor one that is wrong after it was timed."""
    calls = []

    def prepare(problem):
        right = quire_calls(problem)[0]

        def call():
            calls.append(1)
            zeros = (torch.zeros_like(problem.results["out"]),)
            return right() if len(calls) <= right_calls else zeros

        return [call]

    row = row_of(prepare, case=case)
    assert "budget" in row["wrong"] and "ms" not in row
    assert right_calls or len(calls) == 1


def test_failures_of_others_are_reasons_and_ours_are_wrong():
    def unsupported(problem):
        raise Unsupported("no such thing")

    def broken(problem):
        raise RuntimeError("it broke\nin line 2")

    assert row_of(unsupported)["skipped"] == "no such thing"
    assert row_of(broken)["skipped"] == "RuntimeError: it broke"
    assert row_of(broken, ours=True)["wrong"] == "RuntimeError: it broke"


@pytest.fixture
def result_of(tmp_path, monkeypatch):
    """(status, dictionary of --json) of the command on a CPU."""
    # No measured ones: a product in bf16 takes seconds on a CPU.
    monkeypatch.setattr(kernels, "device_rates", lambda *a: Rates(1e9, 1, 1e12, 1))

    def result_of(*arguments):
        file = tmp_path / "kernels.json"
        options = ["--per-call", "0", "--device", "cpu", "--json", str(file)]
        assert kernels.main([*arguments, *options]) == 0
        return json.loads(file.read_text())

    return result_of


def test_the_command_says_what_it_did_not_run(result_of, capsys):
    result, count = result_of("--set", "tiny", "--seconds", "0"), len(kernels.SETS["tiny"]())
    assert result["rows"] == [] and len(result["not_run"]) == count
    out = capsys.readouterr().out
    assert f"out of time or memory: {count} cases not run" in out and "missing   flashmla" in out
    for arguments, message in (
        (["--only", "no such case"], "only: expected part of the name"),
        (["--set", "tiny", "--impl", "quire,none"], "impl: expected some of"),
    ):
        assert kernels.main(arguments) == 2 and message in capsys.readouterr().err


def test_every_tiny_latent_case_runs(result_of):
    result = result_of("--set", "tiny-latents", "--impl", "quire,quire-in-step,flashmla")
    rows, cases = result["rows"], kernels.SETS["tiny-latents"]()
    timed = {(row["case"], row["impl"]) for row in rows if not row["skipped"]}
    attention = {c.name for c in cases if c.shape.op != "index"}
    assert timed == {(c.name, "quire") for c in cases} | {(n, "quire-in-step") for n in attention}
    assert all(row["ms"] > 0 < row["gb_per_s"] for row in rows if not row["skipped"])
    assert result["not_run"] == []


def test_shares_and_the_ratio_to_the_best_peer(result_of, tmp_path, monkeypatch):
    found, missing = find_peers(None)
    assert [peer.name for peer in found if peer.ours] == ["quire", "quire-in-step"]
    others = {"flashinfer", "fa3", "vllm-triton", "flashmla", "flashinfer-mla"}
    assert others == set(missing) | {p.name for p in found} & others
    rows = result_of("--set", "tiny", "--only", "global decode")["rows"]
    times = {row["impl"]: row["ms"] for row in rows}
    assert set(times) == {"quire", "quire-in-step", "sdpa"}
    for row in rows:
        assert row["over_best_peer"] == pytest.approx(row["ms"] / times["sdpa"])
        assert row["copy_share"] == pytest.approx(row["gb_per_s"])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    missing = find_peers(tmp_path)[1]
    assert missing["flashmla"] == "expected NVIDIA GPUs, got a torch for ROCm 7.0"


# What its file imports of vLLM.
UNIFIED_ATTENTION = """
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.kv_cache_interface import KVQuantMode

init_logger(__name__).debug_once("found")
found = envs.VLLM_BATCH_INVARIANT, current_platform.fp8_dtype(), KVQuantMode.NONE, tl.int64
found += (triton.cdiv(7, 2), current_platform.is_device_capability_family(100))
"""


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_file_of_vllm_is_imported_without_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ImportError):
        vllm_triton.load(tmp_path)
    file = (tmp_path / vllm_triton.MODULE.replace(".", "/")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(UNIFIED_ATTENTION)
    try:
        module, version = vllm_triton.load(tmp_path)
        assert module.found == (False, torch.float8_e4m3fn, 0, tl.int64, 4, False)
        assert version == "sources of its wheel"
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


def test_times_are_of_one_call(monkeypatch):
    """Calls of round n take n seconds each; round 0 is a warm-up."""
    calls = []
    monkeypatch.setattr(timing, "perf_counter", lambda: sum(i // 2 for i in range(len(calls))))
    found = time_calls([lambda: calls.append(0), lambda: calls.append(1)], CPU, seconds=0.0)
    assert calls == [0, 1] * 6
    assert found._asdict() == pytest.approx({"p50": 3, "p20": 1.8, "p80": 4.2, "least": 1})
