"""Programs as processes: Ctrl-C at any moment, disks that are full, and every option with values that it cannot have."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import pytest

from quire.bench.common.workers import Workers
from quire.models import command

ROOT = Path(__file__).resolve().parent.parent
FILES = [f for p in ("bench", "models") for f in sorted((ROOT / p).rglob("*.py"))]
# What ``python -m`` takes, and the module that it runs.
MODULES = {
    name.removesuffix(".__main__"): f"quire.{name}"
    for f in FILES
    if re.search(r"^if __name__ == .__main__.:", f.read_text(), re.MULTILINE)
    for name in [".".join(f.relative_to(ROOT).with_suffix("").parts)]
}
PROGRAMS = list(MODULES)

# One whose output is written when it ends, and one that writes it at once: when asked to flush, or as Python is told to.
REPLAY = ["bench.replay", "--quiet", "--limit", "3", "--model", "llama-like", "--pool", "100%"]
MEMORY = ["models.memory", "--model", "gemma3-tiny"]
PRINTING = [(MEMORY, ""), (REPLAY, ""), (REPLAY, "1")]

# Says when a module is about to be imported, and then gives the test all the time to send a signal.
STOP = """
import atexit, os, sys, time

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOP_AT"] and ("spawn_main" in " ".join(sys.orig_argv)) == bool(os.environ["STOP_WORKER"]):
            sys.meta_path.remove(self)
            stop()

def stop():
    open(os.environ["STOPPED"], "w").close()
    for _ in range(6000):
        time.sleep(0.01)

if os.environ["STOP_AT"] == "exit":
    atexit.register(stop)  # the first to be registered is the last to run
sys.meta_path.insert(0, Stop())
"""


def interrupted(tmp_path, arguments, at, *, worker=False) -> tuple[int, bytes]:
    """Exit status and stderr of ``python -m``, whose whole process group gets SIGINT when the module ``at`` is about to be imported."""
    (tmp_path / "sitecustomize.py").write_text(STOP)
    stopped = tmp_path / "stopped"
    more = {"PYTHONPATH": str(tmp_path), "STOP_AT": at, "STOP_WORKER": "1" if worker else "", "STOPPED": str(stopped)}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | more,
        # Where the tests run in the background the signal is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), start_new_session=True,
    )  # fmt: skip
    try:
        while not stopped.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):  # nobody is left, in a while
            for _ in range(6000):
                os.killpg(process.pid, 0)
                time.sleep(0.01)
        return process.returncode, err
    finally:
        process.kill()


@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_while_a_program_is_imported(name, tmp_path):
    assert interrupted(tmp_path, [name], MODULES[name]) == (130, b"interrupted\n")


@pytest.mark.parametrize("at", ["torch", "exit"])
def test_ctrl_c_at_moments_of_a_run(at, tmp_path):
    """Of one that fails: options that do not go together."""
    status, err = interrupted(tmp_path, ["bench.prefill_decode", "--draft-tokens", "1"], at)
    *before, last = err.splitlines()
    assert (status, last) == (130, b"interrupted")
    assert not before or (
        at == "exit" and [line[:20] for line in before] == [b"error: draft_tokens:"]
    )


@pytest.mark.nightly
def test_ctrl_c_ends_workers_without_a_word(tmp_path):
    pytest.importorskip("triton")
    arguments = ["bench.static", "--only", "write", "--arch", "sm_90", "--jobs", "2"]
    assert interrupted(tmp_path, arguments, "torch", worker=True) == (130, b"interrupted\n")


def test_cancelled_work_ends_without_a_word(monkeypatch):
    """Futures that are cancelled just before their processes are ended, which the executor's thread notices first."""
    said, shutdown = [], Workers.shutdown
    monkeypatch.setattr(threading, "excepthook", said.append)
    monkeypatch.setattr(Workers, "shutdown", lambda *a, **k: time.sleep(1) or shutdown(*a, **k))
    with pytest.raises(KeyboardInterrupt), Workers(1) as pool:
        futures = [pool.submit(time.sleep, 60) for _ in range(6)]
        while not futures[0].running():
            time.sleep(0.01)
        assert [future.cancel() for future in futures[-2:]] == [True, True]
        raise KeyboardInterrupt
    assert not said and not multiprocessing.active_children()


def test_where_sigint_is_ignored_it_stays_so(tmp_path):
    (tmp_path / "quiet.py").write_text(
        "import os, signal, sys\n"
        "def main(argv=None):\n    os.kill(os.getpid(), signal.SIGINT)\n    print('on')\n    return 0\n"
    )
    code = "from quire.models.command import run; run('quiet')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")


