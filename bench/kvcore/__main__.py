"""Speed of the allocator: microseconds a decode step, milliseconds for a prompt of a million
tokens.

    python -m bench.kvcore
    python -m bench.kvcore --model gemma-4-31b --json kvcore.json

Everything runs in this process on one core; figures are medians. Nothing here touches a device:
`kvcore` is integers. Where vLLM is installed, the same table follows for its allocator.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.kvcore.__main__")

import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

from quire.models.command import Parser, integer, output_file, program

from ..common.results import write_json
from .measure import SPECS, Row, full_pool, show, spec_rows

VLLM_VERSION = "0.33"
MODELS = {"v4": ["v4"], "gemma-4-31b": ["gemma4-31b"], "all": list(SPECS)}


def vllm_rows(spec: str, requests: list[int], repeats: int, steps: int) -> list[Row]:
    """The same figures of vLLM, where it is installed; prints them."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return []
    try:
        if not version.startswith(f"{VLLM_VERSION}."):
            raise ImportError(f"expected {VLLM_VERSION}")
        from . import vllm
    except ImportError as error:
        print(f"vllm {version}: not measured: {error}")
        return []
    rows = vllm.rows(spec, requests, repeats, steps)
    print(f"vllm {version}:")
    show(rows)
    return [{**r, "name": f"vllm_{r['name']}"} for r in rows]


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    rows: list[Row] = []
    print(f"{'figure':<24} {'groups':<12} {'value':>10} unit")
    for spec in MODELS[args.model]:
        new = spec_rows(spec, args.requests, args.repeats, args.steps)
        show(new)
        rows += new + vllm_rows(spec, args.requests, args.repeats, args.steps)
    if args.repeats:
        new = full_pool(args.repeats)
        show(new)
        rows += new
    if find_spec("vllm") is None:
        print("vllm not installed: no comparison", file=sys.stderr)
    write_json(args.json, rows)
    return 0


def _parser() -> Parser:
    parser = Parser("bench.kvcore", __doc__)
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="all", help="its cache groups; default: all")
    runs, steps = integer(0, 10**6), integer(most=10**6)
    add("--repeats", type=runs, default=3, help="runs of the million-token prompt; default: 3")
    add("--steps", type=steps, default=300, help="decode steps to time; default: 300")
    sizes = {"type": integer(most=65536), "nargs": "*", "default": [256, 4096]}
    add("--requests", **sizes, help="decode batch sizes; default: 256 4096")
    add("--json", type=output_file, metavar="FILE", help="write the rows as a list of objects")
    return parser
