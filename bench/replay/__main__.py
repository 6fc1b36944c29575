"""Which retention and eviction for a model, a pool and a trace, and how far from the best possible it is.

    python -m bench.replay --workload round-robin --preset gemma-4-31b --pool 25% 50% 100%
    python -m bench.replay --workload mooncake:conversation.jsonl --limit 4000 --preset v4-flash --pool 5% 10% 20% 40% --max-requests 1
    python -m bench.replay --workload pr43447 --preset v4-flash --pool 106126pages --retention 32768 4096
    python -m bench.replay --workload agent-pauses --preset v4-flash --pool 20% --host 20% 40% --link 50

Requests go through the allocator on a simulated clock; nothing touches a device. Times follow from the rates given here, and only compare.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.replay.__main__")

import inspect
import itertools
import json
from collections.abc import Sequence

from quire.kvcore.policies.retention import parse_retention
from quire.models.command import Parser, integer, number, output_file, program

from ..common.plot import require_matplotlib
from ..common.workload import check_size
from .experiment import EVICTIONS, Row, empty_cache, pool_pages, run_grid
from .generators import GENERATORS
from .loaders import LOADERS
from .plot import save_plot
from .presets import PRESETS
from .simulate import Timing, Workload

COLUMNS = (
    ("retention", "retention", "{}"), ("eviction", "eviction", "{}"), ("pool", "pool", "{}"), ("GiB", "pool_bytes", "{:.1f}"),
    ("host", "host", "{}"),
    ("hit rate", "hit_rate", "{:.2%}"), ("mean hit", "mean_hit", "{:.2%}"), ("TTFT p50", "ttft_p50", "{:.2f}"),
    ("p99", "ttft_p99", "{:.2f}"), ("tokens/s", "tokens_per_s", "{:.0f}"), ("recomputed", "recomputed_tokens", "{}"),
    ("evicted points", "evicted_resume_points", "{}"), ("segments", "evicted_segments", "{}"),
)  # fmt: skip

HOST_COLUMNS = (
    ("on device", "device_tokens", "{}"), ("stalled", "stalled_s", "{:.2f}"), ("to host", "bytes device>host", "{:.1f}"),
    ("back", "bytes host>device", "{:.1f}"), ("waste", "waste", "{:.1%}"),
)  # fmt: skip


def make_workload(text: str, limit: int | None, seed: int) -> Workload:
    """A workload from ``format:path`` or ``generator[:name=value,...]``.

    Raises: ValueError naming what is known.
    """
    check_size(limit, 1.0)
    name, _, rest = text.partition(":")
    if name in LOADERS:
        if not rest:
            raise ValueError(f"workload: expected {name}:PATH, got {text!r}")
        return Workload(name, LOADERS[name](rest, limit))
    if name not in GENERATORS:
        raise ValueError(f"workload: expected one of {[*LOADERS, *GENERATORS]}, got {name!r}")
    make = GENERATORS[name]
    known = inspect.signature(make).parameters
    options: dict[str, float] = {"seed": seed} if "seed" in known else {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise ValueError(f"workload: {name} has {list(known)}, got {key!r}")
        kind = type(known[key].default)
        parse = number(above=key == "rate") if kind is float else integer(0 if key == "seed" else 1)
        try:
            options[key] = parse(value)
        except ValueError as error:
            raise ValueError(f"workload: {name}: {key}: {error}") from error
    return Workload(text, make(**options)[:limit])


def table(rows: list[Row], columns: Sequence[tuple[str, str, str]] = COLUMNS) -> str:
    """Rows as aligned text; bytes in GiB. Columns are (title, key, format)."""
    lines = [[title for title, _, _ in columns]]
    for row in rows:
        shown = {k: v / 2**30 if v and "bytes" in k else v for k, v in row.items()}
        lines.append(
            [
                form.format(shown[key]) if shown.get(key) is not None else "-"
                for _, key, form in columns
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines
    )


def retention(text: str) -> str | int:
    """The type of an option: a retention by name, or an interval in tokens."""
    return int(text) if text.isdecimal() else text


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Replays, prints the tables, and writes what is asked for; returns the exit status."""
    args = _parser().parse_args(argv)
    if args.plot:
        require_matplotlib(args.plot)
    timing = Timing(args.prefill_rate, args.decode_rate, args.chunk, args.max_requests, args.ahead)
    # All of them before the first is replayed: what is wrong with one is said at once.
    workloads = [make_workload(name, args.limit, args.seed) for name in args.workload]
    if args.plot and args.host:
        raise ValueError("plot: expected no --host with it, got both")
    for workload, preset in itertools.product(workloads, args.preset):
        for pool in args.pool:
            pool_pages(pool, PRESETS[preset], workload)
        for size in args.host:
            try:
                pool_pages(size, PRESETS[preset], workload)
            except ValueError as error:
                raise ValueError(f"host: {str(error).removeprefix('pool: ')}") from error
        for kept in args.retention:
            parse_retention(kept, empty_cache(PRESETS[preset], workload).layout)
    rows: list[Row] = []
    for name, workload in zip(args.workload, workloads, strict=True):
        for preset in args.preset:
            new = run_grid(
                workload, preset, args.pool, args.retention, args.eviction, timing, hosts=args.host,
                link=args.link * 1e9, progress=not args.quiet,
            )  # fmt: skip
            columns = COLUMNS + HOST_COLUMNS * bool(args.host)
            print(
                f"{name} ({len(workload.requests)} requests), {preset}\n{table(new, columns)}\n", flush=True
            )  # fmt: skip
            rows += new
            if args.json:  # so that a later grid that cannot be, or an interrupt, loses nothing
                args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if args.plot:
        save_plot(rows, args.plot)
    return 0


