"""Measure tile shapes on this GPU, and name those that the ``select_config`` functions should give.

    python -m bench.tune              # every entry that a named shape uses, the most valuable first
    python -m bench.tune --only "decode 512" --seconds 300 --json tune.json
    python -m bench.tune --seconds 540 --json OUT/tune.json    # unattended
    python -m bench.tune --dry-run    # on a CPU: two tile shapes of some entries, small cases
    python -m bench.tune --dry-run --arch gfx942    # the same, of that architecture's entries

The tables (`bench.tune.entries`) are ``kernels/attention/tiles.py`` and ``kernels/latent/tiles.py``.
The new shapes are printed at the end, and copied there by hand.
The candidates of an entry are first compiled offline for this GPU's architecture, on all cores: what
spills, does not fit, or breaks another rule of ``bench.static`` is not run. The others are timed on
the cases of the named shapes that use the entry, each checked against the float64 result first, and
ranked by the geometric mean of their times over those of the table's own shape, which is timed in
the same run. Another shape is taken where it is at least 2 % faster.

After ``--seconds`` no entry is begun; of the entry in hand, what is not compiled is not tried, and
no further case is timed.

A table holds one entry for all architectures of a class (``Arch.tiles``). Run ``python -m bench.static --arch`` with the other architectures of its
class afterwards: an entry has to hold on these too.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.tune.__main__")

import argparse
import concurrent.futures
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quire.kernels.common import launching
from quire.kernels.common.arch import Arch, named
from quire.models.command import Parser, integer, number, output_file, program

from ..common.machine import describe_machine
from ..common.table import aligned
from ..common.timing import time_calls
from ..common.workers import Workers
from ..kernels.families import family_of
from ..static.limits import ARCHS
from .entries import Case, TableEntry, by_hand, table_entries, tiny_cases, tuned_cases

# A new shape has to be faster than the table's own by this much.
GAIN = 0.02


def compiled(entry: TableEntry, config: Any, arch: Arch) -> str | None:
    """Why a tile shape may not be used, by what it compiles to; None if it may."""
    from ..static import compiling

    for case in entry.static_cases(arch):
        with entry.using(config):
            row = compiling.attempt(case, arch.name, 0)
        if isinstance(row, str):
            return row
        if found := compiling.problems(row):
            return "; ".join(found)
    return None


def compile_all(
    entry: TableEntry,
    candidates: Sequence[Any],
    arch: Arch,
    pool: concurrent.futures.Executor,
    deadline: float = math.inf,
) -> list[str | None]:
    """`compiled` of each candidate, on several cores, as far as the time lasts.

    Args:
        entry: that they may replace.
        candidates: launch choices, the table's own first.
        arch: to compile for.
        pool: of processes.
        deadline: on the clock of ``perf_counter``.
    """
    # On a CPU this process interprets kernels; the processes that start here must compile them.
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        waiting = [pool.submit(compiled, entry, config, arch) for config in candidates]
        # The table's own is what the others are compared with: it is waited for.
        first = [waiting[0].result()]
        left = None if deadline == math.inf else max(0.0, deadline - perf_counter())
        concurrent.futures.wait(waiting, left)
        for future in waiting:
            future.cancel()
        return first + [f.result() if f.done() and not f.cancelled() else "out of time" for f in waiting[1:]]  # fmt: skip
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


def measure(
    entry: TableEntry,
    cases: Sequence[Case],
    candidates: Sequence[Any],
    device: torch.device,
    seconds: float,
    deadline: float = math.inf,
) -> list[dict[str, Any]]:
    """One row for each candidate: its milliseconds on each case, or what was wrong.

    Args:
        entry: that they may replace.
        cases: that use it; the first is timed even after the deadline.
        candidates: launch choices, the table's own first.
        device: to run on.
        seconds: timing of one candidate on one case.
        deadline: on the clock of ``perf_counter``.
    """
    rows: list[dict[str, Any]] = [
        {"entry": entry.name, "config": list(entry.values(c)), "ms": {}, "wrong": None}
        for c in candidates
    ]
    for i, case in enumerate(cases):
        if i and perf_counter() > deadline:
            break
        family = family_of(case)
        problem = family.make(case, device, 2 if device.type == "cpu" else None)
        expected = family.expect(problem)
        impl = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else None
        calls = entry.calls(problem, impl)
        for row, config in zip(rows, candidates, strict=True):
            if row["wrong"]:
                continue
            with entry.using(config):
                try:
                    row["wrong"] = expected.wrong(*calls[0]())
                    if row["wrong"] is None:
                        timing = time_calls(calls, device, seconds=seconds)
                        row["ms"][case.name] = 1e3 * timing.p50
                except OSError:  # a full disk says nothing of the shape
                    raise
                except Exception as error:  # a launch that the device refuses
                    row["wrong"] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    for row in rows:
        row["ratio"] = None
        if not row["wrong"] and not rows[0]["wrong"]:
            logs = [math.log(ms / rows[0]["ms"][name]) for name, ms in row["ms"].items()]
            row["ratio"] = math.exp(sum(logs) / len(logs))
    return rows


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row to take: the table's own, unless another is faster by `GAIN`."""
    timed = [row for row in rows if row["ratio"] is not None]
    fastest = min(timed, key=lambda row: row["ratio"], default=rows[0])
    return fastest if timed and fastest["ratio"] < 1 - GAIN else rows[0]


