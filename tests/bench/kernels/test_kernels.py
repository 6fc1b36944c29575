"""bench.kernels: its shapes, its oracle, its model, and that it reports no time of a result that is wrong."""

import argparse
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from quire.bench.cases.problem import attention_rows, expect, make_problem
from quire.bench.cases.shapes import SHAPES, TINY_SHAPES, Case, all_cases, headline
from quire.bench.cases.work import attention_bytes
from quire.bench.common.bounds import bounding
from quire.bench.common.floors import Rates
from quire.bench.common.timing import time_calls
from quire.bench.kernels import __main__ as kernels
from quire.bench.peers.attention import find_peers
from quire.bench.peers.folder import unpack
from quire.bench.peers.peer import Peer, Unsupported
from quire.kernels.attention.call import AttentionCall
from quire.models.config.named import get_config
from tests.kernels.oracles import attention as reference
from tests.support.forked import printed
from tests.support.helpers import assert_equal_in_float64

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
CASES = [
    Case(TINY_SHAPES[f"tiny/{kind}"], phase, 2, 37, 16)
    for kind in ("local", "global")
    for phase in ("decode", "prefill", "mixed")
]
NAMES = [case.name.replace(" ", "-") for case in CASES]
RATES = {"copy_bytes_per_s": 1e9, "matmul_flops_per_s": 1e12}


def test_shapes_are_those_of_the_configurations():
    config = get_config("gemma-4-31b")
    for kind, attention in (("local", config.sliding), ("global", config.full)):
        shape = SHAPES[f"gemma-4-31b/{kind}"]
        for field in ("num_heads", "num_kv_heads", "head_dim", "sliding_window"):
            assert getattr(shape, field) == getattr(attention, field)
        assert shape.softmax_scale == 1.0
    # All pages of a model have equal bytes.
    pages = {s.block_size * s.kv_token_bytes for n, s in SHAPES.items() if n.startswith("gemma-4-31b")}  # fmt: skip
    assert pages == {16 * 4 * 16 * 256}


def test_shards_divide_heads_and_replicate_none():
    shape = SHAPES["gemma-4-31b/global"]
    share = shape.shard(4)
    assert (share.num_heads, share.num_kv_heads, share.name) == (8, 1, "gemma-4-31b/global/tp4")
    assert shape.shard(8) is None


def test_cases_are_unique_and_the_headline_comes_first():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) > 150
    assert cases[: len(headline())] == headline()
    for phase in ("decode", "prefill", "mixed"):
        assert {c.shape.name for c in cases if c.phase == phase} >= set(SHAPES)
    assert {1, 16, 128} <= {c.batch for c in cases}
    assert {4096, 32768, 131072} <= {c.context for c in cases}
    assert {16, 32, 64, 128, 256} == {c.block_size for c in cases}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_vectorised_oracle_is_the_one_with_loops(case):
    problem = make_problem(case, CPU, torch.float32)
    lse = torch.empty(case.shape.num_heads, problem.q.shape[1], dtype=torch.float64)
    call = AttentionCall(
        problem.q[0],
        problem.k_pages(0),
        problem.v_pages(0),
        problem.block_table,
        problem.seq_lens,
        problem.cu_seqlens_q,
        max_seqlen_q=max(case.q_lens),
        softmax_scale=problem.softmax_scale,
        sinks=problem.sinks,
        sliding_window=case.shape.sliding_window,
        lse=lse,
    )
    exact = reference.attention(call, torch.float64)
    start = 0
    for seq, q_len in enumerate(case.q_lens):
        with bounding():
            rows, rows_lse = attention_rows(problem, seq, list(range(q_len)), torch.float64)
        part = slice(start, start + q_len)
        assert_equal_in_float64("rows", exact[part], rows)
        assert_equal_in_float64("lse", lse[:, part], rows_lse.T)
        start += q_len