def run_into(file, arguments, unbuffered):
    """Exit status and stderr of a program that writes to an open file."""
    with open(file, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=ROOT, stdout=out, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(("arguments", "unbuffered"), PRINTING)
def test_output_that_is_not_taken(arguments, unbuffered):
    """A full disk is status 2 and one line; output that nobody reads is status 141 without a word."""
    if Path("/dev/full").exists():
        said = b"error: [Errno 28] No space left on device\n"
        assert run_into("/dev/full", arguments, unbuffered) == (2, said)
    reader, writer = os.pipe()
    os.close(reader)
    assert run_into(writer, arguments, unbuffered) == (141, b"")


class Defect(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("n: expected 1"), 2, "error: n: expected 1\n"),
        (OSError(errno.ENOSPC, "No space"), 2, "error: [Errno 28] No space\n"),
        (MemoryError(), 2, "error: MemoryError\n"),
        (RuntimeError("DefaultCPUAllocator: no"), 2, "error: DefaultCPUAllocator: no\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (Defect(), Defect, ""),
    ],
)
def test_what_a_main_raises(error, status, text, capsys):
    @command.program
    def main(argv=None):
        raise error

    if status is Defect:
        with pytest.raises(Defect):
            main([])
    else:
        assert main([]) == status
    assert capsys.readouterr().err == text


# Options. What is refused at the command line is refused before any work starts.

NO_INTEGER = ["x", "", "1.5", "nan", "inf", "1e3", "9" * 30, "9" * 5000]
NO_NUMBER = ["x", "", "nan", "inf", "-1", "1e999"]
# Options whose values only the program itself can judge.
FREE = {
    "model", "prompt", "file", "system", "stop", "device", "impl", "only", "parts", "write", "workload", "pool", "peers", "out",
    "baseline", "retention", "host", "drafter", "eviction", "vllm",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (command.integer(), ["1", str(2**31 - 1)], [*NO_INTEGER, "0", str(2**31)]),
        (command.integer(-2, 5), ["-2", "5"], [*NO_INTEGER, "-3", "6"]),
        (command.threads, ["1"], [*NO_INTEGER, "0", "-1", "100000"]),
        (command.number(), ["0", "-0.0", "1e3"], NO_NUMBER),
        (command.number(above=True), ["1e-9"], [*NO_NUMBER, "0", "-0.0"]),
    ],
    ids=["integer", "bounded", "threads", "number", "above-0"],
)
def test_values_of_options(kind, good, bad):
    for text in good:
        value = kind(text)
        assert value == type(value)(text)
    for text in bad:
        with pytest.raises(ValueError, match=r"^expected an? ") as caught:
            kind(text)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_refuses_what_it_cannot_have(name, tmp_path, capsys):
    """By a type that has bounds, before any work starts, in one line that names the option."""
    module = import_module(MODULES[name])
    required = {
        "models.generate": ["--model", "gemma3-tiny"],
        "models.memory": ["--model", "gemma3-tiny"],
        "models.integrations.hub_kernels": [f"{tmp_path}/new"],
        "bench.released": ["smollm2"],
    }.get(name, [])
    missing = str(tmp_path / "nowhere" / "file")
    actions = module._parser()._actions
    for action in [a for a in actions if a.option_strings and a.nargs != 0]:
        kind = getattr(action.type, "__qualname__", "").split(".")[0]
        if kind in ("integer", "threads", "number"):
            values = ["x", "nan"]
        elif kind in ("output_file", "input_file"):
            values = [str(tmp_path), missing, "", "\0"]
        else:
            assert action.choices or action.dest in FREE, f"{action.dest} takes anything"
            values = ["nonsense"] if action.choices else []
        for value in values:
            assert module.main([*required, f"{action.option_strings[0]}={value}"]) == 2
            captured = capsys.readouterr()
            assert captured.out == "" and captured.err.count("\n") == 1, captured
            assert captured.err.startswith(f"error: {action.dest}: "), captured.err
    assert module.main([*required, "--no-such-option"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --no-such-option\n"
    assert list(tmp_path.iterdir()) == []
    if name.startswith("models."):  # as an installed quire has it
        shown = module._parser().format_help()
        assert f"python -m quire.{name}" in shown and "-m models." not in shown


def test_a_file_that_is_only_checked_is_left_as_it_was(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("old")
    for file in (new, old, Path(os.devnull)):
        assert command.output_file(str(file)) == file
    assert not new.exists() and old.read_text() == "old"


def test_a_full_disk_is_no_wrong_result(monkeypatch, capsys):
    """Triton writes what it compiles to a cache on disk."""
    kernels = import_module(MODULES["bench.kernels"])
    compiling = import_module("quire.bench.static.compiling")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kernels, "time_checked", full)
    assert kernels.main(["--set", "tiny", "--only", "decode", "--impl", "quire", "--device", "cpu"]) == 2  # fmt: skip
    captured = capsys.readouterr()
    assert captured.err == "error: [Errno 28] No space left on device\n" and "WRONG" not in captured.out  # fmt: skip
    monkeypatch.setattr(compiling, "measure", full)
    with pytest.raises(OSError, match="No space"):
        compiling.attempt("name", 90, 0)
