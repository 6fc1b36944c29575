"""Everything that needs a GPU, in one unattended command: correctness first, then what kernels and
models measure, best value first.

    python -m bench.gpu --out results              all parts, nine minutes at most
    python -m bench.gpu --plan                     parts and their limits, nothing runs
    python -m bench.gpu --parts kernels,layers     only these
    python -m bench.gpu --dry-run --out results    the same parts with tiny shapes on a CPU

Each part is a process of its own with a limit of its own, so a crash or a hang loses that part
only. Its result is written to OUT/<part>.json when it ends, its output to OUT/<part>.log as it
runs. A second call skips parts that ended well, so a run that was cut short goes on where it
stopped; --force repeats them. Exit status 1 if a part failed or had no time.

Tile shapes are measured by another call, ``python -m bench.tune --seconds 540 --json OUT/tune.json
--write OUT``, the most valuable entries first; what it writes are sources for ``kernels/``, to be
compiled by ``python -m bench.static --all`` before they are taken over.

Needs a checkout with torch, triton, numpy and pytest (``pip install -e . --no-deps
--no-build-isolation``). Peers: installed packages, or the files of --peers (`bench.peers.folder`),
which are unpacked and compiled beside the first tests.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.gpu")

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from quire.models.command import Parser, number, program

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 530
# A part is not started with less than this left: importing torch and compiling one kernel would use
# it up.
LEAST_SECONDS = 15
# Limits are of a GPU's time. A dry run checks that parts work, however slow or busy its CPU is.
DRY_RUN_FACTOR = 4
TAIL = 2000
PEERS_TARGET = "peers"
# All but FlexAttention, whose compilation takes long for each case.
COMPARED = "quire,quire-in-step,flashinfer,fa3,vllm-triton,sdpa"
LATENT_COMPARED = "quire,quire-in-step,flashmla,flashinfer-mla"


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        limit: seconds it may take.
        what: for the plan.
        arguments: of python; {json}, {peers}, {unpack}, {target} are replaced.
        background: runs beside the parts behind it, until one that waits for it.
        waits: whether it waits for background parts.
        modules: packages it needs; without them it is skipped, which is not a failure.
        tests: whether it is a run of pytest.
    """

    name: str
    limit: float
    what: str
    arguments: tuple[str, ...]
    background: bool = False
    waits: bool = False
    modules: tuple[str, ...] = ()
    tests: bool = False


def plan(dry_run: bool) -> list[Part]:
    """The parts in order. In a dry run their limits are `DRY_RUN_FACTOR` times as long."""

    def size(real: str, dry: str) -> tuple[str, ...]:
        return tuple((dry if dry_run else real).split())

    kernels = ("-m", "bench.kernels", "--json", "{json}", "{peers}")
    # The process that runs the tests imports the package under test from the checkout.
    pytest = ("-m", "pytest", "-vv", "-rs", "--color=no", "-p", "no:cacheprovider", "-m", "gpu")
    parts = [
        Part("environment", 40, "machine, versions, copy and matmul rates",
             ("-m", "bench.environment", "--json", "{json}", "{peers}")),
        Part("peers", 170, "unpack and load peers, compile FlashInfer's kernels",
             ("-m", "bench.environment", "--json", "{json}", "{unpack}"), background=True),
        Part("correctness", 130, "kernels and engine on the device against float64: poison, graphs, repeated runs, no host sync",
             (*pytest, "tests/gpu", "--ignore=tests/gpu/test_gpu_peers.py"), tests=True),
        Part("kernels", 85, "attention kernels and peers side by side, the cases that matter most",
             (*kernels, *size(f"--set attention --impl {COMPARED} --seconds 62", "--set tiny --skip tiny-latents --only decode --per-call 0.01 --impl quire,quire-in-step,sdpa")), waits=True),
        Part("latents", 75, "kernels of DeepSeek-V4 and V3, and FlashMLA",
             (*kernels, *size(f"--set latents --impl {LATENT_COMPARED} --seconds 58", "--set tiny-latents --only decode --per-call 0.01 --impl quire")), waits=True),
        Part("layers", 50, "six layers of gemma-4-31b end to end, allocator's share of a step",
             ("-m", "bench.layers", "--json", "{json}", *size("", "--model gemma4-tiny --batch 2 --context 40 --chunk 32 --steps 2 --check-length 40 --cache-gib 0.01"))),
        Part("oracle", 40, "peers as a second, independent oracle",
             (*pytest, "tests/gpu/test_gpu_peers.py"), waits=True, tests=True),
        Part("kernels-rest", 50, "more batches, contexts, shards and page sizes, as far as time goes",
             (*kernels, *size(f"--set all --skip headline --impl {COMPARED},flashmla,flashinfer-mla --per-call 0.1 --seconds 32", "--set tiny --only mixed --per-call 0.01 --impl quire,sdpa")), waits=True),
        Part("prefill-decode", 35, "bench.prefill_decode on the device",
             ("-m", "bench.prefill_decode", "--json", "{json}", *size("--no-baseline --check 4", "--model gemma4-tiny --limit 1 --scale 0.1 --no-baseline --check 1")),
             modules=("safetensors", "tqdm")),
        Part("flex", 25, "FlexAttention beside quire",
             (*kernels, *size("--set attention --impl quire,flex --seconds 20", "--set tiny --skip tiny-latents --only decode --per-call 0.01 --impl quire,flex"))),
    ]  # fmt: skip
    factor = DRY_RUN_FACTOR if dry_run else 1
    return [replace(part, limit=part.limit * factor) for part in parts]


