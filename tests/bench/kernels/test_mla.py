"""bench.kernels on latent kernels: shapes, oracles against those with loops, what is refused, FlashMLA's convention, work, the command."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from quire.bench.cases.latent_problem import attend, expect_attention, visible_rows
from quire.bench.cases.latent_rows import _rows, _scores, expect_topk
from quire.bench.cases.latent_shapes import (
    SHAPES,
    TINY_SHAPES,
    LatentCase,
    all_cases,
    headline,
    tiny_cases,
)
from quire.bench.cases.work import latent_bytes, latent_flops
from quire.bench.common.bounds import bounding
from quire.bench.common.floors import Rates
from quire.bench.kernels import __main__ as kernels
from quire.bench.kernels.families import family_of
from quire.bench.peers import flashmla
from quire.bench.peers.attention import find_peers
from quire.bench.peers.latent import attention_calls, find_latent_peers, quire_latent_calls
from quire.bench.peers.peer import Peer, Unsupported
from quire.kernels import flash_mla_with_kvcache, mla_attention
from quire.models.deepseek_v4.config import CONFIGS
from tests.kernels.oracles import compressed_attention as oracle_compressed
from tests.kernels.oracles import compressor as reference_compress
from tests.kernels.oracles import indexer as reference_indexer
from tests.kernels.oracles import latent_write as reference_latent
from tests.kernels.oracles import mla_attention as oracle_mla
from tests.support.helpers import assert_equal_in_float64

CPU = torch.device("cpu")
RATES = {"copy_bytes_per_s": 1e9, "matmul_flops_per_s": 1e12}
CASES = tiny_cases()
ATTENTION = [case for case in CASES if case.shape.op in ("mla", "window", "csa", "hca")]


def named(case):
    return case.name.replace(" ", "-")


def tiny(name, phase="decode", fp8=False, context=40):
    return LatentCase(TINY_SHAPES[name], phase, 2, context, fp8)


def make(case, copies=1):
    return family_of(case).make(case, CPU, copies)


def test_shapes_are_those_of_the_configurations():
    for name, model_name in (("v4-flash", "deepseek-v4-flash"), ("v4-pro", "deepseek-v4-pro")):
        config = CONFIGS[model_name]
        csa, hca, index = (SHAPES[f"{name}/{kind}"] for kind in ("csa", "hca", "index"))
        assert (csa.num_heads, csa.topk, csa.rows) == (config.num_heads, config.index_topk, 64)
        assert (hca.num_heads, hca.ratio, hca.rows, hca.topk) == (config.num_heads, 128, 2, 0)
        assert (index.num_heads, index.head_dim, index.topk) == (64, 128, config.index_topk)
        assert csa.softmax_scale == config.head_dim**-0.5
    heads = {c.shape.num_heads for c in all_cases() if c.shape.name.startswith(("v4-flash/csa", "v4-pro/csa"))}  # fmt: skip
    assert heads == {8, 16, 32, 64, 128}
    assert SHAPES["v4-flash/index"].shard(2) is None


def test_cases_are_unique_and_the_headline_comes_first():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) > 200
    assert cases[: len(headline())] == headline()
    for phase in ("decode", "prefill"):
        assert {c.shape.name for c in cases if c.phase == phase} >= set(SHAPES)
    assert {4096, 32768, 131072, 1 << 20} <= {c.context for c in cases if c.shape.op == "hca"}
    assert {True, False} == {c.fp8 for c in cases if c.shape.op == "csa"}
    assert any(c.context == 1 << 20 and c.batch == 128 for c in cases)


@pytest.mark.parametrize("case", ATTENTION, ids=named)
def test_the_attention_oracle_is_the_one_with_loops(case):
    problem, shape = make(case), case.shape
    lse = torch.empty(shape.num_heads, case.num_tokens, dtype=torch.float64)
    options = {"softmax_scale": shape.softmax_scale, "max_seqlen_q": max(case.q_lens)}
    lengths = (problem.seq_lens, problem.cu_seqlens_q)
    if shape.op == "mla":
        exact = oracle_mla.mla_attention(
            problem.q[0], problem.entries[0], problem.entry_table, *lengths, head_dim_v=shape.head_dim_v, lse=lse,
            dtype=torch.float64, **options,
        )  # fmt: skip
    else:
        if problem.entries is not None:
            options |= {
                "compressed_pages": problem.entries[0],
                "compressed_table": problem.entry_table,
                "compress_ratio": shape.ratio,
            }
        if problem.topk_indices is not None:
            options |= {"topk_indices": problem.topk_indices[0], "topk_lens": problem.topk_lens}
        exact = oracle_compressed.compressed_attention(
            problem.q[0],
            problem.window[0],
            problem.window_table,
            *lengths,
            sliding_window=shape.sliding_window,
            sinks=problem.sinks,
            lse=lse,
            dtype=torch.float64,
            **options,
        )
    q_len = case.q_lens[0]
    for token in range(0, case.num_tokens, 1 if case.phase == "decode" else 13):
        keys = visible_rows(problem, token // q_len, token % q_len)
        with bounding():
            out, out_lse = attend(problem, token, keys, torch.float64)
        assert_equal_in_float64("out", exact[token], out[0])
        assert_equal_in_float64("lse", lse[:, token], out_lse[0])


@pytest.mark.parametrize("fp8", [False, True])
def test_the_index_oracle_is_the_one_with_loops(fp8):
    problem = make(tiny("tiny/index", fp8=fp8))
    case, shape = problem.case, problem.case.shape
    exact = reference_indexer.index_scores(
        problem.q[0],
        problem.weights,
        problem.pages[0].data,
        shape.rows,
        problem.block_table,
        problem.seq_lens,
        problem.cu_seqlens_q,
        compress_ratio=shape.ratio,
    )
    expected = expect_topk(problem)
    assert expected.rows == [0, 1] and case.num_entries == 10
    for scores, loops in zip(expected.scores, exact, strict=True):
        assert_equal_in_float64("scores", loops, scores)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_oracles_of_written_rows_are_those_with_loops(phase):
    write = make(tiny("tiny/write", phase))
    loops = reference_latent.write_latent(
        write.x[0], write.positions, write.cos_sin, write.norm_weight, dtype=torch.float64
    )
    tokens = torch.arange(len(loops))
    with bounding():
        rows = _rows(write, tokens, torch.float64)
    assert_equal_in_float64("rows", loops, rows)

    pool = make(tiny("tiny/compress", phase, context=44 if phase == "decode" else 40))
    case, shape, ring = pool.case, pool.case.shape, pool.state[0].shape[1]
    for seq in range(case.batch):
        first = case.context - case.q_lens[0]
        part = slice(seq * case.q_lens[0], (seq + 1) * case.q_lens[0])
        # The whole history: what the state has of it, and zeros where it has nothing, which no entry of this step looks at.
        rows = torch.zeros(2, case.context, pool.x.shape[2], dtype=torch.float64)
        for position in range(max(0, first - ring + 1), first):
            rows[:, position] = pool.state[0][seq, position % ring]
            rows[1, position] -= pool.ape[position % shape.ratio]
        rows[0, first:], rows[1, first:] = pool.x[0, part], pool.gate[0, part]
        entries = reference_compress.compress(
            rows[0],
            rows[1],
            pool.ape,
            ratio=shape.ratio,
            overlap=shape.overlap,
            norm_weight=pool.norm_weight,
            eps=1e-6,
            cos_sin=pool.cos_sin,
        )
        closing = (pool.slot_mapping[part] >= 0).nonzero()[:, 0] + part.start
        assert len(closing) == (1 if phase == "decode" else 10)
        with bounding():
            found = _rows(pool, closing, torch.float64)
        wanted = [entries[int(pool.positions[t]) // shape.ratio] for t in closing]
        assert_equal_in_float64("entries", torch.stack(wanted), found)


@pytest.mark.parametrize("name", ["tiny/mla", "tiny/csa", "tiny/hca", "tiny/sliding"])
def test_a_page_that_is_not_read_is_an_error(name):
    case = tiny(name, context=72)
    problem = make(case)
    expected = expect_attention(problem)
    assert expected.wrong(*attention_calls(problem, in_step=False)[0]()) is None
    field = "window_table" if problem.entries is None else "entry_table"
    table = getattr(problem, field).clone()
    # What should have been read from one page is read from its neighbour, which the sequence sees anyway.
    newest = (case.context - 1) // case.shape.window_rows % table.shape[1] if name == "tiny/sliding" else 0  # fmt: skip
    if name == "tiny/csa":
        newest = int(problem.topk_indices[0, 0, 0]) // case.shape.rows
    table[0, newest] = table[0, (newest + 1) % table.shape[1]]
    broken = dataclasses.replace(problem, **{field: table})
    assert "error" in expected.wrong(*attention_calls(broken, in_step=False)[0]())


def test_wrong_topk_indices_are_refused():
    problem = make(tiny("tiny/index"))
    expected = expect_topk(problem)
    indices, lens = quire_latent_calls(problem)[0]()
    assert expected.wrong(indices, lens) is None
    scores = _scores(problem, 0, problem.pages[0].read(problem.block_table[0].long()[torch.arange(10) // 4] * 4 + torch.arange(10) % 4), torch.float64)  # fmt: skip
    worst = indices.clone()
    worst[0, 0] = scores.argmin()
    twice = indices.clone()
    twice[1, 1] = twice[1, 0]
    unseen = indices.clone()
    unseen[0, 3] = 10
    assert "left out scores" in expected.wrong(worst, lens)
    assert "twice" in expected.wrong(twice, lens)
    assert "does not see" in expected.wrong(unseen, lens)
    assert "expected 4 of token 1, got 3" in expected.wrong(indices, lens - torch.tensor([0, 1]))


@pytest.mark.parametrize("name", ["tiny/write", "tiny-wide/write", "tiny/compress", "tiny-wide/compress"])  # fmt: skip
def test_rows_that_were_not_written_or_are_off_are_refused(name):
    case = tiny(name, "prefill", fp8=name.startswith("tiny-wide"))
    problem = make(case)
    expected = family_of(case).expect(problem)
    assert "error" in expected.wrong()
    [call] = quire_latent_calls(problem)
    result = call()
    assert expected.wrong(*result) is None
    assert expected.wrong(*call()) is None  # a call changes nothing that the next one reads
    slot = expected.slots[:1]
    row = problem.pages[0].read(slot)
    problem.pages[0].write(slot, row + 0.2 * row.abs().max())
    assert "pages: error" in expected.wrong()
    if result:
        problem.pages[0].write(slot, row)
        assert "out: error" in expected.wrong(result[0] * 1.1)


def fake_flashmla():
    """FlashMLA's operators by this repository's functions of its convention, which other tests compare with loops."""

    def sparse(q, cache, rows, lens, sinks, meta, splits, extra, extra_rows, extra_lens, dim, scale, out, flag):  # fmt: skip
        assert q.shape[2] in (64, 128) and rows.shape[2] % 64 == 0
        out, lse = flash_mla_with_kvcache(
            q, cache, None, None, dim, softmax_scale=scale, is_fp8_kvcache=True, indices=rows, attn_sink=sinks,
            extra_k_cache=extra, extra_indices_in_kvcache=extra_rows,
        )  # fmt: skip
        return out, lse, "schedule", "splits"

    def dense(q, cache, dim, seq_lens, table, scale, causal, meta, splits, out):
        assert causal and q.shape[1] == 1 and cache.shape[2] == 1
        cu_seqlens_q = torch.arange(len(q) + 1, dtype=torch.int32)
        out = mla_attention(
            q[:, 0], cache[:, :, 0], table, seq_lens, cu_seqlens_q, max_seqlen_q=1, softmax_scale=scale, head_dim_v=dim
        )  # fmt: skip
        return out[:, None], None, "schedule", "splits"

    return SimpleNamespace(sparse_decode_fwd=sparse, dense_decode_fwd=dense)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["tiny-wide/csa", "tiny-wide/hca"])
def test_flashmla_is_given_what_it_takes(name, phase):
    problem = make(tiny(name, phase, fp8=True, context=12 if phase == "prefill" else 40), copies=2)
    calls = flashmla.sparse_calls(fake_flashmla(), problem)
    expected = expect_attention(problem)
    assert len(calls) == 2
    assert expected.wrong(*calls[0]()) is None
    assert "error" in expected.wrong(*calls[1]())  # each copy is another problem


def test_flashmla_takes_dense_decodes_of_its_pages_only(monkeypatch):
    problem = make(tiny("tiny/mla"))
    with pytest.raises(Unsupported, match="pages of 4 rows"):
        flashmla.dense_calls(fake_flashmla(), problem)
    monkeypatch.setattr(flashmla, "DENSE_ROWS", 4)
    [call] = flashmla.dense_calls(fake_flashmla(), problem)
    assert expect_attention(problem).wrong(*call()) is None
    with pytest.raises(Unsupported, match="prefill"):
        flashmla.dense_calls(fake_flashmla(), make(tiny("tiny/mla", "prefill")))
    with pytest.raises(Unsupported, match="plain rows"):
        flashmla.sparse_calls(fake_flashmla(), make(tiny("tiny/csa")))


def test_missing_peers_are_listed():
    found, missing = find_latent_peers(None)
    assert [peer.name for peer in found if peer.ours] == ["quire", "quire-in-step"]
    assert {"flashmla", "flashinfer-mla"} == set(missing) | {p.name for p in found if not p.ours}


def test_peers_for_nvidia_say_so_under_rocm(tmp_path, monkeypatch):
    """Whatever is in the folder: nothing of it is loaded."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name in ("_flashmla_C.abi3.so", "_vllm_fa3_C.abi3.so", "flashinfer/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    missing = find_latent_peers(tmp_path)[1] | find_peers(tmp_path)[1]
    reason = "NotImplementedError: {}: expected NVIDIA GPUs, got a torch for ROCm 7.0"
    assert missing["flashmla"] == reason.format("FlashMLA")
    assert missing["fa3"] == reason.format("FlashAttention-3")
    assert missing["flashinfer"] == missing["flashinfer-mla"] == reason.format("FlashInfer")


