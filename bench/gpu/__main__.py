"""Everything that needs a GPU, in one unattended command: correctness first, then what models and
kernels measure, best value first.

    python -m bench.gpu --out results                    all parts, nine minutes at most
    python -m bench.gpu --tar results.tar.gz             one file to bring home, after each part
    python -m bench.gpu --resume results.tar.gz          goes on where that one stopped
    python -m bench.gpu --parts attention,prefill-decode only these
    python -m bench.gpu --plan                           parts and their limits, nothing runs
    python -m bench.gpu --dry-run --out results          the same parts, tiny, on a CPU

Each part is a process of its own with a limit of its own, so a crash or a hang loses that part
only, and of tests one: after an illegal access the process ends and the others run in a new one.
What a part found is in OUT/<part>.json when it ends, its output in OUT/<part>.log as it runs. A
second call skips parts that ended well, and in the others tests that passed; --force repeats them.
Exit status 1 if a part failed or had no time.

A file of --tar has the results and the kernels that Triton compiled; the same Triton and Python
find these again, and the table of parts says how often.

Tile shapes are measured by another call, ``python -m bench.tune --seconds 540 --json OUT/tune.json
--write OUT``, the most valuable entries first; what it writes are sources for ``kernels/``, to be
compiled by ``python -m bench.static --arch`` before they are taken over.

Needs a checkout, torch, triton, numpy and pytest; nothing has to be installed. Peers: installed
packages, or the files of --peers (`bench.peers.folder`), which are unpacked and compiled beside the
first tests.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.gpu.__main__")

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.models.command import Parser, input_file, number, output_file, program

from .carry import unpack
from .parts import DRY_RUN_FACTOR, RANKS_SECONDS, plan, print_plan
from .runner import ROOT, Runner

SECONDS = 538


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    gpus = num_gpus()
    parts = plan(args.dry_run, gpus)
    most = SECONDS + (2 * RANKS_SECONDS if gpus > 1 else 0)
    seconds = args.seconds or most * (DRY_RUN_FACTOR if args.dry_run else 1)
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
    if args.resume:
        print(f"{unpack(args.resume, out)} compiled kernels came along")
    peers = args.peers if args.peers is not None else ROOT / ".peers"
    peers = peers.resolve() if peers.is_dir() and not (args.dry_run and args.peers is None) else None  # fmt: skip
    runner = Runner(out, peers, seconds, args.dry_run, args.tar)
    todo = [part for part in parts if args.force or not runner.finished(part)]
    for part in parts:
        if part not in todo:
            print(f"{part.name:16} finished earlier")
        elif args.force:
            runner.forget(part)
    print_plan(todo, seconds)
    # Ended from outside, parts must not stay behind on the GPU.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for part in todo:
            runner.run(part)
            if part.vital and not runner.finished(part):
                print(f"without {part.name} nothing else is worth trying")
                return 1
        runner.wait()
    finally:
        runner.kill()
    records = [runner.record(part) for part in parts]
    good = [record is not None and record["status"] in ("ok", "skipped") for record in records]
    return 0 if all(good) else 1


def num_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def _parser() -> Parser:
    parser = Parser("bench.gpu", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench/out/gpu"), metavar="DIR", help="folder of results; default: bench/out/gpu")  # fmt: skip
    add("--tar", type=output_file, metavar="FILE", help="write results and compiled kernels into one file, after each part")  # fmt: skip
    add("--resume", type=input_file, metavar="FILE", help="start from a file of --tar")
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
