"""Time tile shapes on this GPU, and print the entries of the tile tables that should change.

    python -m bench.tune              # every entry that a named shape uses, the most valuable first
    python -m bench.tune --only "DECODE[512]" --seconds 300 --json tune.json
    python -m bench.tune --dry-run    # on a CPU: two values of some entries, small cases

The tables are ``kernels/attention/tiles.py`` and ``kernels/latent/tiles.py``. Values that break a
rule of ``bench.static`` are not run. The others are checked against the float64 result, timed on
cases that use the entry, and ranked by the geometric mean of their times over those of the table's
value; one at least 2 % faster is taken. After ``--seconds`` no entry and no further case begins.

An entry may serve several architectures: run ``python -m bench.static --arch`` with all of them
afterwards.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.tune.__main__")

import argparse
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from time import perf_counter
from typing import Any

import torch

from quire.kernels.common import launching
from quire.kernels.common.arch import Arch
from quire.models.command import Parser, integer, number, output_file, program

from ..cases.expected import expect
from ..cases.problem import make_problem
from ..cases.shapes import Case, all_cases, tiny_cases
from ..common.results import aligned, describe_machine, one_line, write_json
from ..common.timing import time_checked
from ..peers.quire_calls import quire_calls
from ..static.compiling import problems, usage
from ..static.launches import record
from .entries import TileEntry, table_entries

GAIN = 0.02  # share of its time that a new value has to save
Row = dict[str, Any]


def refusals(
    entry: TileEntry, values: Sequence[Any], call: Callable[[], Any], arch: Arch, jobs: int
) -> list[str | None]:
    """Compile the first kernel of a call with each value; rules that each breaks, or None."""
    launches = []
    for value in values:
        with entry.using(value):
            launches.append(record(call, arch)[0])

    def refusal(launch: Any) -> str | None:
        try:
            return "; ".join(problems(usage(launch, arch))) or None
        except OSError:  # a full disk says nothing of the kernel
            raise
        except Exception as error:
            return f"does not compile: {one_line(error)}"

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(refusal, launches))


def measure(
    entry: TileEntry, values: Sequence[Any], cases: Sequence[Case], args: argparse.Namespace,
    arch: Arch, deadline: float = math.inf,
) -> list[Row]:  # fmt: skip
    """One row for each value: milliseconds on each case, or what is wrong with it.

    Args:
        values: values of the entry, the table's own first.
        cases: cases that use it; the first is timed even after the deadline.
        deadline: time on the clock of ``perf_counter``.
    """
    empty: Row = {"entry": entry.name, "wrong": None, "refused": None}
    rows = [{**empty, "config": value, "ms": {}} for value in values]
    for i, case in enumerate(cases):
        if i and perf_counter() > deadline:
            break
        with suppress(torch.OutOfMemoryError):
            time_case(rows, entry, case, args, arch if i == 0 and not args.dry_run else None)
    for row in rows:
        row["ratio"] = None
        if row["ms"] and not row["wrong"] and not rows[0]["wrong"]:
            logs = [math.log(ms / rows[0]["ms"][name]) for name, ms in row["ms"].items()]
            row["ratio"] = math.exp(sum(logs) / len(logs))
    return rows


def time_case(
    rows: list[Row], entry: TileEntry, case: Case, args: argparse.Namespace, arch: Arch | None
) -> None:
    """Put the times of one case into the rows; arch: compile for it first, None: do not."""
    device = torch.device("cpu" if args.dry_run else "cuda")
    problem = make_problem(case, device, copies=2 if args.dry_run else None)
    expected = expect(problem)
    impl = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else None
    calls = quire_calls(problem, in_step=case.phase == "prefill", impl=impl)
    if arch is not None:
        # The table's own value is what the others are compared with, whatever the rules say.
        others = [row["config"] for row in rows[1:]]
        reasons = refusals(entry, others, calls[0], arch, args.jobs)
        for row, reason in zip(rows[1:], reasons, strict=True):
            row["refused"] = reason
    for row in rows:
        if row["wrong"] or row["refused"]:
            continue
        with entry.using(row["config"]):
            try:
                timing = time_checked(calls, expected, device, args.per_call)
                if isinstance(timing, str):
                    row["wrong"] = timing
                else:
                    row["ms"][case.name] = 1e3 * timing.p50
            except OSError:  # a full disk says nothing of the value
                raise
            except Exception as error:  # a launch that the device refuses
                row["wrong"] = one_line(error)


def best(rows: list[Row]) -> Row:
    timed = [row for row in rows if row["ratio"] is not None]
    fastest = min(timed, key=lambda row: row["ratio"], default=rows[0])
    return fastest if timed and fastest["ratio"] < 1 - GAIN else rows[0]


def table(entry: TileEntry, rows: list[Row], taken: Row) -> str:
    """Values that were timed, fastest first."""
    cases = list(rows[0]["ms"])
    lines = [(entry.name, *(f"{case}, ms" for case in cases), "time of table's", "")]
    for row in sorted(rows, key=lambda r: r["ratio"] or math.inf):
        if row["refused"]:
            continue
        times = [f"{row['ms'][c]:.4g}" if c in row["ms"] else "-" for c in cases]
        ratio = row["wrong"] or ("-" if row["ratio"] is None else f"{row['ratio']:.3f}")
        mark = ("table " if row is rows[0] else "") + ("taken" if row is taken else "")
        lines.append((str(row["config"]), *times, ratio, mark))
    refused = sum(bool(row["refused"]) for row in rows)
    return "\n".join([*aligned(lines), f"{refused} values refused by the rules of bench.static"])


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        raise ValueError("device: expected a GPU, got none; --dry-run needs none")
    device = torch.device("cpu" if args.dry_run else "cuda")
    arch = launching.INTERPRETER_ARCH if args.dry_run else launching.arch_of(device)
    work = table_entries(tiny_cases() if args.dry_run else all_cases(), arch)
    work = {entry: cases for entry, cases in work.items() if args.only in entry.name}
    if not work:
        raise ValueError(f"only: expected part of an entry's name, got {args.only!r}")
    result: Row = {"machine": describe_machine(device), "rows": [], "not_run": []}
    changes, start = [], perf_counter()
    deadline = math.inf if args.seconds is None else start + args.seconds
    for entry, cases in work.items():
        if perf_counter() > deadline:
            result["not_run"].append(entry.name)
            continue
        values = entry.candidates(arch)[: 2 if args.dry_run else None]
        rows = measure(entry, values, cases, args, arch, deadline)
        taken = best(rows)
        print(f"{perf_counter() - start:6.1f} s\n{table(entry, rows, taken)}", flush=True)
        if taken is not rows[0]:
            changes.append(f"{entry.name} = {taken['config']}  # {taken['ratio']:.3f} of the time")
        for row in rows:
            config = row["config"] if isinstance(row["config"], tuple) else astuple(row["config"])
            result["rows"].append(row | {"config": config})
        write_json(args.json, result, final=False)
    write_json(args.json, result)
    print("\n".join(changes))
    if result["not_run"]:
        print(f"out of time: {', '.join(result['not_run'])}")
    return 1 if any(row["wrong"] for row in result["rows"]) else 0


def _parser() -> Parser:
    parser = Parser("bench.tune", __doc__)
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="entries whose name contains this")
    add("--seconds", type=number(), metavar="S", help="time to end in, about")
    add("--per-call", type=number(), default=0.1, metavar="S", help="for a value on a case")
    add("--jobs", type=integer(most=1024), default=os.cpu_count(), help="threads that compile")
    add("--json", type=output_file, metavar="FILE", help="write all numbers, after each entry")
    add("--dry-run", action="store_true", help="on a CPU: that everything runs; times mean nothing")
    return parser
