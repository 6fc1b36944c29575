"""bench.gpu on a CPU: every part of its dry run; parts that crash, hang or are done already."""

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from quire.bench.common.floors import Rates
from quire.bench.gpu import __main__ as gpu
from quire.bench.gpu import machine, sanitize
from quire.bench.gpu.parts import Part, plan
from quire.bench.gpu.runner import Runner

ROOT = Path(__file__).resolve().parent.parent.parent
OTHERS = ("environment", "warm-up", "sanitize", "tune")
PROGRAMS = [part for part in plan(True) if not part.tests and part.name not in OTHERS]


@pytest.mark.parametrize("part", PROGRAMS, ids=lambda part: part.name)
def test_the_program_of_a_part_runs(part, tmp_path, monkeypatch):
    """As the dry run calls it, but in this process, which has torch already."""
    monkeypatch.chdir(ROOT)
    rates = "quire.bench.kernels.__main__.device_rates"
    monkeypatch.setattr(rates, lambda *a: Rates(1e9, 1, 1e12, 1))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module, *arguments = Runner(tmp_path, None, dry_run=True).arguments(part)[1:]
    assert any(word.startswith(("gemma4-tiny", "deepseek-v4-tiny", "tiny")) for word in arguments)
    found = import_module(f"quire.{module}")
    program = getattr(found, "main", None) or import_module(f"quire.{module}.__main__").main
    assert program(arguments) == 0
    result = json.loads((tmp_path / f"{part.name}.result.json").read_text())
    if "--compile" in arguments:
        assert result["cases"] >= 4 and not result["failures"]
    elif module == "bench.kernels":
        assert any("ms" in row for row in result["rows"])
        assert all(row["ms"] > 0 for row in result["rows"] if "ms" in row)
    else:
        assert result["check"]["requests"] == 1


@pytest.mark.parametrize(("num_gpus", "minutes"), [(1, 20), (8, 22)])
def test_all_parts_end_in_the_time_that_the_command_promises(num_gpus, minutes):
    parts = [part for part in plan(False, num_gpus) if not part.background]
    assert sum(part.limit for part in parts) <= 60 * minutes
    assert f" {minutes}" in gpu.__doc__


@pytest.mark.slow
def test_the_tests_of_parts_and_of_the_sanitizer_are_there():
    """Names that nothing runs but a GPU."""
    parts = [part for dry_run in (False, True) for part in plan(dry_run) if part.tests]
    for part in parts:
        assert part.arguments[-1].startswith("tests/"), part.name  # without a file, all would run
    names = {name for part in parts for name in part.arguments if name.startswith("tests/")}
    names |= {f"tests/kernels/{name}" for name in sanitize.KERNEL_TESTS}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("installed", "status"), [(None, 0), (0, 0), (9, 1)])
def test_kernels_run_under_the_sanitizer_where_it_is(installed, status, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if installed is not None:
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\nexit {installed}\n")
        tool.chmod(0o755)
    assert sanitize.main(["--json", str(tmp_path / "result.json")]) == status
    statuses = json.loads((tmp_path / "result.json").read_text())["statuses"]
    assert statuses == ({} if installed is None else dict.fromkeys(sanitize.TOOLS, installed))
    if installed is not None:
        calls = (tmp_path / "calls").read_text().splitlines()
        assert [call.split()[:2] for call in calls] == [["--tool", t] for t in sanitize.TOOLS]
        assert all("-m pytest" in call for call in calls)


def test_a_machine_that_cannot_launch_says_what_it_lacks(tmp_path, monkeypatch, capsys):
    """Without a C compiler and Python's headers, which Triton builds its launcher with."""

    def launch(*args, **options):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(machine, "write_kv", launch)
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    assert machine.main([]) == 2
    said = capsys.readouterr().err
    assert f"this machine has no C compiler (gcc or clang) and no {tmp_path}/Python.h" in said
    monkeypatch.undo()
    monkeypatch.setattr(machine, "device_rates", lambda *a: Rates(1e9, 1, 1e12, 1))
    assert {"machine", "first_launch_s", "rates"} <= set(machine.describe(torch.device("cpu")))


def run(out, *parts):
    runner = Runner(out, None, dry_run=True)
    for part in parts:
        runner.run(part)
    runner.wait()
    return [json.loads((out / f"{part.name}.json").read_text()) for part in parts]


def code(name, text, limit=20.0, **more):
    return Part(name, limit, ("-c", text, "{json}"), **more)


WRITE = "import sys, json; json.dump({'rows': 3}, open(sys.argv[1], 'w'));"


def test_a_crash_and_a_hang_lose_only_themselves_and_leave_no_process(tmp_path):
    child = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); "
    crash, hang, well = run(
        tmp_path,
        code("crash", WRITE + "print('last words', flush=True); import os; os.abort()"),
        code("hang", WRITE + child + "print(p.pid, flush=True); time.sleep(60)", limit=3.0),
        code("well", WRITE + "print('fine')"),
    )
    assert crash["status"] == "exit status -6" and "last words" in crash["tail"]
    assert hang["status"] == "time limit" and hang["seconds"] < 10
    state, until = Path(f"/proc/{int(hang['tail'].split()[0])}/stat"), time.monotonic() + 5
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "the child of an ended part still runs"
        time.sleep(0.1)
    assert well["status"] == "ok"
    # What a part wrote before its end is kept.
    assert [record["result"] for record in (crash, hang, well)] == [{"rows": 3}] * 3


