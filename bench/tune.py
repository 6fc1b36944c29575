"""Measure tile shapes of attention on this GPU, and write the table that ``select_config`` reads.

    python -m bench.tune                                   # every cell of the table that a named shape uses
    python -m bench.tune --only "decode 512" --seconds 300 --json tune.json
    python -m bench.tune --write                           # also write kernels/tile_tables.py
    python -m bench.tune --dry-run                         # on a CPU: two tile shapes of two cells, small cases

A cell of the table is a phase, a head_dim and, in decode, the rows of a query tile. Its candidates are first compiled offline for this GPU's
architecture, on all cores: what spills, does not fit, or breaks another rule of ``bench.static`` is not run. The others are timed on the
cases of the named shapes that use the cell, each checked against the float64 result first, and ranked by the geometric mean of their
times over those of the table's own entry, which is timed in the same run. Another entry is taken where it is at least 2 % faster. Then the
fastest shape is tried with the other ways of launching prefill: fresh rows by tensor descriptors, and programs that take tiles in turns.

The table holds one entry for all architectures of a class (`tile_class`); ``--write`` changes those of this GPU's class alone. Run
``python -m bench.static --all`` afterwards: an entry has to hold on the other architectures of its class too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quire.bench import shapes
from quire.bench.families import family_of
from quire.bench.machine import describe_machine
from quire.bench.peers import quire_calls
from quire.bench.text import aligned
from quire.bench.timing import time_calls
from quire.kernels import configs, paged, tile_tables
from quire.kernels.configs import Config, plan_decode, select_config, tile_class

TABLES = Path(tile_tables.__file__)
# A new entry has to be faster than the old one by this much.
GAIN = 0.02
STATIC_BLOCK_SIZES = (16, 128)
# The first architecture whose copies a tensor descriptor drives.
DESCRIPTOR_ARCH = 90
# Queries of the static cases that fill tiles of so many rows.
STATIC_QUERIES = {16: 1, 32: 8, 64: 16}


@dataclass(frozen=True)
class Cell:
    """An entry of the table: "prefill" or "decode", the head_dim it stands for, and the rows of a decode tile (else 0)."""

    phase: str
    head_dim: int
    rows: int = 0

    @property
    def name(self) -> str:
        """Readable, and unique."""
        return f"{self.phase} {self.head_dim}" + (f" x{self.rows}" if self.rows else "")

    def current(self, arch: int) -> Config:
        """The table's entry."""
        return select_config(self.head_dim, 2, self.phase, 16, arch, rows=self.rows or 16)

    def candidates(self, arch: int) -> list[Config]:
        """Tile shapes worth compiling, the table's own first: those of which a K and a V tile in each stage fit the shared memory."""
        heights = (32, 64, 128) if self.phase == "prefill" else (self.rows,)
        parts = (1, 2) if self.phase == "prefill" and self.head_dim >= 256 else (1,)
        found = [self.current(arch)]
        for *shape, value_parts in product(heights, (16, 32, 64, 128), (4, 8), (2, 3, 4, 5), parts):
            config = Config(*shape, value_parts, mask_all=found[0].mask_all)
            row_bytes = 2 * (self.head_dim + self.head_dim // value_parts)
            tiles = config.block_n * row_bytes * (config.num_stages - 1)
            if tiles <= configs.SHARED_MEMORY[arch] and config not in found:
                found.append(config)
        return found

    def variants(self, config: Config, arch: int) -> list[Config]:
        """Other ways of launching a tile shape: with tensor descriptors where the GPU has them, and with programs that take turns."""
        if self.phase != "prefill":
            return []
        made = [
            replace(config, fresh_tma=fresh_tma, programs_per_sm=programs)
            for fresh_tma, programs in product((False, True), (0, 1, 2))
            if arch >= DESCRIPTOR_ARCH or not fresh_tma
        ]
        return [other for other in made if other != config]


def cells(cases: list[shapes.Case]) -> dict[Cell, list[shapes.Case]]:
    """The cells of the table that cases use."""
    found: dict[Cell, list[shapes.Case]] = {}
    for case in cases:
        shape, rows = case.shape, 0
        if case.phase == "decode":
            plan = plan_decode(
                num_decodes=case.batch, max_seqlen_q=1, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim, num_sms=1,
            )  # fmt: skip
            rows = plan.block_m
        cell = Cell(case.phase, max(32, shape.head_dim), rows)
        found.setdefault(cell, []).append(case)
    return found


def tuned_cases() -> list[shapes.Case]:
    """Decode at two batches and prefill at two contexts of every named shape."""
    loads = (
        ("decode", 16, 32768), ("decode", 128, 4096), ("prefill", 1, 32768), ("prefill", 4, 4096),
    )  # fmt: skip
    return [
        shapes.Case(shape, *load, shape.block_size)
        for shape in shapes.SHAPES.values()
        for load in loads
    ]


@contextmanager
def using(config: Config) -> Iterator[None]:
    """Attention launches with this tile shape, whatever the table says."""
    before = paged.select_config
    paged.select_config = lambda *args, **kwargs: config
    try:
        yield
    finally:
        paged.select_config = before


def compiled(cell: Cell, config: Config, arch: int) -> str | None:
    """Why a tile shape may not be used, by what it compiles to; None if it may."""
    from quire.bench import static

    queries = f"-q{STATIC_QUERIES[cell.rows]}" if cell.rows else ""
    for block_size in STATIC_BLOCK_SIZES if cell.head_dim >= 64 else STATIC_BLOCK_SIZES[:1]:
        case = f"{cell.phase}-d{cell.head_dim}-p{block_size}{queries}"
        with using(config):
            row = static.attempt(case, arch, 0)
        if isinstance(row, str):
            return row
        if found := static.problems(row):
            return "; ".join(found)
    return None


def compilers(jobs: int) -> concurrent.futures.Executor:
    """Processes for `compile_all`."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context)


def compile_all(
    cell: Cell, configs_: list[Config], arch: int, pool: concurrent.futures.Executor
) -> list[str | None]:
    """`compiled` of each, on several cores."""
    # The interpreter stands in for the compiler in this process on a CPU; the processes that start here must compile.
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        n = len(configs_)
        return list(pool.map(compiled, [cell] * n, configs_, [arch] * n))
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


def measure(
    cell: Cell,
    cases: list[shapes.Case],
    candidates: list[Config],
    device: torch.device,
    seconds: float,
) -> list[dict[str, Any]]:
    """One row for each candidate: its milliseconds on each case, or what was wrong; the first is the table's own."""
    rows: list[dict[str, Any]] = [
        {"cell": cell.name, "config": list(_values(c)), "ms": {}, "wrong": None} for c in candidates
    ]
    for case in cases:
        family = family_of(case)
        problem = family.make(case, device, 2 if device.type == "cpu" else None)
        expected = family.expect(problem)
        impl = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else None
        calls = quire_calls(problem, fresh=case.phase == "prefill", impl=impl)
        for row, config in zip(rows, candidates, strict=True):
            if row["wrong"]:
                continue
            with using(config):
                try:
                    row["wrong"] = expected.wrong(*calls[0]())
                    if row["wrong"] is None:
                        timing = time_calls(calls, device, seconds=seconds)
                        row["ms"][case.name] = 1e3 * timing.p50
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


def tables_with(chosen: dict[Cell, Config], arch: int) -> str:
    """Source of `quire.kernels.tile_tables` with new entries for the class of ``arch``."""
    prefill = {size: dict(row) for size, row in tile_tables.PREFILL.items()}
    decode = {
        size: {dim: dict(rows) for dim, rows in table.items()}
        for size, table in tile_tables.DECODE.items()
    }
    size = tile_class(arch)
    for cell, config in chosen.items():
        if cell.phase == "prefill":
            prefill[size][cell.head_dim] = _values(config)
        else:
            decode[size][cell.head_dim][cell.rows] = _values(config)[1:4]
    source = TABLES.read_text(encoding="utf-8")
    lines = [source[: source.index("PREFILL = ")] + "PREFILL = {"]
    for name, row in prefill.items():
        lines += [f'    "{name}": {{', *(f"        {d}: {v}," for d, v in row.items()), "    },"]
    middle = source[source.index("}\n\n# ") + 3 : source.index("DECODE = ")]
    lines += ["}", "", middle + "DECODE = {"]
    for name, table in decode.items():
        lines += [f'    "{name}": {{', *(f"        {d}: {v}," for d, v in table.items()), "    },"]
    return "\n".join([*lines, "}", ""])


def _values(config: Config) -> tuple[int, ...]:
    """The table's entry: the last two only where they are not the defaults."""
    more = (config.fresh_tma, config.programs_per_sm)
    shape = (config.block_m, config.block_n, config.num_warps, config.num_stages)
    return (*shape, config.value_parts, *(more if any(more) else ()))


def run(args: argparse.Namespace, pool: concurrent.futures.Executor) -> int:
    """Tunes cell by cell; the exit status. pool: `compilers`."""
    device = torch.device("cpu" if args.dry_run else "cuda")
    arch = paged.INTERPRETER_ARCH
    if not args.dry_run:
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
    work = cells(shapes.tiny_cases() if args.dry_run else tuned_cases())
    work = {
        cell: cases
        for cell, cases in work.items()
        if args.only in cell.name and cell.phase != "mixed"
    }
    if not work:
        print(f"only: expected part of a cell's name, got {args.only!r}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"machine": describe_machine(device), "rows": [], "refused": [], "not_run": []}  # fmt: skip
    chosen: dict[Cell, Config] = {}
    start = perf_counter()
    for cell, cases in work.items():
        if args.seconds is not None and perf_counter() - start > args.seconds:
            result["not_run"].append(cell.name)
            continue
        candidates = cell.candidates(arch)
        if args.dry_run:
            candidates = [candidates[0], replace(candidates[0], block_n=32)]
        while candidates:
            reasons = compile_all(cell, candidates, arch, pool)
            result["refused"] += [
                {"cell": cell.name, "config": list(_values(c)), "why": why}
                for c, why in zip(candidates, reasons, strict=True)
                if why
            ]
            # The table's own entry is what the others are compared with, whatever the rules say of it.
            fit = [c for i, c in enumerate(candidates) if i == 0 or not reasons[i]]
            rows = measure(cell, cases, fit, device, args.per_call)
            result["rows"] += rows
            taken = best(rows)
            print(f"{perf_counter() - start:6.1f} s\n{table(cell, rows, taken)}", flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            # Once more, with the other ways of launching the shape; after those there are no others.
            others = [] if cell in chosen else cell.variants(fit[rows.index(taken)], arch)
            chosen[cell] = fit[rows.index(taken)]
            if args.dry_run:
                others = others[-1:]
            candidates = list(dict.fromkeys([fit[0], chosen[cell], *others])) if others else []
    if result["not_run"]:
        print(f"out of time: {', '.join(result['not_run'])}")
    if args.write:
        TABLES.write_text(tables_with(chosen, arch), encoding="utf-8")
        print(f"wrote {TABLES.name}")
    return 1 if any(row["wrong"] for row in result["rows"]) else 0


def table(cell: Cell, rows: list[dict[str, Any]], taken: dict[str, Any]) -> str:
    """Candidates of a cell, fastest first."""
    cases = list(rows[0]["ms"])
    lines = [
        (cell.name, "m", "n", "warps", "stages", "parts", "tma", "per sm", *cases, "of the table's")
    ]
    for row in sorted(rows, key=lambda r: r["ratio"] or math.inf):
        marks = ("table " if row is rows[0] else "") + ("taken" if row is taken else "")
        times = [f"{row['ms'][c]:.4g}" if c in row["ms"] else "-" for c in cases]
        ratio = row["wrong"] or ("-" if row["ratio"] is None else f"{row['ratio']:.3f}")
        config = [str(int(value)) for value in (*row["config"], 0, 0)[:7]]
        lines.append((marks, *config, *times, ratio))
    return "\n".join(aligned(lines))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="cells whose name contains this")
    add("--seconds", type=float, metavar="S", help="start no cell after this time")
    add("--per-call", type=float, default=0.1, metavar="S", help="timing of one tile shape on one case")  # fmt: skip
    add("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    add("--json", metavar="FILE", help="write all numbers, after each cell")
    add("--write", action="store_true", help="write the table")
    add("--dry-run", action="store_true", help="on a CPU: that everything runs; times mean nothing")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print("error: no GPU; --dry-run needs none", file=sys.stderr)
        return 2
    if args.dry_run and args.write:
        parser.error("--write: expected a run on a GPU, got --dry-run")
    with compilers(args.jobs) as pool:
        return run(args, pool)


if __name__ == "__main__":
    sys.exit(main())
