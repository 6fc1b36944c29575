"""Time quire's kernels and every importable peer side by side, in one process, on the same tensors.

    python -m bench.kernels --only "gemma-4-31b" --seconds 120 --json kernels.json
    python -m bench.kernels --peers DIR --impl quire,flashinfer,fa3

Cases are attention over keys and values, and the latent operators of DeepSeek-V4 and V3
(`bench.cases.shapes`). Each result is compared with the float64 result of a sample of rows before
it is timed (written rows: with those of ``impl="torch"``). A wrong one is reported and not timed; a
wrong one of ours makes the exit status 1.

Times are those of CUDA-graph replays (median, 20th and 80th percentile). Calls rotate over copies
of all tensors, so that nothing is read from a warm L2 cache. What depends on lengths alone is
prepared before (FlashInfer's plan(), block masks), and peers that cannot read pages get contiguous
keys; the notes say which. No peer here reads the e4m3 pages of cases with /fp8 in their name.

Columns: ms (median and percentiles); GB/s of the bytes that must move and TFLOP/s of the visible
pairs; each in % of the copy and the matmul rate measured in this run; time over the best peer's.
--json is written after each case.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.kernels.__main__")

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quire.models.command import Parser, integer, number, output_file, program
from quire.models.device import find_device

from ..cases import shapes
from ..cases.expected import expect
from ..cases.problem import make_problem
from ..cases.shapes import Case
from ..common.floors import device_rates
from ..common.results import describe_machine, machine_lines, one_line, table, write_json
from ..common.timing import time_checked
from ..common.workers import Workers
from ..peers.find import find_peers
from ..peers.peer import Peer, Unsupported

SCHEMA = 1
SETS: dict[str, Callable[[], list[Case]]] = {
    "headline": shapes.main_cases,
    "attention": lambda: [c for c in shapes.main_cases() if c.shape.op == "attention"],
    "latents": lambda: [c for c in shapes.main_cases() if c.shape.op != "attention"],
    "all": shapes.all_cases,
    "tiny": shapes.tiny_cases,
    "tiny-latents": lambda: [c for c in shapes.tiny_cases() if c.shape.op != "attention"],
}


class DeviceLost(Exception):
    """The GPU does not answer any more, after an illegal access for example."""


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    device = find_device(args.device)
    name = args.set or ("headline" if device.type == "cuda" else "tiny")
    skipped = set(SETS[args.skip]()) if args.skip else set()
    cases = [case for case in SETS[name]() if args.only in case.name and case not in skipped]
    if not cases:
        of = f"of the name of a case of {name!r}"
        raise ValueError(f"only: expected part {of}, got {args.only!r}")
    if args.compile:
        return compile_all(cases, device, args)
    try:
        result = run(cases, device, args)
    except DeviceLost as error:
        print(f"error: the device is lost: {error}", file=sys.stderr)
        return 3
    print(report(result))
    return 1 if any(row["ours"] and row["wrong"] for row in result["rows"]) else 0


def run(cases: list[Case], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Measure cases until they or the seconds are spent; returns the dictionary of --json.

    Raises:
        DeviceLost: after what was measured is written.
    """
    peers, missing = wanted_peers(args.impl, args.peers)
    rates = dataclasses.asdict(device_rates(device, torch.bfloat16))
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": describe_machine(device),
        "rates": rates,
        "peers": {peer.name: {"version": peer.version, "note": peer.note} for peer in peers},
        "missing": missing,
        "rows": [],
        "not_run": [],
    }
    print(header(result), flush=True)
    start = perf_counter()
    for i, case in enumerate(cases):
        if args.seconds is not None and perf_counter() - start > args.seconds:
            result["not_run"] += [case.name for case in cases[i:]]
            break
        try:
            result["rows"] += run_case(case, peers, device, rates, args.per_call)
        except torch.OutOfMemoryError:
            result["not_run"].append(case.name)
        finally:
            write_json(args.json, result, final=False)
        print(f"{perf_counter() - start:6.1f} s  {case.name}", flush=True)
    write_json(args.json, result)
    return result


