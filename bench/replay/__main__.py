"""Which retention and eviction for a model, a pool and a trace, and how far from the best possible it is.

    python -m bench.replay --workload round-robin --preset gemma-4-31b --pool 25% 50% 100%
    python -m bench.replay --workload mooncake:conversation.jsonl --limit 4000 --preset v4-flash --pool 5% 10% 20% 40% --max-requests 1
    python -m bench.replay --workload pr43447 --preset v4-flash --pool 106126pages --retention 32768 4096

Requests go through the allocator on a simulated clock; nothing touches a device. Times follow from the rates given here, and only compare.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from pathlib import Path

from quire.bench.plot import require_matplotlib

from .experiment import EVICTIONS, Row, run_grid
from .generators import GENERATORS
from .loaders import LOADERS
from .plot import save_plot
from .presets import PRESETS
from .simulate import Timing, Workload

COLUMNS = (
    ("retention", "retention", "{}"), ("eviction", "eviction", "{}"), ("pool", "pool", "{}"), ("GiB", "pool_bytes", "{:.1f}"),
    ("hit rate", "hit_rate", "{:.2%}"), ("mean hit", "mean_hit", "{:.2%}"), ("TTFT p50", "ttft_p50", "{:.2f}"),
    ("p99", "ttft_p99", "{:.2f}"), ("tokens/s", "tokens_per_s", "{:.0f}"), ("recomputed", "recomputed_tokens", "{}"),
    ("evicted points", "evicted_resume_points", "{}"), ("segments", "evicted_segments", "{}"),
)  # fmt: skip


def make_workload(text: str, limit: int | None, seed: int) -> Workload:
    """A workload from ``format:path`` or ``generator[:name=value,...]``.

    Raises: ValueError naming what is known.
    """
    name, _, rest = text.partition(":")
    if name in LOADERS:
        if not rest:
            raise ValueError(f"workload: expected {name}:PATH, got {text!r}")
        return Workload(name, LOADERS[name](rest, limit))
    if name not in GENERATORS:
        raise ValueError(f"workload: expected one of {[*LOADERS, *GENERATORS]}, got {name!r}")
    make = GENERATORS[name]
    known = inspect.signature(make).parameters
    options = {"seed": seed} if "seed" in known else {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise ValueError(f"workload: {name} has {list(known)}, got {key!r}")
        options[key] = ast.literal_eval(value)
    return Workload(text, make(**options)[:limit])


def table(rows: list[Row]) -> str:
    """Rows as aligned text."""
    lines = [[title for title, _, _ in COLUMNS]]
    for row in rows:
        shown = row | {"pool_bytes": row["pool_bytes"] and row["pool_bytes"] / 2**30}
        lines.append(
            [
                form.format(shown[key]) if shown.get(key) is not None else "-"
                for _, key, form in COLUMNS
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines
    )


def main(argv: list[str] | None = None) -> list[Row]:
    """Replay, print the tables, and write what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--workload", nargs="+", default=["round-robin"], help=f"FORMAT:PATH ({', '.join(LOADERS)}) or a generator ({', '.join(GENERATORS)}), with :name=value,... for its arguments")  # fmt: skip
    parser.add_argument(
        "--preset", nargs="+", default=["gemma-4-31b"], choices=list(PRESETS), help="model"
    )
    parser.add_argument("--pool", nargs="+", default=["25%", "50%", "100%"], help="e.g. 64GiB, 10%% of the dense working set, 20requests, 5000pages")  # fmt: skip
    parser.add_argument("--retention", nargs="+", default=["auto"], help="auto, latest, dense, or an interval in tokens; default: auto")  # fmt: skip
    parser.add_argument(
        "--eviction", nargs="+", default=["lru", "adaptive"], choices=list(EVICTIONS)
    )
    parser.add_argument("--limit", type=int, help="requests at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill-rate", type=float, default=Timing.prefill_rate, help="prompt tokens a second")  # fmt: skip
    parser.add_argument("--decode-rate", type=float, default=Timing.decode_rate, help="answer tokens a second, each request")  # fmt: skip
    parser.add_argument("--chunk", type=int, default=Timing.chunk, help="tokens of a prefill chunk")
    parser.add_argument("--max-requests", type=int, default=Timing.max_requests, help="at once; 1 = one after another")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the rows as a list of objects")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (.svg, .png)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    if args.plot:
        require_matplotlib()
    timing = Timing(args.prefill_rate, args.decode_rate, args.chunk, args.max_requests)
    retentions = [int(r) if r.isdigit() else r for r in args.retention]
    rows: list[Row] = []
    try:
        for name in args.workload:
            workload = make_workload(name, args.limit, args.seed)
            for preset in args.preset:
                new = run_grid(
                    workload,
                    preset,
                    args.pool,
                    retentions,
                    args.eviction,
                    timing,
                    progress=not args.quiet,
                )
                print(
                    f"{name} ({len(workload.requests)} requests), {preset}\n{table(new)}\n",
                    flush=True,
                )
                rows += new
                if args.json:  # so that a later grid that cannot be, or an interrupt, loses nothing
                    Path(args.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.plot:
        save_plot(rows, args.plot)
    return rows


if __name__ == "__main__":
    main()
