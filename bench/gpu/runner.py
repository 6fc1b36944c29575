"""Run parts, each in a process of its own, and record their results."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from .parts import DRY_RUN_FACTOR, Part

ROOT = Path(__file__).resolve().parents[2]
TAIL = 2000
TEST_SECONDS = 80  # a test that takes longer hangs; compilers take most of it
# Exit statuses: two of pytest, one of tests/support/lost_device.py.
INTERNAL_ERROR, NO_TESTS_LEFT, DEVICE_LOST = 3, 5, 70
UNFINISHED = "unfinished"
GOOD = ("passed", "skipped")


@dataclass
class Running:
    part: Part
    process: subprocess.Popen
    start: float


class Runner:
    """Run parts; the record of each is ``out``/<part>.json.

    Args:
        peers: folder of peers that are not installed.
    """

    def __init__(self, out: Path, peers: Path | None, dry_run: bool):
        self.out, self.peers, self.dry_run = out, peers, dry_run
        self.running: list[Running] = []

    def run(self, part: Part) -> None:
        """Run a part to its end, or start a background part."""
        self.wait(part.waits)
        self._file(part, "result.json").unlink(missing_ok=True)
        self.running.append(Running(part, self._start(part), monotonic()))
        if not part.background:
            self._end(self.running[-1])

    def wait(self, names: tuple[str, ...] | None = None) -> None:
        """Wait for the background parts of these names, or for all."""
        for one in list(self.running):
            if names is None or one.part.name in names:
                self._end(one)

    def kill(self) -> None:
        for one in self.running:
            _kill(one.process)

    def is_done(self, part: Part) -> bool:
        """True where this call or an earlier one ran the part to a good end."""
        path = self._file(part, "json")
        return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["status"] == "ok"

    def arguments(self, part: Part) -> list[str]:
        values = {
            "{json}": [str(self._file(part, "result.json"))],
            "{peers}": ["--peers", str(self.peers)] if self.peers is not None else [],
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

    def _start(self, part: Part, again: bool = False) -> subprocess.Popen:
        """Start the process of a part; again: a further one, for the tests that are left."""
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        # Processes that tests start elsewhere find this checkout as well.
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
        environment.setdefault("TRITON_CACHE_DIR", str(self.out / "triton"))
        if self.dry_run:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if part.tests:
            seconds = TEST_SECONDS * (DRY_RUN_FACTOR if self.dry_run else 1)
            environment |= {
                "OMP_NUM_THREADS": "1",  # as many processes as cores
                "QUIRE_TEST_OUTCOMES": str(self._file(part, "jsonl")),
                "QUIRE_TEST_SECONDS": str(seconds),
                "QUIRE_TESTS_DONE": str(self._write_done(part, again)),
            }
        if self.peers is not None:
            environment["QUIRE_PEERS"] = str(self.peers)
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
        """Write the tests not to run: good ones of an earlier call, all started ones of this."""
        outcomes = read_outcomes(self._file(part, "jsonl"))
        done = [test for test, outcome in outcomes.items() if again or outcome in GOOD]
        file = self._file(part, "done")
        file.write_text("".join(f"{test}\n" for test in done), encoding="utf-8")
        return file

    def _end(self, one: Running) -> None:
        """Wait for a part until its limit, and write its record."""
        part, known, status = one.part, -1, None
        outcomes: dict[str, str] = {}
        while True:
            try:
                one.process.wait(max(0.0, one.start + part.limit - monotonic()))
            except subprocess.TimeoutExpired:
                status = "time limit"
                _kill(one.process)
            if part.tests:
                outcomes = read_outcomes(self._file(part, "jsonl"))
            early = one.process.returncode in (DEVICE_LOST, INTERNAL_ERROR)
            early = early or UNFINISHED in outcomes.values()
            if not part.tests or status is not None or not early or len(outcomes) == known:
                break
            # A lost device, a crash or a hang cost one test; the others go on in another process.
            known = len(outcomes)
            one.process = self._start(part, again=True)
        self.running.remove(one)
        tests, code = None, one.process.returncode
        if part.tests:
            bad = sorted(test for test, outcome in outcomes.items() if outcome not in GOOD)
            tests = {"counts": dict(Counter(outcomes.values())), "bad": bad}
            if code in (0, NO_TESTS_LEFT):
                code = 1 if bad or not outcomes else 0
        log = self._file(part, "log").read_text(encoding="utf-8", errors="replace")
        own = self._file(part, "result.json")
        record = {
            "part": part.name,
            "status": status or ("ok" if code == 0 else f"exit status {code}"),
            "seconds": round(monotonic() - one.start, 1),
            "tests": tests,
            "tail": log[-TAIL:],
            "result": json.loads(own.read_text(encoding="utf-8")) if own.is_file() else None,
        }
        own.unlink(missing_ok=True)
        self._file(part, "done").unlink(missing_ok=True)
        self._file(part, "json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(summary(record), flush=True)


def read_outcomes(path: Path) -> dict[str, str]:
    """{test: outcome}, in the order of their starts, of the lines that
    tests/support/lost_device.py writes at each start and end.
    """
    outcomes: dict[str, str] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # ended while writing
            row = json.loads(line)
            outcomes[row["test"]] = row["outcome"]
    return outcomes


def summary(record: dict[str, Any]) -> str:
    """One line; of a failed part also its bad tests and the end of its output."""
    tests = record["tests"] or {"counts": {}, "bad": []}
    counts = (f"{count} {outcome}" for outcome, count in sorted(tests["counts"].items()))
    words = ", ".join([record["status"], *counts])
    line = f"{record['part']:16} {record['seconds']:6.1f} s  {words}"
    if record["status"] == "ok":
        return line
    bad = [f"    bad: {test}" for test in tests["bad"][:20]]
    return "\n".join([line, *bad, *(f"    {text}" for text in record["tail"].splitlines()[-12:])])


def _kill(process: subprocess.Popen) -> None:
    """End a part and the processes that it started, which are its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