def test_an_unread_key_is_an_error():
    """The budget is tight enough: a result over all keys but one tile is refused."""
    case = Case(TINY_SHAPES["tiny/global"], "decode", 2, 640, 16)
    problem = make_problem(case, CPU, torch.bfloat16)
    expected = expect(problem)
    [found] = [p for p in find_peers(None)[0] if p.name == "quire"]
    assert expected.wrong(*found.prepare(problem)[0]()) is None
    for skipped in range(0, 40, 8):
        # The keys of one page become those of another one that the sequence sees anyway.
        table = problem.block_table.clone()
        table[0, skipped] = table[0, (skipped + 1) % 40]
        broken = dataclasses.replace(problem, block_table=table)
        assert "error" in expected.wrong(*found.prepare(broken)[0]())
    assert expected.wrong(torch.full_like(problem.q[0], float("nan"))) == "out: not finite"


def row_of(prepare, ours=False):
    peer = Peer("test", "1", "", prepare, ours=ours)
    [row] = kernels.run_case(CASES[3], [peer], CPU, RATES, 0.0)
    return row


def test_a_wrong_result_is_not_timed():
    calls = []

    def prepare(problem):
        def call():
            calls.append(1)
            return (torch.zeros_like(problem.q[0]),)

        return [call] * 2

    row = row_of(prepare)
    assert "budget" in row["wrong"] and "ms" not in row
    assert len(calls) == 1


def test_a_result_that_changes_while_it_is_timed_is_not_reported():
    def prepare(problem):
        [found] = [p for p in find_peers(None)[0] if p.name == "quire"]
        right, calls = found.prepare(problem)[0], []

        def call():
            calls.append(1)
            return right() if len(calls) == 1 else (torch.zeros_like(problem.q[0]),)

        return [call]

    row = row_of(prepare)
    assert "budget" in row["wrong"] and "ms" not in row


def test_failures_of_others_are_reasons_and_ours_are_wrong():
    def unsupported(problem):
        raise Unsupported("no such thing")

    def broken(problem):
        raise RuntimeError("it broke\nin line 2")

    assert row_of(unsupported)["skipped"] == "no such thing"
    assert row_of(broken)["skipped"] == "RuntimeError: it broke"
    assert row_of(broken, ours=True)["wrong"] == "RuntimeError: it broke"


def test_rows_have_shares_and_the_ratio_to_the_best_peer():
    found, missing = find_peers(None)
    rows = kernels.run_case(CASES[3], found, CPU, RATES, 0.0)
    times = {row["impl"]: row["ms"] for row in rows}
    assert set(times) == {"quire", "quire-in-step", "sdpa", "flex"}
    best = min(times["sdpa"], times["flex"])
    for row in rows:
        assert row["over_best_peer"] == pytest.approx(row["ms"] / best)
        assert row["copy_share"] == pytest.approx(row["gb_per_s"] * 1e9 / 1e9)
    assert set(missing) >= {"flashinfer", "fa3", "vllm-triton"} - {peer.name for peer in found}
    bytes_moved = 2 * 37 * 4 * 2 * 32 + 2 * 2 * 2 * 4 * 32  # K and V once; q and out
    assert attention_bytes(CASES[3]) == bytes_moved


def test_the_command_writes_json_and_says_what_it_did_not_run(tmp_path, capsys, monkeypatch):
    # A product in bf16 takes seconds on a CPU.
    monkeypatch.setattr(kernels, "device_rates", lambda *a: Rates(1e9, 1, 1e12, 1))
    path = tmp_path / "kernels.json"
    command = ["--set", "tiny", "--impl", "quire", "--per-call", "0", "--device", "cpu"]
    assert kernels.main([*command, "--seconds", "0", "--json", str(path)]) == 0
    result, count = json.loads(path.read_text()), len(kernels.SETS["tiny"]())
    assert result["rows"] == [] and len(result["not_run"]) == count
    assert f"out of time or memory: {count} cases not run" in capsys.readouterr().out
    assert kernels.main([*command, "--only", "global mixed", "--json", str(path)]) == 0
    [row] = json.loads(path.read_text())["rows"]
    assert row["impl"] == "quire" and row["ms"] > 0
    assert "missing   flashmla" in capsys.readouterr().out
    assert kernels.main(["--only", "no such case"]) == 2