def _parser() -> Parser:
    parser = Parser("bench.replay", __doc__)
    add = parser.add_argument
    add("--workload", nargs="+", default=["round-robin"], help=f"FORMAT:PATH ({', '.join(LOADERS)}) or a generator ({', '.join(GENERATORS)}), with :name=value,... for its arguments")  # fmt: skip
    add("--preset", nargs="+", default=["gemma-4-31b"], choices=list(PRESETS), help="model")
    add("--pool", nargs="+", default=["25%", "50%", "100%"], help="e.g. 64GiB, 10%% of the dense working set, 20requests, 5000pages")  # fmt: skip
    add("--retention", nargs="+", type=retention, default=["auto"], help="auto, latest, dense, or an interval in tokens; default: auto")  # fmt: skip
    add("--eviction", nargs="+", default=["lru", "adaptive"], choices=list(EVICTIONS))
    add("--host", nargs="+", default=[], metavar="SIZE", help="host memory behind each pool, as --pool has sizes; default: none")  # fmt: skip
    add("--link", type=number(above=True), default=50.0, help="GB/s of each direction between device and host; default: 50")  # fmt: skip
    add("--limit", type=integer(), help="requests at most")
    add("--seed", type=integer(0, 2**63 - 1), default=0)
    add("--prefill-rate", type=number(above=True), default=Timing.prefill_rate, help="prompt tokens a second")  # fmt: skip
    add("--decode-rate", type=number(above=True), default=Timing.decode_rate, help="answer tokens a second, each request")  # fmt: skip
    add("--chunk", type=integer(), default=Timing.chunk, help="tokens of a prefill chunk")
    add("--max-requests", type=integer(most=65536), default=Timing.max_requests, help="at once; 1 = one after another")  # fmt: skip
    add("--ahead", type=integer(most=65536), default=Timing.ahead, help="waiting requests whose loads may start")  # fmt: skip
    add("--json", type=output_file, metavar="FILE", help="write the rows as a list of objects")
    add("--plot", type=output_file, metavar="FILE", help="write a picture (.svg, .png)")
    add("--quiet", action="store_true", help="no progress bar")
    return parser
