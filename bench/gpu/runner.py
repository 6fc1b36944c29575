"""Runs parts, each in a process of its own, and writes what they said."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from ..common.compilations import VARIABLE, count_compilations
from .carry import CACHE, pack
from .outcomes import GOOD, UNFINISHED, read_outcomes, summary_of
from .parts import Part

ROOT = Path(__file__).resolve().parents[2]
# A part is not started with less than this left: importing torch and compiling one kernel would use
# it up.
LEAST_SECONDS = 15
TAIL = 2000
PEERS_TARGET = "peers"
TEST_SECONDS = 60  # a test that takes longer hangs
# Exit statuses: two of pytest, one of tests/support/lost_device.py.
INTERNAL_ERROR, NO_TESTS_LEFT, DEVICE_LOST = 3, 5, 70


class Runner:
    """Runs parts, and writes what they said.

    Attributes:
        out: folder of results.
        tar: file that `pack` writes after each part, or None.
        deadline: of all parts, on the monotonic clock.
    """

    def __init__(
        self, out: Path, peers: Path | None, seconds: float, dry_run: bool, tar: Path | None = None
    ) -> None:
        self.out, self.peers, self.dry_run, self.tar = out, peers, dry_run, tar
        self.deadline = monotonic() + seconds
        self.running: list[tuple[Part, subprocess.Popen, float]] = []

    def run(self, part: Part) -> None:
        """Runs a part to its end, or starts it when it is a background part."""
        left = self.deadline - monotonic()
        if part.needs_peers and self.peers is None:
            self._finish(part, "skipped", 0.0, "no --peers")
        elif left < LEAST_SECONDS:
            self._finish(part, "no time", 0.0, f"{left:.0f} s left")
        else:
            self.wait(part.waits)
            for suffix in ("result.json", "compilations.jsonl"):
                self._file(part, suffix).unlink(missing_ok=True)
            self.running.append((part, self._start(part), monotonic()))
            if not part.background:
                self._end(*self.running[-1])

    def wait(self, names: tuple[str, ...] | None = None) -> None:
        """Waits for the background parts of these names, or for all."""
        for each in list(self.running):
            if names is None or each[0].name in names:
                self._end(*each)

    def kill(self) -> None:
        """Ends what still runs."""
        for _, process, _ in self.running:
            _kill(process)

    def record(self, part: Part) -> dict[str, Any] | None:
        """Record of a part, of this call or an earlier one."""
        path = self.out / f"{part.name}.json"
        if not path.is_file():
            return None
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return record if record["dry_run"] == self.dry_run else None

    def finished(self, part: Part) -> bool:
        """True if an earlier call completed this part."""
        record = self.record(part)
        return record is not None and record["status"] == "ok"

    def forget(self, part: Part) -> None:
        """Drops what earlier calls know of the tests of a part."""
        self.outcomes(part).unlink(missing_ok=True)

    def outcomes(self, part: Part) -> Path:
        """The file of `bench.gpu.outcomes`; a dry run proves nothing of a real one."""
        return self._file(part, "dry.jsonl" if self.dry_run else "tests.jsonl")

    def arguments(self, part: Part) -> list[str]:
        """Of python."""
        folder = self._peers_folder()
        values = {
            "{json}": [str(self._file(part, "result.json"))],
            "{peers}": ["--peers", str(folder)] if folder is not None else [],
            "{unpack}": ["--unpack", str(self.peers), "--target", str(self.out / PEERS_TARGET)],
        }
        arguments = [word for one in part.arguments for word in values.get(one, [one])]
        # Tests spend most of their time in the compiler, on one core each.
        if part.tests and not self.dry_run and importlib.util.find_spec("xdist") is not None:
            jobs = min(12, os.cpu_count() or 1)
            # Each lost device takes a worker with it.
            arguments += ["-n", str(jobs), "--dist", "worksteal", "--max-worker-restart", "1000"]
        return arguments

    def _file(self, part: Part, suffix: str) -> Path:
        return self.out / f"{part.name}.{suffix}"

    def _peers_folder(self) -> Path | None:
        """Folder to load peers from: the unpacked one where there is one, else the given one."""
        unpacked = self.out / PEERS_TARGET
        return unpacked if unpacked.is_dir() else self.peers

    def _start(self, part: Part, again: bool = False) -> subprocess.Popen:
        """The process of a part; again: for the tests that are left, its process ended early."""
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        # Processes that tests start elsewhere find this checkout as well.
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
        environment.setdefault("TRITON_CACHE_DIR", str(self.out / CACHE))
        environment[VARIABLE] = str(self._file(part, "compilations.jsonl"))
        if self.dry_run:
            environment |= {"CUDA_VISIBLE_DEVICES": ""}
        if part.tests:
            environment["OMP_NUM_THREADS"] = "1"  # as many processes as cores
            environment["QUIRE_TEST_OUTCOMES"] = str(self.outcomes(part))
            environment["QUIRE_TEST_SECONDS"] = str(TEST_SECONDS * (4 if self.dry_run else 1))
            environment["QUIRE_TESTS_DONE"] = str(self._write_done(part, again))
        if (folder := self._peers_folder()) is not None:
            environment["QUIRE_PEERS"] = str(folder)
        with open(self._file(part, "log"), "a" if again else "w", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, *self.arguments(part)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _write_done(self, part: Part, again: bool) -> Path:
        """A file of the tests that are not to be repeated: good ones of an earlier call, and
        whatever was started in this one.
        """
        outcomes = read_outcomes(self.outcomes(part))
        done = [test for test, outcome in outcomes.items() if again or outcome in GOOD]
        file = self._file(part, "done")
        file.write_text("".join(f"{test}\n" for test in done), encoding="utf-8")
        return file

    def _end(self, part: Part, process: subprocess.Popen, start: float) -> None:
        """Waits for a part until its limit, and writes its record."""
        deadline = min(start + part.limit, self.deadline)
        known = -1
        status = None
        self.running.remove((part, process, start))
        while True:
            self.running.append((part, process, start))  # to be ended if this wait is
            try:
                process.wait(max(0.0, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                status = "time limit"
                _kill(process)
            self.running.remove((part, process, start))
            outcomes = read_outcomes(self.outcomes(part)) if part.tests else {}
            ended = process.returncode in (DEVICE_LOST, INTERNAL_ERROR)
            early = ended or UNFINISHED in outcomes.values()
            if not part.tests or status is not None or not early or len(outcomes) == known:
                break
            # A lost device, a crash or a hang cost one test; the others go on in another process.
            known = len(outcomes)
            process = self._start(part, again=True)
        tests = summary_of(outcomes) if part.tests else None
        code = process.returncode
        if tests is not None and code in (0, NO_TESTS_LEFT):
            code = 1 if tests["bad"] or not tests["counts"] else 0
        status = status or ("ok" if code == 0 else f"exit status {code}")
        log = self._file(part, "log").read_text(encoding="utf-8", errors="replace")
        self._finish(part, status, monotonic() - start, log[-TAIL:], tests)

    def _finish(
        self, part: Part, status: str, seconds: float, tail: str, tests: dict | None = None
    ) -> None:
        """Writes OUT/<part>.json: whatever the part wrote itself is in it, even when it was ended."""
        own = self._file(part, "result.json")
        try:
            result = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else None
        except json.JSONDecodeError:
            result = None  # ended while writing
        compilations = self._file(part, "compilations.jsonl")
        record: dict[str, Any] = {
            "part": part.name, "status": status, "seconds": round(seconds, 1), "dry_run": self.dry_run,
            "kernels": count_compilations(compilations), "tests": tests, "tail": tail, "result": result,
        }  # fmt: skip
        for file in (own, compilations, self._file(part, "done")):
            file.unlink(missing_ok=True)
        (self.out / f"{part.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # fmt: skip
        print(summary(record), flush=True)
        if self.tar is not None and (left_out := pack(self.out, self.tar)):
            print(f"    {left_out} compiled kernels do not fit into {self.tar}", flush=True)


def summary(record: dict[str, Any]) -> str:
    """One line, and where a part did not end well its bad tests and the end of its output."""
    tests, kernels = record["tests"], record["kernels"]
    counts = tests["counts"] if tests else {}
    words = [record["status"], *(f"{n} {outcome}" for outcome, n in sorted(counts.items()))]
    if kernels["compiled"] or kernels["hits"]:
        words.append(f"{kernels['compiled']} kernels compiled, {kernels['hits']} found compiled")
    line = f"{record['part']:16} {record['seconds']:6.1f} s  {', '.join(words)}"
    if record["status"] == "ok":
        return line
    bad = [f"    bad: {test}" for test in (tests["bad"][:20] if tests else [])]
    return "\n".join([line, *bad, *(f"    {text}" for text in record["tail"].splitlines()[-12:])])


def _kill(process: subprocess.Popen) -> None:
    """Ends a part and the processes that it started; they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
