"""Speed of the allocator: microseconds a decode step, milliseconds for a prompt of a million
tokens.

    python -m bench.kvcore
    python -m bench.kvcore --spec gemma4-31b --json kvcore.json
    python -m bench.kvcore --scaling --plot kvcore.png

Everything runs in this process on one core; figures are medians. Nothing here touches a device:
`kvcore` is integers. Where vLLM is importable, the same table follows for its allocator.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.kvcore.__main__")

import argparse
import json
from collections.abc import Sequence

from quire.models.command import Parser, integer, output_file, program

from ..common.plot import require_matplotlib
from . import scaling, vllm
from .measure import (
    SPECS,
    Row,
    decode_step,
    drafts_step,
    full_pool,
    million,
    pool_bytes,
    shown,
    split_lookup,
)
from .tiers import entry_times


def peer_rows(spec: str, args: argparse.Namespace) -> list[Row]:
    """The same figures of vLLM, as ``vllm_<name>``, where it is importable; prints them."""
    version = vllm.available()
    if version is None:
        return []
    names = [*(vllm.PROMPT if args.repeats else ()), "pool_1m_bytes"]
    names += [f"decode_step_{n}" for n in args.requests]
    try:
        rows = vllm.rows(spec, *names, repeats=max(1, args.repeats), steps=args.steps)
    except (ImportError, NotImplementedError) as error:
        print(f"vllm {version}: not measured: {error}")
        return []
    print(f"vllm {version}:")
    print("\n".join(shown(r) for r in rows), flush=True)
    return [{**r, "name": f"vllm_{r['name']}"} for r in rows]


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write it where `--json` says; returns the exit status."""
    args = _parser().parse_args(argv)
    if args.plot:
        require_matplotlib(args.plot)
    rows: list[Row] = []
    for spec in SPECS if args.spec == "all" else [args.spec]:
        if args.scaling or args.plot:
            new = scaling.curves(spec, args.steps)
        else:
            new = million(spec, args.repeats) if args.repeats else []
            new.append(pool_bytes(spec))
            for n in args.requests:
                new += decode_step(spec, n, args.steps)
                new.append(drafts_step(spec, n, args.steps))
            if args.repeats:
                new += split_lookup(spec, 1024)
                new += entry_times(spec, 64)
            print("\n".join(shown(r) for r in new), flush=True)
            new += peer_rows(spec, args)
        rows += new
    if args.repeats and not (args.scaling or args.plot):
        new = full_pool(args.repeats)
        print("\n".join(shown(r) for r in new), flush=True)
        rows += new
    if args.plot:
        scaling.save_plot(rows, args.plot)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


def _parser() -> Parser:
    parser = Parser("bench.kvcore", __doc__)
    parser.add_argument("--spec", choices=[*SPECS, "all"], default="all", help="cache groups")
    parser.add_argument(
        "--repeats", type=integer(0, 10**6), default=3, help="runs of the million-token prompt"
    )
    parser.add_argument(
        "--steps", type=integer(most=10**6), default=300, help="decode steps to time"
    )
    parser.add_argument(
        "--requests",
        type=integer(most=65536),
        nargs="*",
        default=[256, 4096],
        help="decode batch sizes",
    )
    parser.add_argument(
        "--scaling", action="store_true", help="how a decode step grows, and with what"
    )
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="picture of --scaling")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the rows as a list of objects"
    )
    return parser