def test_a_wrong_result_of_ours_is_exit_status_1(monkeypatch):
    wrong = {"case": "c", "impl": "quire", "ours": True, "wrong": "error 1, budget 0", "skipped": None}  # fmt: skip
    monkeypatch.setattr(kernels, "run", lambda *a: {"rows": [wrong], "not_run": []})
    assert kernels.main(["--set", "tiny"]) == 1
    monkeypatch.setattr(kernels, "run", lambda *a: {"rows": [wrong | {"ours": False}], "not_run": []})  # fmt: skip
    assert kernels.main(["--set", "tiny"]) == 0


def test_times_are_of_one_call():
    calls = []
    timing = time_calls([lambda: calls.append(0), lambda: calls.append(1)], CPU, seconds=0.0)
    assert timing.calls == 2 and timing.replays == 5 and len(calls) == 2 * 6
    assert calls[:4] == [0, 1, 0, 1]
    assert timing.p20 <= timing.p50 <= timing.p80


def test_packed_peers_are_unpacked_once(tmp_path):
    import lzma
    import zipfile

    packed, target = tmp_path / "packed", tmp_path / "target"
    packed.mkdir()
    (packed / "lib.so.xz").write_bytes(lzma.compress(b"library"))
    with zipfile.ZipFile(packed / "package-1-py3.whl", "w") as wheel:
        wheel.writestr("package/__init__.py", "")
    assert unpack(packed, target) == target
    assert (target / "lib.so").read_bytes() == b"library"
    assert (target / "package/__init__.py").exists()
    before = os.stat(target / "lib.so").st_mtime_ns
    unpack(packed, target)
    assert os.stat(target / "lib.so").st_mtime_ns == before
    assert unpack(target, tmp_path / "other") == target


def test_unknown_implementations_are_named(monkeypatch):
    monkeypatch.setattr(kernels, "device_rates", lambda *a: Rates(1e9, 1, 1e12, 1))
    args = argparse.Namespace(peers=None, impl="quire,none", seconds=None, per_call=0.0, json=None)
    with pytest.raises(ValueError, match=r"impl: expected some of .*'none'"):
        kernels.run([CASES[0]], CPU, args)


FAKE_FLASHINFER = {
    "__init__.py": "__version__ = '9.9'",
    "jit/__init__.py": "",
    "jit/attention/__init__.py": "",
    "jit/attention/modules.py": "def gen_batch_decode_module(*a): return ('decode', *a)\n"
    "def gen_batch_prefill_module(*a): return ('prefill', *a)\n",
    "jit/core.py": "def build_jit_specs(specs, **options):\n"
    "    if any(spec[0] == 'decode' for spec in specs): raise RuntimeError('nvcc said no')\n",
}
USE_FAKE = """
import sys
from pathlib import Path
import torch
from quire.bench.peers.peer import Unsupported
from quire.bench.peers.flashinfer import build_flashinfer, flashinfer_peer
from quire.bench.cases.problem import make_problem
from quire.bench.cases.shapes import Case, Shape
folder = Path(sys.argv[1])
print(build_flashinfer(folder))
peer = flashinfer_peer(folder)
print(peer.version)
for dim in (512, 64, 128):
    case = Case(Shape("", 2, 1, dim), "decode", 1, 20, 16)
    try:
        peer.prepare(make_problem(case, torch.device("cpu"), torch.bfloat16))
    except Unsupported as reason:
        print(dim, reason)
    except AttributeError as error:
        print(dim, error)
"""


def test_flashinfer_kernels_that_did_not_compile_are_not_used(tmp_path):
    for name, text in FAKE_FLASHINFER.items():
        path = tmp_path / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    # A process of its own: the folder goes to its import path and environment.
    said = printed(USE_FAKE, str(tmp_path), cwd=ROOT)
    built, version, wide, unknown, narrow = said.splitlines()
    assert "'head_dim 128': 'built'" in built
    assert "'head_dim 512': 'RuntimeError: nvcc said no'" in built
    assert version == "9.9"
    assert wide == "512 its kernel for this head_dim was not built"
    assert unknown == "64 its kernel for this head_dim was not built"
    assert "BatchDecodeWithPagedKVCacheWrapper" in narrow  # this one is called