class Runner:
    """Runs parts, and writes what they said.

    Attributes:
        out: folder of results.
        deadline: of all parts, on the monotonic clock.
    """

    def __init__(self, out: Path, peers: Path | None, seconds: float, dry_run: bool) -> None:
        self.out, self.peers, self.dry_run = out, peers, dry_run
        self.deadline = monotonic() + seconds
        self.running: list[tuple[Part, subprocess.Popen, float]] = []

    def run(self, part: Part) -> None:
        """Runs a part to its end, or starts it when it is a background part."""
        lacking = [name for name in part.modules if importlib.util.find_spec(name) is None]
        left = self.deadline - monotonic()
        if lacking:
            self._finish(part, "skipped", 0.0, f"needs {', '.join(lacking)}")
        elif part.background and self.peers is None:
            self._finish(part, "skipped", 0.0, "no --peers")
        elif left < LEAST_SECONDS:
            self._finish(part, "no time", 0.0, f"{left:.0f} s left")
        else:
            if part.waits:
                self.wait()
            start = monotonic()
            process = self._start(part)
            self.running.append((part, process, start))
            if not part.background:
                self._end(*self.running[-1])

    def wait(self) -> None:
        """Waits for background parts."""
        while self.running:
            self._end(*self.running[0])

    def kill(self) -> None:
        """Ends what still runs."""
        for _, process, _ in self.running:
            _kill(process)

    def _start(self, part: Part) -> subprocess.Popen:
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        if self.dry_run:
            environment |= {"QUIRE_DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": ""}
        if part.tests:
            environment["OMP_NUM_THREADS"] = "1"  # as many processes as cores
        if (folder := self._peers_folder()) is not None:
            environment["QUIRE_PEERS"] = str(folder)
        self._result(part).unlink(missing_ok=True)
        with open(self.out / f"{part.name}.log", "w", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, *self._arguments(part)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _arguments(self, part: Part) -> list[str]:
        folder = self._peers_folder()
        values = {
            "{json}": [str(self._result(part))],
            "{peers}": ["--peers", str(folder)] if folder is not None else [],
            "{unpack}": ["--unpack", str(self.peers), "--target", str(self.out / PEERS_TARGET)],
        }
        arguments = [word for one in part.arguments for word in values.get(one, [one])]
        # Tests spend most of their time in the compiler, on one core each.
        if part.tests and not self.dry_run and importlib.util.find_spec("xdist") is not None:
            arguments += ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal"]
        return arguments

    def _peers_folder(self) -> Path | None:
        """Where peers can be loaded from: the unpacked folder where there is one, else what was
        given.
        """
        unpacked = self.out / PEERS_TARGET
        return unpacked if unpacked.is_dir() else self.peers

    def _result(self, part: Part) -> Path:
        return self.out / f"{part.name}.result.json"

    def _end(self, part: Part, process: subprocess.Popen, start: float) -> None:
        limit = min(start + part.limit, self.deadline) - monotonic()
        status = None
        try:
            process.wait(max(0.0, limit))
        except subprocess.TimeoutExpired:
            status = "time limit"
            _kill(process)
        self.running.remove((part, process, start))
        status = status or (
            "ok" if process.returncode == 0 else f"exit status {process.returncode}"
        )
        log = (self.out / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
        self._finish(part, status, monotonic() - start, log[-TAIL:], _counts(log) if part.tests else None)  # fmt: skip

    def _finish(
        self, part: Part, status: str, seconds: float, tail: str, tests: dict | None = None
    ) -> None:
        """Writes OUT/<part>.json: whatever the part wrote itself is in it, even when it was ended."""
        own = self._result(part)
        try:
            result = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else None
        except json.JSONDecodeError:
            result = None  # ended while writing
        own.unlink(missing_ok=True)
        record: dict[str, Any] = {
            "part": part.name, "status": status, "seconds": round(seconds, 1), "dry_run": self.dry_run,
            "tests": tests, "tail": tail, "result": result,
        }  # fmt: skip
        (self.out / f"{part.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # fmt: skip
        print(summary(record), flush=True)


def finished(out: Path, part: Part, dry_run: bool) -> bool:
    """Whether an earlier call ran this part to a good end."""
    path = out / f"{part.name}.json"
    if not path.is_file():
        return False
    record = json.loads(path.read_text(encoding="utf-8"))
    return record["status"] == "ok" and record["dry_run"] == dry_run


def summary(record: dict[str, Any]) -> str:
    """One line, and the end of its output where a part did not end well."""
    counts = record["tests"] or {}
    tests = "".join(f", {n} {name}" for name, n in sorted(counts.items()))
    line = f"{record['part']:16} {record['seconds']:6.1f} s  {record['status']}{tests}"
    if record["status"] == "ok":
        return line
    return "\n".join([line, *(f"    {text}" for text in record["tail"].splitlines()[-12:])])


def _counts(log: str) -> dict[str, int]:
    """Tests by outcome, from the lines of ``pytest -v`` with or without workers, so that a run that
    was ended counts too.
    """
    outcomes = re.findall(r"^(?:\[gw\d+\] \[[ \d]+%\] (\w+) tests/|tests/\S+.* (PASSED|FAILED|ERROR|SKIPPED)\b)", log, re.MULTILINE)  # fmt: skip
    return dict(Counter((a or b).lower() for a, b in outcomes))


def _kill(process: subprocess.Popen) -> None:
    """Ends a part and the processes that it started; they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def print_plan(parts: list[Part], seconds: float) -> None:
    """The time plan: when a part starts at the latest if all before it use up their limits."""
    print(f"{'latest start':>12}  {'limit':>6}  part")
    start = 0.0
    for part in parts:
        beside = " (beside the next parts)" if part.background else ""
        print(f"{start:10.0f} s  {part.limit:4.0f} s  {part.name:16} {part.what}{beside}")
        start += 0 if part.background else part.limit
    print(f"{min(start, seconds):10.0f} s  in all, at most {seconds:.0f} s")


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    parts = plan(args.dry_run)
    seconds = args.seconds or SECONDS * (DRY_RUN_FACTOR if args.dry_run else 1)
    if args.parts:
        names = args.parts.split(",")
        unknown = sorted(set(names) - {part.name for part in parts})
        if unknown:
            raise ValueError(f"parts: expected some of {[p.name for p in parts]}, got {unknown}")
        parts = [part for part in parts if part.name in names]
    if args.plan:
        print_plan(parts, seconds)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    peers = args.peers if args.peers is not None else ROOT / ".peers"
    peers = peers.resolve() if peers.is_dir() and not (args.dry_run and args.peers is None) else None  # fmt: skip
    todo = [part for part in parts if args.force or not finished(out, part, args.dry_run)]
    for part in parts:
        if part not in todo:
            print(f"{part.name:16} finished earlier")
    print_plan(todo, seconds)
    runner = Runner(out, peers, seconds, args.dry_run)
    # Ended from outside, parts must not stay behind on the GPU.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for part in todo:
            runner.run(part)
        runner.wait()
    finally:
        runner.kill()
    records = [json.loads((out / f"{part.name}.json").read_text("utf-8")) for part in parts]
    return 0 if all(record["status"] in ("ok", "skipped") for record in records) else 1


def _parser() -> Parser:
    parser = Parser("bench.gpu", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench/out/gpu"), metavar="DIR", help="folder of results; default: bench/out/gpu")  # fmt: skip
    add("--parts", metavar="A,B", help="only these parts")
    add("--force", action="store_true", help="repeat parts that ended well")
    add("--peers", type=Path, metavar="DIR", help="folder of peers; default: .peers where there is one")  # fmt: skip
    add(
        "--seconds",
        type=number(above=True),
        help=f"for all parts; default: {SECONDS}, in a dry run {DRY_RUN_FACTOR} times that",
    )
    add("--dry-run", action="store_true", help="tiny shapes on a CPU")
    add("--plan", action="store_true", help="print parts and limits, run nothing")
    return parser