def test_background_parts_run_beside_others_until_one_waits(tmp_path):
    mark = tmp_path / "mark"
    slow = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w').close()"
    beside, first, second = run(
        tmp_path,
        code("beside", slow, background=True),
        code("first", f"import os; print(os.path.exists({str(mark)!r}))"),
        code("second", f"import os; print(os.path.exists({str(mark)!r}))", waits=("beside",)),
    )
    assert beside["status"] == "ok"
    assert (first["tail"].strip(), second["tail"].strip()) == ("False", "True")


def test_nothing_runs_where_no_kernel_can_be_launched(tmp_path, monkeypatch, capsys):
    first = code("first", "raise SystemExit('error: no C compiler')", vital=True)
    parts = [first, code("second", "")]
    monkeypatch.setattr(gpu, "plan", lambda *arguments: parts)
    assert gpu.main(["--dry-run", "--out", str(tmp_path)]) == 1
    assert "no C compiler" in capsys.readouterr().out
    assert not (tmp_path / "dry-run" / "second.json").exists()


# A device that is lost after the first bad test, in place of torch.
FAKE = """
import sys
from types import SimpleNamespace
from tests.support import lost_device

def synchronize():
    if cuda.lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

cuda = SimpleNamespace(lost=False, is_initialized=lambda: True, synchronize=synchronize)
sys.modules["torch"] = SimpleNamespace(cuda=cuda)
pytest_configure = lost_device.pytest_configure
"""
TESTS = """
import os, sys, time
import pytest

@pytest.mark.parametrize("i", range(40))
def test_one(i):
    cuda = sys.modules["torch"].cuda
    if i == 7:
        cuda.lost = True
    if i == 11:
        os.abort()
    if i == 13:
        time.sleep(100)
    cuda.synchronize()
    assert i != 9
"""
BAD = {f"test_fake.py::test_one[{i}]" for i in (7, 9, 11, 13)}


@pytest.mark.parametrize("workers", [False, True], ids=["alone", "xdist"])
def test_an_illegal_access_a_crash_and_a_hang_cost_one_test_each(tmp_path, monkeypatch, workers):
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(FAKE)
    (tmp_path / "test_fake.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    more = "-p xdist.plugin -n 2 --dist worksteal --max-worker-restart 99" if workers else ""
    options = ("-vv", "-p", "no:cacheprovider", *more.split())
    part = Part("tests", 60.0, ("-m", "pytest", *options, str(tmp_path)), tests=True)
    monkeypatch.setattr("quire.bench.gpu.runner.TEST_SECONDS", 0.5)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    [record] = run(tmp_path, part)
    assert record["status"] == "exit status 1"
    log = (tmp_path / "tests.log").read_text()
    assert {name.split("/")[-1] for name in record["tests"]["bad"]} == BAD, log
    assert record["tests"]["counts"]["passed"] == 36
    assert "an illegal memory access" in log
    assert 'test_fake.py", line 13 in test_one' in log  # where it hung
    # The next call repeats the bad ones alone; mended, they pass.
    (tmp_path / "test_fake.py").write_text(
        TESTS.replace("i == 7", "i in ()").split("    if i == 11")[0]
    )
    [record] = run(tmp_path, part)
    assert record["status"] == "ok" and record["tests"]["counts"] == {"passed": 40}
    rows = [json.loads(line) for line in (tmp_path / "tests.jsonl").read_text().splitlines()]
    starts = [row["test"].split("/")[-1] for row in rows if row["outcome"] == "unfinished"]
    assert {name for name in starts if starts.count(name) > 1} == BAD