def run(args: argparse.Namespace, pool: concurrent.futures.Executor) -> int:
    """Tunes entry by entry; the exit status. pool: for `compile_all`."""
    device = torch.device("cpu" if args.dry_run else "cuda")
    arch = launching.INTERPRETER_ARCH
    if not args.dry_run:
        arch = launching.arch_of(device)
    elif args.arch:
        arch = named(args.arch)
    work = table_entries(tiny_cases() if args.dry_run else tuned_cases(), arch)
    work = {entry: cases for entry, cases in work.items() if args.only in entry.name}
    if not work:
        raise ValueError(f"only: expected part of an entry's name, got {args.only!r}")
    result: dict[str, Any] = {"machine": describe_machine(device), "rows": [], "refused": [], "not_run": []}  # fmt: skip
    chosen: dict[TableEntry, Any] = {}
    start = perf_counter()
    deadline = math.inf if args.seconds is None else start + args.seconds
    for entry, cases in work.items():
        if perf_counter() > deadline:
            result["not_run"].append(entry.name)
            continue
        candidates = entry.candidates(arch)
        if args.dry_run:
            narrower = 16 if candidates[0].block_n == 32 else 32
            candidates = [candidates[0], replace(candidates[0], block_n=narrower)]
        reasons = compile_all(entry, candidates, arch, pool, deadline)
        result["refused"] += [
            {"entry": entry.name, "config": list(entry.values(c)), "why": why}
            for c, why in zip(candidates, reasons, strict=True)
            if why
        ]
        # The table's own shape is what the others are compared with, whatever the rules say.
        fit = [c for i, c in enumerate(candidates) if i == 0 or not reasons[i]]
        rows = measure(entry, cases, fit, device, args.per_call, deadline)
        result["rows"] += rows
        taken = best(rows)
        print(f"{perf_counter() - start:6.1f} s\n{table(entry, rows, taken)}", flush=True)
        chosen[entry] = fit[rows.index(taken)]
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(by_hand(chosen, arch)))
    if result["not_run"]:
        print(f"out of time: {', '.join(result['not_run'])}")
    return 1 if any(row["wrong"] for row in result["rows"]) else 0


def table(entry: TableEntry, rows: list[dict[str, Any]], taken: dict[str, Any]) -> str:
    """Candidates of an entry, fastest first."""
    cases = list(rows[0]["ms"])
    lines = [
        (entry.name, *entry.columns, *cases, "of the table's"),
    ]
    for row in sorted(rows, key=lambda r: r["ratio"] or math.inf):
        marks = ("table " if row is rows[0] else "") + ("taken" if row is taken else "")
        times = [f"{row['ms'][c]:.4g}" if c in row["ms"] else "-" for c in cases]
        ratio = row["wrong"] or ("-" if row["ratio"] is None else f"{row['ratio']:.3f}")
        config = [str(int(value or 0)) for value in (*row["config"], 0, 0, 0)[: len(entry.columns)]]
        lines.append((marks, *config, *times, ratio))
    return "\n".join(aligned(lines))


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    if args.arch and not args.dry_run:
        raise ValueError("arch: expected --dry-run with it; a run on a GPU is for that GPU")
    if not args.dry_run and not torch.cuda.is_available():
        raise ValueError("device: expected a GPU, got none; --dry-run needs none")
    with Workers(args.jobs) as pool:
        return run(args, pool)


def _parser() -> Parser:
    parser = Parser("bench.tune", __doc__)
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="entries whose name contains this")
    add("--seconds", type=number(), metavar="S", help="time to end in, about")
    add("--per-call", type=number(), default=0.1, metavar="S", help="timing of one tile shape on one case")  # fmt: skip
    add("--jobs", type=integer(most=1024), default=os.cpu_count(), help="processes that compile")
    add("--json", type=output_file, metavar="FILE", help="write all numbers, after each entry")
    add("--dry-run", action="store_true", help="on a CPU: that everything runs; times mean nothing")
    add("--arch", choices=ARCHS, help="with --dry-run: whose entries, compiled for it; default: sm_90")  # fmt: skip
    return parser
