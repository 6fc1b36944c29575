"""Compare retentions and evictions for a model, a pool and a trace, beside the best possible.

    python -m bench.replay --workload round-robin --model gemma-4-31b --pool 25% 50% 100%
    python -m bench.replay --workload mooncake:conversation.jsonl --limit 4000 --model v4-flash \\
        --pool 5% 10% 20% 40% --max-requests 1
    python -m bench.replay --workload pr43447 --model v4-flash --pool 106126pages \\
        --retention 32768 4096
    python -m bench.replay --workload agent-pauses --model v4-flash --pool 20% --host 20% 40% \\
        --link 50
    python -m bench.replay --workload pr40676 --model gemma-4-31b --pool 45938pages \\
        --vllm dense 0 32768 4096

Requests go through the allocator on a simulated clock; nothing touches a device. Times follow from
the given rates: they serve only to compare rows.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.replay.__main__")

import inspect
import itertools
import sys
from collections.abc import Sequence
from importlib import import_module

from quire.kvcore.policies.retention import parse_retention
from quire.models.command import Parser, Refused, integer, number, output_file, program
from quire.models.integrations import require

from ..common.results import require_matplotlib, table, write_json
from ..common.traces import LOADERS
from ..common.workload import retention
from ..kvcore.__main__ import VLLM_VERSION
from .experiment import EVICTIONS, Row, empty_cache, pool_pages, run_grid
from .generators import GENERATORS
from .plot import save_plot
from .presets import PRESETS
from .simulate import SimulatedTiming, TraceWorkload

COLUMNS = (
    ("retention", "retention", ""),
    ("eviction", "eviction", ""),
    ("pool", "pool", ""),
    ("GiB", "pool_bytes", ".1f", 2**-30),
    ("host", "host", ""),
    ("hit rate", "hit_rate", ".2%"),
    ("mean hit", "mean_hit", ".2%"),
    ("TTFT p50, s", "ttft_p50", ".2f"),
    ("p99, s", "ttft_p99", ".2f"),
    ("tokens/s", "tokens_per_s", ".0f"),
    ("recomputed tokens", "recomputed_tokens", ""),
    ("evicted points", "evicted_resume_points", ""),
    ("segments", "evicted_segments", ""),
)
HOST_COLUMNS = (
    ("tokens on device", "device_tokens", ""),
    ("stalled, s", "stalled_s", ".2f"),
    ("to host, GiB", "bytes device>host", ".1f", 2**-30),
    ("back, GiB", "bytes host>device", ".1f", 2**-30),
)


def make_workload(text: str, limit: int | None, seed: int) -> TraceWorkload:
    """The workload of ``format:path`` or ``generator[:name=value,...]``.

    Raises:
        ValueError: an unknown name, or a value that the generator cannot have.
    """
    name, _, rest = text.partition(":")
    if name in LOADERS:
        if not rest:
            raise ValueError(f"workload: expected {name}:PATH, got {text!r}")
        return TraceWorkload(name, LOADERS[name](rest, limit))
    if name not in GENERATORS:
        raise ValueError(f"workload: expected one of {[*LOADERS, *GENERATORS]}, got {name!r}")
    known = inspect.signature(GENERATORS[name]).parameters
    options: dict[str, float] = {"seed": seed} if "seed" in known else {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise ValueError(f"workload: {name} has {list(known)}, got {key!r}")
        is_float = isinstance(known[key].default, float)
        parse = number(above=key == "rate") if is_float else integer(0 if key == "seed" else 1)
        try:
            options[key] = parse(value)
        except ValueError as error:
            raise ValueError(f"workload: {name}: {key}: {error}") from error
    return TraceWorkload(text, GENERATORS[name](**options)[:limit])


def vllm_interval(text: str) -> int | None:
    """Type of an option: tokens between the window tails that vLLM keeps; "dense": all, as None."""
    if text != "dense" and not text.isdecimal():
        raise Refused(f"expected dense or an interval in tokens, got {text!r}")
    return None if text == "dense" else int(text)


def eviction(text: str) -> str:
    """Type of an option: a name of `EVICTIONS`, or ``module:Class``, which joins them."""
    module, colon, name = text.partition(":")
    if colon:
        sys.path.insert(0, "")  # the command `quire` does not look in the working directory
        try:
            EVICTIONS[text] = getattr(import_module(module), name)
            EVICTIONS[text]()
        except Exception as error:  # a module of the user's may raise anything
            raise Refused(
                f"expected module:Class of an eviction policy, got {text!r}: {error}"
            ) from error
        finally:
            sys.path.remove("")
    elif text not in EVICTIONS:
        raise Refused(f"expected one of {list(EVICTIONS)}, or module:Class, got {text!r}")
    return text


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.plot:
        require_matplotlib(args.plot)
        if args.host:
            raise ValueError("plot: expected no --host with it, got both")
    if args.vllm:
        require("vllm", VLLM_VERSION)
    timing = SimulatedTiming(args.prefill_rate, args.decode_rate, args.chunk, args.max_requests)
    # A fault of any workload or size is reported before the first one is replayed.
    workloads = [make_workload(name, args.limit, args.seed) for name in args.workload]
    for workload, preset in itertools.product(workloads, args.model):
        groups = PRESETS[preset]
        for size in args.pool:
            pool_pages(size, groups, workload)
        for size in args.host:
            pool_pages(size, groups, workload, "host")
        for kept in args.retention:
            parse_retention(kept, empty_cache(groups, workload).layout)
    columns = (*COLUMNS, *HOST_COLUMNS) if args.host else COLUMNS
    rows: list[Row] = []
    named = zip(args.workload, workloads, strict=True)
    for (name, workload), preset in itertools.product(named, args.model):
        new = run_grid(
            workload, preset, args.pool, args.retention, args.eviction, timing,
            hosts=args.host, link=args.link * 1e9, progress=not args.quiet, vllm=args.vllm,
            replay_tokens=args.replay_tokens,
        )  # fmt: skip
        title = f"{name} ({len(workload.requests)} requests), {preset}"
        print(f"{title}\n{table(new, columns, left=0)}\n", flush=True)
        rows += new
        write_json(args.json, rows)  # a later error or Ctrl-C loses nothing
    if args.plot:
        save_plot(rows, args.plot)
    return 0


def _parser() -> Parser:
    parser = Parser("bench.replay", __doc__)
    add, rate = parser.add_argument, number(above=True)
    loaders, generators = ", ".join(LOADERS), ", ".join(GENERATORS)
    source = f"FORMAT:PATH ({loaders}), or a generator ({generators}) with :name=value,..."
    add("--workload", nargs="+", default=["round-robin"], help=f"{source}; default: round-robin")
    pages = {"choices": list(PRESETS), "help": "sizes of its pages; default: gemma-4-31b"}
    add("--model", nargs="+", default=["gemma-4-31b"], **pages)
    sizes = "e.g. 64GiB, 10%% of the dense working set, 5000pages; default: 25%% 50%% 100%%"
    add("--pool", nargs="+", default=["25%", "50%", "100%"], help=sizes)
    kept = "auto, latest, dense, or an interval in tokens; default: auto"
    add("--retention", nargs="+", type=retention, default=["auto"], help=kept)
    policies = f"{', '.join(EVICTIONS)}, or module:Class of your own; default: lru adaptive"
    add("--eviction", nargs="+", type=eviction, default=["lru", "adaptive"], help=policies)
    again = "replays of so many tokens where no resume point is (KVCache); default: none"
    add("--replay-tokens", type=integer(), help=again)
    kept = "retention intervals of vLLM's KVCacheManager, or dense, replayed beside; default: none"
    add("--vllm", nargs="+", type=vllm_interval, default=[], metavar="TOKENS", help=kept)
    host = "host memory behind each pool, in sizes as of --pool; default: none"
    add("--host", nargs="+", default=[], metavar="SIZE", help=host)
    add("--link", type=rate, default=50.0, help="GB/s to the host, and from it; default: 50")
    add("--limit", type=integer(), help="requests at most; default: all")
    add("--seed", type=integer(0, 2**63 - 1), default=0, help="of a generator; default: 0")
    prefill = "prompt tokens a second; default: %(default)g"
    add("--prefill-rate", type=rate, default=SimulatedTiming.prefill_rate, help=prefill)
    decode = "answer tokens a second, each request; default: %(default)g"
    add("--decode-rate", type=rate, default=SimulatedTiming.decode_rate, help=decode)
    chunk = "tokens of a prefill chunk; default: %(default)d"
    add("--chunk", type=integer(), default=SimulatedTiming.chunk, help=chunk)
    most, once = SimulatedTiming.max_requests, "at once; 1: one by one; default: %(default)d"
    add("--max-requests", type=integer(most=65536), default=most, help=once)
    add("--json", type=output_file, metavar="FILE", help="write the rows as a list of objects")
    add("--plot", type=output_file, metavar="FILE", help="write a picture (.svg, .png)")
    add("--quiet", action="store_true", help="no progress bar; a pipe or file gets none")
    return parser