def test_the_command_runs_every_tiny_case_and_writes_json(tmp_path, monkeypatch):
    # A product in bf16 takes seconds on a CPU.
    monkeypatch.setattr(kernels, "device_rates", lambda *a: Rates(1e9, 1, 1e12, 1))
    path = tmp_path / "kernels.json"
    command = ["--set", "tiny-latents", "--impl", "quire,quire-in-step,flashmla", "--per-call", "0"]
    assert kernels.main([*command, "--device", "cpu", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    timed = {(row["case"], row["impl"]) for row in result["rows"] if not row["skipped"]}
    wanted = {(case.name, "quire") for case in CASES} | {(case.name, "quire-in-step") for case in ATTENTION}  # fmt: skip
    assert timed == wanted
    assert all(row["ms"] > 0 and row["gb_per_s"] > 0 for row in result["rows"] if not row["skipped"])  # fmt: skip
    assert result["not_run"] == []


def test_a_wrong_result_is_not_timed():
    def prepare(problem):
        return [lambda: (torch.zeros_like(problem.q[0]),)]

    [row] = kernels.run_case(tiny("tiny/csa"), [Peer("test", "1", "", prepare)], CPU, RATES, 0.0)
    assert "budget" in row["wrong"] and "ms" not in row


def test_bytes_and_operations_of_a_case():
    # 128 raw rows and 512 selected rows of 584 bytes; q and out; the topk indices. Two products over 640 keys.
    case = LatentCase(SHAPES["v4-flash/csa"], "decode", 16, 32768, True)
    assert latent_bytes(case) == 16 * (640 * 584 + 2 * 64 * 512 * 2 + 4 * 512)
    assert latent_flops(case) == 16 * 640 * 4 * 64 * 512
    case = LatentCase(SHAPES["v4-flash/index"], "decode", 1, 32768, True)
    assert latent_flops(case) == 2 * 8192 * 64 * 128
    case = LatentCase(SHAPES["v3/mla"], "decode", 1, 4096, False)
    assert latent_bytes(case) == 4096 * 1152 + 128 * (576 + 512) * 2
    # A chunk at the start: query p sees p + 1 rows.
    case = LatentCase(SHAPES["v3/mla"], "prefill", 1, 4096, False)
    assert latent_flops(case) == 2 * 128 * (576 + 512) * 4096 * 4097 // 2
