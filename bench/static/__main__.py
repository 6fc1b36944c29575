"""Compile the kernels without a GPU, and show registers, spills and shared memory.

    python -m bench.static [--arch sm_90 gfx942] [--only TEXT] [--json FILE] [--baseline FILE]

By default every kernel is compiled for sm_90 once with each of its tile shapes and each set of
optional arguments, and a sample that holds every kernel for sm_80, sm_100, gfx942 and gfx950.
``--arch`` compiles every case for the architectures named. The public operators are called over
tensors without storage, and Triton's launcher specialises the arguments of their launches: the same
kernels are compiled as on a GPU. The compilers are those that come with Triton.

Exit status 1 if a kernel does not compile or

    spills            its registers to local memory,
    needs             more shared memory than a program may use on that architecture, or
    cannot be launched, because an SM has too few registers for one program, or
    copies no tile ahead in a loop that multiplies tiles (NVIDIA).

Columns: registers of a thread; spill, what it keeps in local memory; shared memory of a program,
and its limit; programs that an SM (AMD: a CU) holds at once; flight, keys and values that these
programs copy ahead: (stages - 1) tiles of keys each. In ``config``: rows and keys of a tile, warps,
stages, and v2 where the values have two accumulators.

Rows that differ from those of ``--baseline`` are listed, but are no failure. Default: the table of
the installed Triton, ``bench/results/static/VERSION.json``, which this writes anew:

    python -m bench.static --json bench/results/static/3.7.1.json
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.static.__main__")

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.models.command import Parser, integer, output_file, program
from quire.models.progress import tqdm

from ..common.results import table
from ..common.workers import Workers
from .cases import DEFAULT_ARCH, SAMPLE_ARCHS
from .compiling import attempt, distinct, problems
from .limits import ARCHS

RESULTS = Path(__file__).parent.parent / "results" / "static"


@program
def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    import triton

    path = options.baseline or RESULTS / f"{triton.__version__}.json"
    baseline = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if options.arch:
        work = distinct(options.arch, options.only)
    else:
        work = distinct((), options.only, samples=SAMPLE_ARCHS, tiles=(DEFAULT_ARCH,))
    results: list[dict[str, Any] | str] = []
    bar = tqdm(total=len(work), unit="kernel", disable=None, leave=False)
    with Workers(options.jobs) as pool, bar:
        for result in pool.map(attempt, *zip(*work, strict=True)) if work else ():
            results.append(result)
            bar.update()
    rows = [row for row in results if isinstance(row, dict)]
    print(table(rows, [(title, key, "") for title, key in COLUMNS.items()]))
    seconds = sum(row["seconds"] for row in rows)
    print(f"triton {triton.__version__}; {len(rows)} kernels, {seconds:.0f} s of processor time")
    for line in differences(rows, baseline):
        print(f"differs from {path.name}: {line}")
    if options.json:
        text = ",\n".join(json.dumps(row) for row in rows)
        options.json.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    failures = [text for text in results if isinstance(text, str)]
    for row in rows:
        failures += [f"{row['case']} {row['kernel']} {row['arch']}: {p}" for p in problems(row)]
    for text in failures:
        print(f"FAIL {text}")
    return 1 if failures else 0


COLUMNS = {
    "case": "case", "kernel": "kernel", "arch": "arch", "config": "config",
    "registers": "registers", "spill, B": "spill_bytes", "shared, B": "shared_bytes",
    "limit, B": "shared_limit", "programs/SM": "ctas_per_sm",
    "flight, B/SM": "bytes_in_flight_per_sm",
}  # fmt: skip


def differences(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """A line for each row of the baseline that has other values now."""
    shown = ("registers", "spill_bytes", "shared_bytes", "ctas_per_sm")
    found = []
    before = defaultdict(list)  # a case may launch a kernel twice
    for row in baseline:
        before[_key(row)].append(row)
    for row in rows:
        same = before[_key(row)]
        old = same.pop(0) if same else row
        changed = [f"{name} {old[name]} -> {row[name]}" for name in shown if old[name] != row[name]]
        if changed:
            found.append(f"{row['case']} {row['kernel']} {row['arch']}: {', '.join(changed)}")
    return found


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["case"], row["kernel"], row["config"], row["arch"]


def _parser() -> Parser:
    parser = Parser("bench.static", __doc__)
    add = parser.add_argument
    add("--json", type=output_file, metavar="FILE", help="also write the rows as a JSON list")
    add("--arch", nargs="+", choices=ARCHS, help="every case for these; default: see above")
    add("--jobs", type=integer(most=1024), default=os.cpu_count(), help="processes")
    add("--only", default="", metavar="TEXT", help="cases whose name contains this")
    add("--baseline", type=Path, metavar="FILE", help="rows to show the differences from")
    return parser
