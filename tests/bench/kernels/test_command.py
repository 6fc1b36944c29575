"""The command bench.kernels: nothing wrong is timed, failures are reported, JSON is written."""

import json

import pytest
import torch

from quire.bench.cases.shapes import TINY_SHAPES, Case
from quire.bench.common import timing
from quire.bench.common.floors import Rates
from quire.bench.common.timing import time_calls
from quire.bench.kernels import __main__ as kernels
from quire.bench.peers.find import find_peers
from quire.bench.peers.peer import ALL_OPS, Peer, Unsupported
from quire.bench.peers.quire_calls import quire_calls

CPU = torch.device("cpu")
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


def test_times_are_of_one_call(monkeypatch):
    """Calls of round n take n seconds each; round 0 is a warm-up."""
    calls = []
    monkeypatch.setattr(timing, "perf_counter", lambda: sum(i // 2 for i in range(len(calls))))
    found = time_calls([lambda: calls.append(0), lambda: calls.append(1)], CPU, seconds=0.0)
    assert calls == [0, 1] * 6
    assert found._asdict() == pytest.approx({"p50": 3, "p20": 1.8, "p80": 4.2, "least": 1})