def wanted_peers(impl: str | None, folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """The implementations that --impl names (None: all), and {name: reason} of missing ones."""
    found, missing = find_peers(folder)
    names = [peer.name for peer in found]
    wanted = names if impl is None else impl.split(",")
    if unknown := sorted(set(wanted) - set(names) - set(missing)):
        raise ValueError(f"impl: expected some of {sorted(names)}, got {unknown}")
    return [peer for peer in found if peer.name in wanted], missing


def compile_all(cases: list[Case], device: torch.device, args: argparse.Namespace) -> int:
    """Make each call once in several processes, so that Triton's cache has its kernels when they
    are timed. Failures are printed; the timed run judges them.
    """
    wanted_peers(args.impl, args.peers)  # refuses unknown names
    start = perf_counter()
    work = [(case, str(device), args.impl, args.peers) for case in cases]
    with Workers(args.compile) as pool:
        found = list(pool.map(compile_case, *zip(*work, strict=True)))
    failures = [text for texts in found for text in texts]
    print(*failures, f"{len(cases)} cases called once in {perf_counter() - start:.1f} s", sep="\n")
    write_json(args.json, {"schema": SCHEMA, "cases": len(cases), "failures": failures})
    return 0


def compile_case(case: Case, device: str, impl: str | None, folder: Path | None) -> list[str]:
    """Make the first call of each implementation that ``impl`` names; returns the failures."""
    failures = []
    for peer in wanted_peers(impl, folder)[0]:
        try:
            if case.shape.op in peer.ops:
                peer.calls(make_problem(case, torch.device(device), copies=1))[0]()
        except OSError:  # a full disk
            raise
        except Exception as error:
            failures.append(f"{case.name} {peer.name}: {one_line(error)}")
    return failures


def run_case(
    case: Case, peers: list[Peer], device: torch.device, rates: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """One row for each implementation of the case's operator: times, or why there are none.

    Raises:
        DeviceLost.
    """
    problem = make_problem(case, device, copies=2 if device.type == "cpu" else None)
    expected = expect(problem)
    rows = []
    for peer in (peer for peer in peers if case.shape.op in peer.ops):
        row: dict[str, Any] = {"case": case.name, "impl": peer.name, "ours": peer.ours}
        row |= {"wrong": None, "skipped": None}
        try:
            timing = time_checked(peer.calls(problem), expected, device, seconds)
            if isinstance(timing, str):
                row["wrong"] = timing
            else:
                p50, p20, p80 = (1e3 * each for each in timing[:3])
                row |= {"ms": p50, "ms_p20": p20, "ms_p80": p80, "copies": problem.copies}
        except Unsupported as reason:
            row["skipped"] = str(reason)
        except OSError:  # a full disk says nothing of results
            raise
        except Exception as error:
            row["wrong" if peer.ours else "skipped"] = one_line(error)
            try:
                torch.zeros(1, device=device).item()  # waits for the device
            except RuntimeError:
                raise DeviceLost(str(error)) from error
        rows.append(row)
    timed = [row for row in rows if "ms" in row]
    others = [row["ms"] for row in timed if not row["ours"]]
    for row in timed:
        bytes_per_s, flops_per_s = (1e3 * n / row["ms"] for n in (case.num_bytes, case.flops))
        row["gb_per_s"], row["tflop_per_s"] = bytes_per_s / 1e9, flops_per_s / 1e12
        row["copy_share"] = bytes_per_s / rates["copy_bytes_per_s"]
        row["matmul_share"] = flops_per_s / rates["matmul_flops_per_s"]
        row["over_best_peer"] = row["ms"] / min(others) if others else None
    return rows


def header(result: dict[str, Any]) -> str:
    rates = result["rates"]
    lines = [
        machine_lines(result["machine"]),
        f"rates     copy {rates['copy_bytes_per_s'] / 1e9:.4g} GB/s read + written, "
        f"matmul {rates['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s",
    ]
    for name, peer in result["peers"].items():
        lines.append(f"present   {name} {peer['version']} ({peer['note']})")
    lines += [f"missing   {name} ({why})" for name, why in result["missing"].items()]
    return "\n".join(lines)


COLUMNS = (
    ("case", "case", ""),
    ("impl", "impl", ""),
    ("ms p50", "ms", ".4g"),
    ("ms p20", "ms_p20", ".4g"),
    ("ms p80", "ms_p80", ".4g"),
    ("GB/s", "gb_per_s", ".0f"),
    ("% of copy", "copy_share", ".0f", 100),
    ("TFLOP/s", "tflop_per_s", ".3g"),
    ("% of matmul", "matmul_share", ".0f", 100),
    ("time of best peer's", "over_best_peer", ".2f"),
)


def report(result: dict[str, Any]) -> str:
    """Times as aligned text; below them what was wrong, skipped or not run."""
    lines = [table([row for row in result["rows"] if "ms" in row], COLUMNS)]
    for row in (row for row in result["rows"] if "ms" not in row):
        why = f"WRONG: {row['wrong']}" if row["wrong"] else f"skipped: {row['skipped']}"
        lines.append(f"{row['case']}  {row['impl']}  {why}")
    if result["not_run"]:
        lines.append(f"out of time or memory: {len(result['not_run'])} cases not run")
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser("bench.kernels", __doc__)
    add = parser.add_argument
    add("--set", choices=SETS, help="cases; default: headline, on a CPU tiny")
    add("--skip", choices=SETS, help="leave out the cases of this set")
    add("--only", default="", metavar="TEXT", help="cases whose name contains this")
    add("--impl", metavar="A,B", help="implementations; default: all that are there")
    add("--peers", type=Path, metavar="DIR", help="unpacked wheels of implementations")
    add("--device", help="torch device; default: cuda where there is one, else cpu")
    add("--seconds", type=number(), metavar="S", help="start no case after this time")
    add("--per-call", type=number(), default=0.2, metavar="S", help="timing of one implementation")
    once = "call each case once in N processes, so that kernels are compiled; time nothing"
    add("--compile", type=integer(most=1024), metavar="N", help=once)
    add("--json", type=output_file, metavar="FILE", help="write all numbers, after each case")
    return parser
