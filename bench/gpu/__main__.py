"""Everything that needs a GPU, in one unattended command: correctness first, then what models and
kernels measure, best value first.

    python -m bench.gpu --out results                      all parts, nine minutes at most
    python -m bench.gpu --tar results.tar.gz               one file to carry, after each part
    python -m bench.gpu --resume results.tar.gz            goes on where that one stopped
    python -m bench.gpu --parts attention,prefill-decode   only these
    python -m bench.gpu --dry-run --out results            the same parts, tiny, on a CPU

Each part (`bench.gpu.parts`) is a process of its own with a limit of its own, so a crash or a hang
loses that part only, and of tests one: after an illegal access the process ends and the others run
in a new one. What a part found is in OUT/<part>.json when it ends, its output in OUT/<part>.log as
it runs; of a dry run in OUT/dry-run. A second call skips parts that ended well, and in the others
tests that passed. Exit status 1 if a part failed.

A file of --tar has the results and the kernels that Triton compiled; the same Triton and Python
find these again.

Tile shapes are measured by another call, ``python -m bench.tune --seconds 540 --json
OUT/tune.json``, the most valuable entries first. It prints lines for ``kernels/*/tiles.py``; compile
them with ``python -m bench.static --arch`` before you take them over.

Needs a checkout, torch, triton, numpy and pytest; nothing has to be installed. Peers: installed
packages, or files in the checkout's folder .peers (`bench.peers.folder`), which are unpacked and
compiled beside the first tests.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.gpu.__main__")

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from quire.models.command import Parser, input_file, output_file, program

from .carry import unpack
from .parts import plan
from .runner import ROOT, Runner

PEERS = ROOT / ".peers"


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    peers = PEERS if PEERS.is_dir() and not args.dry_run else None
    parts = plan(args.dry_run, torch.cuda.device_count(), peers is not None)
    if args.parts:
        names = args.parts.split(",")
        if unknown := sorted(set(names) - {part.name for part in parts}):
            raise ValueError(f"parts: expected some of {[p.name for p in parts]}, got {unknown}")
        parts = [part for part in parts if part.name in names]
    out = (args.out / "dry-run" if args.dry_run else args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        print(f"{unpack(args.resume, out)} compiled kernels came along")
    runner = Runner(out, peers, args.dry_run, args.tar)
    # Ended from outside, parts must not stay behind on the GPU.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for part in parts:
            if runner.is_done(part):
                print(f"{part.name:16} finished earlier")
                continue
            runner.run(part)
            if part.vital and not runner.is_done(part):
                print(f"without {part.name} nothing else is worth trying")
                return 1
        runner.wait()
    finally:
        runner.kill()
    return 0 if all(map(runner.is_done, parts)) else 1


def _parser() -> Parser:
    parser = Parser("bench.gpu", __doc__)
    add, folder = parser.add_argument, Path("bench/out/gpu")
    add("--out", type=Path, default=folder, metavar="DIR", help=f"results; default: {folder}")
    add("--tar", type=output_file, metavar="FILE", help="results and kernels, after each part")
    add("--resume", type=input_file, metavar="FILE", help="start from a file of --tar")
    add("--parts", metavar="A,B", help="only these parts")
    add("--dry-run", action="store_true", help="tiny shapes on a CPU")
    return parser
