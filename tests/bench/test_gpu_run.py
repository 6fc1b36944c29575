"""bench.gpu on a CPU: its dry run end to end, and what it does when a part crashes, hangs, is done already or lacks something."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.bench import environment, gpu, layers
from quire.bench.common.floors import Rates
from quire.bench.gpu import Part, Runner

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_the_dry_run_runs_every_part(tmp_path):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {
        p.name: json.loads((tmp_path / f"{p.name}.json").read_text()) for p in gpu.plan(True)
    }
    assert {name for name, r in records.items() if r["status"] == "skipped"} == {"peers"}
    assert all(r["status"] == "ok" for name, r in records.items() if name != "peers"), records
    assert records["correctness"]["tests"]["passed"] >= 10
    assert records["oracle"]["tests"]["passed"] >= 1
    for name in ("correctness", "oracle"):
        assert not {"failed", "error"} & set(records[name]["tests"])
    assert all(row["ms"] > 0 for row in records["kernels"]["result"]["rows"] if not row["skipped"])
    assert records["layers"]["result"]["decode"]["steps"] >= 2
    assert records["prefill-decode"]["result"]["check"]["requests"] == 1
    # A second call has nothing left to do but what was skipped.
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 0
    assert again.stdout.count("finished earlier") == len(records) - 1


def test_the_limits_add_up_to_less_than_nine_minutes():
    parts = gpu.plan(False)
    assert sum(part.limit for part in parts if not part.background) <= gpu.SECONDS < 9 * 60
    assert len({part.name for part in parts}) == len(parts)
    assert [part.name for part in gpu.plan(True)] == [part.name for part in parts]


def test_the_plan_runs_nothing(tmp_path, capsys):
    assert gpu.main(["--plan", "--out", str(tmp_path / "none")]) == 0
    assert not (tmp_path / "none").exists()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu.plan(False)) + 2
    assert gpu.main(["--parts", "kernels,nothing"]) == 2


def test_the_environment_names_the_peers_of_every_family(tmp_path, monkeypatch):
    """With the very arguments that it gets where there is a folder of peers (here without any that loads)."""
    monkeypatch.setattr(environment, "device_rates", lambda *a: Rates(1e9, 1, 1e12, 1))
    runner = Runner(tmp_path, tmp_path, 60.0, dry_run=True)
    [part] = [part for part in gpu.plan(False) if part.name == "environment"]
    module, *arguments = runner._arguments(part)[1:]
    assert module == "bench.environment" and "--peers" in arguments
    assert environment.main([*arguments, "--device", "cpu"]) == 0
    result = json.loads(runner._result(part).read_text())
    names = {"quire", "quire-in-step", "sdpa", "flex", "flashinfer", "fa3", "vllm-triton"}
    assert names | {"flashmla", "flashinfer-mla"} == {*result["present"], *result["missing"]}
    assert {"quire", "sdpa"} <= set(result["present"])


def run(out, *parts, seconds=60.0, peers=None):
    runner = Runner(out, peers, seconds, dry_run=True)
    for part in parts:
        runner.run(part)
    runner.wait()
    return [json.loads((out / f"{part.name}.json").read_text()) for part in parts]


def code(name, text, limit=20.0, **more):
    return Part(name, limit, "", ("-c", text, "{json}"), **more)


WRITE = "import sys, json; json.dump({'rows': 3}, open(sys.argv[1], 'w'));"


def test_a_crash_and_a_hang_lose_only_themselves(tmp_path):
    crash, hang, well = run(
        tmp_path,
        code("crash", WRITE + "print('last words', flush=True); import os; os.abort()"),
        code("hang", WRITE + "import time; time.sleep(60)", limit=1.5),
        code("well", WRITE + "print('fine')"),
    )
    assert crash["status"] == "exit status -6" and "last words" in crash["tail"]
    assert hang["status"] == "time limit" and hang["seconds"] < 10
    assert well["status"] == "ok"
    # What a part wrote before its end is kept.
    assert [record["result"] for record in (crash, hang, well)] == [{"rows": 3}] * 3


def test_a_part_that_is_ended_leaves_no_process_behind(tmp_path):
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(p.pid, flush=True); time.sleep(60)"
    [record] = run(tmp_path, code("parent", child, limit=2.0))
    pid = int(record["tail"].split()[0])
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the child of an ended part still runs")


def test_background_parts_run_beside_others_until_one_waits(tmp_path):
    mark = tmp_path / "mark"
    slow = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w').close()"
    beside, first, second = run(
        tmp_path,
        code("beside", slow, background=True),
        code("first", f"import os; print(os.path.exists({str(mark)!r}))"),
        code("second", f"import os; print(os.path.exists({str(mark)!r}))", waits=True),
        peers=tmp_path,
    )
    assert beside["status"] == "ok"
    assert (first["tail"].strip(), second["tail"].strip()) == ("False", "True")


def test_parts_without_time_or_modules_are_not_started(tmp_path):
    missing, late = (
        run(tmp_path, code("missing", "raise SystemExit(1)", modules=("no_such_module",)))[0],
        run(tmp_path, code("late", "raise SystemExit(1)"), seconds=5.0)[0],
    )
    assert missing["status"] == "skipped" and missing["tail"] == "needs no_such_module"
    assert late["status"] == "no time"


def test_parts_are_resumed_by_their_result(tmp_path):
    part = code("one", "print(1)")
    assert not gpu.finished(tmp_path, part, dry_run=True)
    run(tmp_path, part)
    assert gpu.finished(tmp_path, part, dry_run=True)
    assert not gpu.finished(tmp_path, part, dry_run=False)  # a dry run proves nothing of a real one
    run(tmp_path, code("one", "raise SystemExit(3)"))
    assert not gpu.finished(tmp_path, part, dry_run=True)


def test_outcomes_are_counted_with_and_without_workers():
    log = (
        "tests/gpu/test_a.py::test_x[decode b 1] PASSED [ 10%]\n"
        "tests/gpu/test_a.py::test_y FAILED [ 20%]\n"
        "tests/gpu/test_a.py::test_z SKIPPED (needs an NVIDIA GPU) [ 30%]\n"
        "[gw3] [ 40%] PASSED tests/gpu/test_b.py::test_x \n"
        "[gw11] [100%] ERROR tests/gpu/test_b.py::test_y \n"
        "tests/gpu/test_c.py::test_started_only \n"
        "FAILED tests/gpu/test_a.py::test_y - AssertionError\n"
    )
    assert gpu._counts(log) == {"passed": 2, "failed": 1, "skipped": 1, "error": 1}


def test_layers_refuse_wrong_logits(monkeypatch, capsys):
    command = ["--model", "gemma4-tiny", "--batch", "2", "--context", "40", "--chunk", "32"]
    command += ["--steps", "2", "--check-length", "40", "--cache-gib", "0.01", "--device", "cpu"]
    forward = layers.Engine._forward

    def other_page(self, step):
        # Everything in the cache moves by one row.
        for slot in self.pool.tensors:
            slot.copy_(slot.roll(1, 0))
        return forward(self, step)

    monkeypatch.setattr(layers.Engine, "_forward", other_page)
    assert layers.main(command) == 1
    assert "refusing to report" in capsys.readouterr().err


def test_layers_are_the_first_of_the_model():
    config = layers.few_layers("gemma-4-31b", 6)
    assert config.num_layers == 6 and config.layer_types.count("full_attention") == 1
    assert config.hidden_size == 5376
    with pytest.raises(ValueError, match=r"layers: expected 1\.\.60, got 61"):
        layers.few_layers("gemma-4-31b", 61)
