"""What can be known of the kernels without a GPU: a table of every configuration, compiled offline.

    python -m bench.static [--all | --arch sm_90 gfx942] [--samples] [--only TEXT] [--jobs 2]
                           [--json FILE] [--baseline FILE] [--update] [--fresh]

By default every kernel is compiled for sm_90 once with each of its tile shapes, and for sm_80,
sm_100 and AMD's architectures a sample that holds every kernel once or twice. ``--arch`` compiles
every case for the architectures named, and with ``--samples`` the sample of each; ``--all`` stands
for sm_80, 86, 90, 100 and 120, and gfx942, gfx950, gfx1100 and gfx1201. The rules below apply to whatever is compiled; on AMD
the first three, and on architectures that `--all` leaves out what breaks them is shown, but is no
failure.

The arguments are those of a real launch over tensors without storage, specialised as Triton's
launcher does it, so what is compiled here is what runs there. What two cases share is compiled
once. Exit status 1 if a kernel breaks one of these rules:

    spills         a kernel stores registers to local memory, or has a stack frame
    shared memory  a program needs more than it may use on that architecture
    room           an SM cannot hold even one program: its threads need more registers than there
                   are
    narrow copies  K/V is copied less than 16 bytes at a time (fp32: where it is copied
                   asynchronously at all; quantised index keys: 8)
    serial wgmma   each wgmma of a product is waited for before the next: ptxas gave up their
                   overlap
    overlap        nothing is copied while a kernel multiplies: no tile is under way during the
                   products of one of its loops (TTGIR), nor has the SM another program (not fp32,
                   nor compressed attention over fp8 pages on sm_86 and sm_120, where nothing fits)
    in flight      a decode kernel on sm_90 keeps less than 36 KiB of K/V under way per SM while it
                   multiplies (not fp32)

A kernel that does not compile fails as well. The baseline, ``bench/results/static/VERSION.json`` of
the Triton installed, has all cases on all architectures; ``--all --update`` makes it anew, ``--arch
sm_80 --update`` its rows of sm_80. The rules decide; the differences from the baseline are only shown.
A row of the baseline holds a hash of all that decides it (``key``: the sources of the kernel and of
what it calls, its arguments, and how a row is read); where that is what it was, the row stands and
nothing is compiled, but with ``--fresh``.
``--json`` of any run serves as ``--baseline`` of another; its ``seconds`` are processor time, the
compiler's included, and next to nothing where Triton's cache has the kernel.

Columns: registers of a thread; acc, those of them that are for accumulators (AMD); spill, bytes that a thread spills; stack, bytes of its frame; shared
memory of a program, and its limit on that architecture; ctas, programs that an SM (AMD: a CU, on
RDNA a WGP) holds at once; waves, wavefronts that a SIMD holds then;
warps and stages of a program, and v2 where two share a query tile, each with half of the values;
mma, the matrix instruction ("wgmma, serial": without overlap); copy, bytes of the narrowest
asynchronous K/V copy (0: loads go through registers; on AMD they all do, and it is the narrowest of
the loads, which are in the next column); tiles, those whose copies are under way during
the products, as the order of waits, copies and products in the compiled loops has it
(`bench.static.ttgir`), of the loop with the fewest; flight, KiB of K/V copies that are then under
way per SM: these tiles, times the resident programs (while a program waits, it has one tile more
under way); sass, instructions that a warp issues for one K/V tile, of the first loop over tiles:
without masks in prefill, with masks in decode ("-": cannot be told).
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.static.__main__")

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.models.command import Parser, integer, output_file, program

from ..common.workers import Workers
from .cases import ALL_ARCHS, ARCHS, DEFAULT_ARCH, SAMPLE_ARCHS
from .compiling import attempt, distinct, key
from .report import RESULTS, differences, read, table, write, write_baseline
from .rules import is_gated, problems


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    options = _parser().parse_args(argv)
    if options.update and (options.only or not (options.arch or options.all)):
        raise ValueError("update: expected --all or --arch without --only")
    if options.samples and not (options.arch or options.all):
        raise ValueError("samples: expected --all or --arch with it")
    if options.update and options.baseline:
        output_file(str(options.baseline))
    return options


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    options = parse(argv)
    import triton

    baseline = options.baseline or RESULTS / f"{triton.__version__}.json"
    before = read(baseline) if baseline.exists() else None
    if options.all or options.arch:
        archs = options.arch or ALL_ARCHS
        if options.samples:
            work = distinct((), options.only, samples=archs)
        else:
            work = distinct(archs, options.only)
    else:
        work = distinct((), options.only, samples=SAMPLE_ARCHS, tiles=(DEFAULT_ARCH,))
    known = {} if options.fresh else {row.get("key"): row for row in before or []}
    keys = [key(*item) for item in work]
    missing = [item for item, name in zip(work, keys, strict=True) if name not in known]
    with Workers(options.jobs) as pool:
        compiled = iter(list(pool.map(attempt, *zip(*missing, strict=True))) if missing else [])
    # Keys are those of this process: Triton's hash of a kernel goes by which were hashed before it.
    results = [
        known[name] | {"case": item[0]} if name in known else _with_key(next(compiled), name)
        for item, name in zip(work, keys, strict=True)
    ]
    rows = [row for row in results if isinstance(row, dict)]
    seconds = sum(row.get("seconds", 0) for row in rows)
    print(
        f"triton {triton.__version__}; {len(rows)} kernels, {len(missing)} of them compiled now, "
        f"{seconds:.0f} s of processor time"
    )
    print(table(rows))
    if before is not None:
        changes = differences(rows, before)
        print(f"{len(changes)} differences from {baseline}")
        print(*changes, sep="\n", end="\n" if changes else "")
    if options.json:
        write(rows, options.json)
    if options.update:
        write_baseline(rows, baseline)
    failures = [text for text in results if isinstance(text, str)]
    broken = [
        (is_gated(row), f"{row['case']} {row['kernel']} {row['arch']}: {text}")
        for row in rows
        for text in problems(row)
    ]
    for text in (text for gated, text in broken if not gated):
        print(f"shown, not gated: {text}")
    failures += [text for gated, text in broken if gated]
    for text in failures:
        print(f"FAIL {text}")
    return 1 if failures else 0


def _with_key(result: dict[str, Any] | str, name: str) -> dict[str, Any] | str:
    return result if isinstance(result, str) else result | {"key": name}


def _parser() -> Parser:
    parser = Parser(
        "bench.static",
        __doc__.split("\n")[0],
        epilog=f"By default: every tile shape for {DEFAULT_ARCH}, and a sample with each kernel for {', '.join(SAMPLE_ARCHS)}.",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the rows as a JSON list"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--all", action="store_true", help=f"every case for {', '.join(ALL_ARCHS)}")
    chosen.add_argument("--arch", nargs="+", choices=ARCHS, help="every case for these")
    parser.add_argument("--samples", action="store_true", help="of the architectures named, the samples alone: each kernel once or twice")  # fmt: skip
    parser.add_argument("--jobs", type=integer(most=1024), default=os.cpu_count())
    parser.add_argument("--only", default="", help="compile only cases whose name contains this")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="rows to show the differences from; default: those of this Triton")  # fmt: skip
    parser.add_argument(
        "--fresh", action="store_true", help="compile what the baseline has as well"
    )
    parser.add_argument("--update", action="store_true", help="make this run the baseline's rows of its architectures")  # fmt: skip
    return parser
