"""Everything that needs a GPU, in one unattended command: correctness, times, then tile shapes.

    python -m bench.gpu --out results                      all parts, 20 minutes at most
    python -m bench.gpu --parts attention,prefill-decode   only these
    python -m bench.gpu --dry-run --out results            the same parts, tiny, on a CPU

Each part (`bench.gpu.parts`) is a process with a time limit. A crash or a hang loses that part
only, and of tests only one: the others go on in a new process. Each part writes OUT/<part>.log as
it runs, and OUT/<part>.json when it ends; a dry run writes to OUT/dry-run. A second call skips what
ended well. Exit status 1 if a part failed. Several GPUs get one part more, and 22 minutes.

OUT also holds the kernels that Triton compiled: a copy at the same path of another machine goes on
there. Needs a checkout, torch, triton, numpy and pytest; nothing has to be installed.
The part ``tune`` measures the tile shapes that matter most; ``python -m bench.tune`` measures all.
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

from quire.models.command import Parser, program

from .parts import plan
from .runner import Runner


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    parts = plan(args.dry_run, torch.cuda.device_count())
    if args.parts:
        names = args.parts.split(",")
        if unknown := sorted(set(names) - {part.name for part in parts}):
            raise ValueError(f"parts: expected some of {[p.name for p in parts]}, got {unknown}")
        parts = [part for part in parts if part.name in names]
    out = (args.out / "dry-run" if args.dry_run else args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    runner = Runner(out, args.peers, args.dry_run)
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
    add("--parts", metavar="A,B", help="only these parts")
    add("--peers", type=Path, metavar="DIR", help="unpacked wheels of implementations to compare")
    add("--dry-run", action="store_true", help="tiny shapes on a CPU")
    return parser
