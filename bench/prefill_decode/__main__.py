"""The main benchmark: generates with a model through allocator and kernels, proves the output
right, then says how fast it was.

    python -m bench.prefill_decode
    python -m bench.prefill_decode --json result.json --plot result.png
    python -m bench.prefill_decode --model gemma4-tiny --split
    python -m bench.prefill_decode --trace conversation.jsonl.xz --limit 40 --scale 0.05
    python -m bench.prefill_decode --model gemma4-tiny --retention 64 --no-baseline --scale 0.2
    python -m bench.prefill_decode --kv-cache-dtype fp8 --limit 4
    python -m bench.prefill_decode --compare torch --limit 4
    python -m bench.prefill_decode --model deepseek-v4-tiny --limit 2 --scale 0.25 --speculate mtp --draft-tokens 2
    python -m bench.prefill_decode --num-pages 400 --host-cache 0.25 --no-baseline
    python -m bench.prefill_decode --limit 4 --no-baseline --tensor-parallel-size 2

Work: chats of several turns with shared system prompts, or a trace of requests in Mooncake's
format. At most --max-num-seqs requests are in the engine at once; the next is added when one is
finished, so the time to the first token has no queue in front. Every answer has its full length:
stop tokens do not end it.

Exit status 1, and no numbers, when a checked token is not what a full forward pass without any
cache says (`bench.prefill_decode.verify`). With caching off the same prompts run again; a request
whose output then differs is checked too, in both runs. Engines are warmed up with the first
requests, apart from the runs that are measured. Keys of --json: `bench.prefill_decode.report`.

With --kv-cache-dtype fp8 pages hold keys and values in e4m3, and which of them a query sees rounded
depends on where its prompt was cut into steps: at a hit elsewhere than in a cold run. So outputs
need not be identical with caching off, and of those that differ only the requests that are checked
anyway are checked there. A token may be as far below the largest logit of the full pass, whose keys
and values are not rounded, as rounding all of them moves two logits
(`bench.prefill_decode.verify`).

With --speculate all of these runs have a drafter: "ngram" repeats earlier text, "mtp" is the
model's own drafter layer. The prompts then run once more, with caching and without a drafter, and
outputs that differ are checked in both runs. How often a random model's drafter is right is a
matter of how its weights were drawn (`bench.prefill_decode.build`), not of a trained one.

With --host-cache what leaves the pool is kept in host memory (`quire.models.engine.host_tier`), and the
prompts run once more without it, which outputs of the first run are compared with.

With --tensor-parallel-size N the prompts run once more on N ranks of this machine, each with a
part of the model. What they generate is checked by the passes of one rank, which has to hold the
whole model; then come the bytes that a rank sends, against the least that tensor parallel can, and
the context that a pool of the same bytes holds, against one rank's.

With --compare the prompts run once more, with caching and the other implementation, and both are
printed side by side; what it generates is checked as well.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.prefill_decode.__main__")

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.models.command import (
    MAX_DRAFTS,
    MAX_PAGES,
    MAX_TOKENS,
    Parser,
    input_file,
    integer,
    number,
    output_file,
    program,
    threads,
)
from quire.models.config.model import MAX_RANKS
from quire.models.device import find_device
from quire.models.engine.config import IMPLS, KV_CACHE_DTYPES
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.memory import weight_bytes
from quire.models.engine.speculative import Drafter
from quire.models.llm import DRAFTERS
from quire.models.tokenizer import NUM_SPECIAL

from ..common.floors import measure_rates
from ..common.machine import describe_machine
from ..common.plot import require_matplotlib
from ..common.results import write_json
from ..common.traces import read_trace, trace_workload
from ..common.workload import Workload, chat_workload
from .build import BenchModel, build_model
from .drive import Key, Run, run_workload
from .plot import save_plot
from .ranks import run_on_ranks
from .report import comparison, metrics, report, speculation, tiers
from .text import header, split_table, table
from .verify import Check, check_outputs, sample

DTYPES = ("bfloat16", "float16", "float32")
WARM_UP_SESSIONS = 2


class WrongOutput(Exception):
    """The model's output differs from the full forward pass; the message says where."""


@dataclass(frozen=True)
class Measured:
    """A run, and what of its engine the report needs."""

    run: Run
    num_pages: int
    bytes_per_token: float
    describe: str
    moved: dict[str, int]


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    args = _parser().parse_args(argv)
    before = torch.get_num_threads()
    try:
        if args.draft_tokens is not None and not args.speculate:
            raise ValueError("draft_tokens: expected --speculate with it, got none")
        has_host = args.host_cache is not None
        if has_host and (args.compare or args.speculate or (args.split or 1) > 1):
            raise ValueError("host_cache: expected no --compare, --speculate or --split with it")
        if args.tensor_parallel_size is not None and (has_host or args.speculate):
            raise ValueError(
                "tensor_parallel_size: expected no --host-cache or --speculate with it"
            )
        torch.set_num_threads(args.threads)
        if args.plot:
            require_matplotlib(args.plot)
        if args.trace:  # what is wrong with it is said before a model is built
            read_trace(args.trace, limit=args.limit)
        device = find_device(args.device)
        dtype = getattr(torch, args.dtype) if args.dtype else None
        name = args.model or ("gemma-3-4b" if device.type == "cuda" else "gemma4-small")
        built = build_model(
            name, device=device, dtype=dtype, seed=args.seed,
            kv_cache_dtype=args.kv_cache_dtype,
        )  # fmt: skip
        if args.tensor_parallel_size is not None:
            # Says what does not fit.
            built.model.config.shard(args.tensor_parallel_size)
        workload = _workload(args, built)
        settings = _settings(args, device, workload)
        result = measure(
            built,
            workload,
            settings,
            num_checks=args.check,
            baseline=not args.no_baseline,
            speculate=args.speculate,
            draft_tokens=args.draft_tokens or 1,
            split_runs=args.split or 1,
            compare=args.compare,
            num_ranks=args.tensor_parallel_size,
            keep=lambda result: write_json(args.json, result, final=False, indent=2),
        )
        write_json(args.json, result, indent=2)
        print(header(result), table(result), sep="\n\n")
        if args.split:
            print("", split_table(result), sep="\n")
        if args.plot:
            save_plot(result, args.plot)
    except WrongOutput as error:
        if args.json and args.json.is_file():
            args.json.unlink()  # what was known before
        print(f"refusing to report: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(before)
    return 0


def measure(
    built: BenchModel,
    workload: Workload,
    settings: EngineConfig,
    *,
    num_checks: int,
    baseline: bool = True,
    speculate: str | None = None,
    draft_tokens: int = 1,
    split_runs: int = 1,
    compare: str | None = None,
    num_ranks: int | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Runs, checks and measures; the dictionary of `bench.prefill_decode.report`.

    Args:
        num_checks: requests to check at least.
        baseline: run once more with caching off.
        speculate: None, or what drafts (`DRAFTERS`), ``draft_tokens`` a step; then once more
            without.
        split_runs: runs with caching on, for the split of CPU time; all other numbers are those of
            the first.
        compare: None, or the implementation to run once more with.
        num_ranks: None, or how many ranks to run once more on.
        keep: gets the dictionary as far as it is known, whenever a run is checked.

    Raises:
        WrongOutput; what the engine raises.
    """
    model = built.model

    def drafter() -> Drafter | None:
        return DRAFTERS[speculate](model, draft_tokens) if speculate else None

    warm = replace(workload, sessions=tuple(s[:1] for s in workload.sessions[:WARM_UP_SESSIONS]))
    # One size for all engines: what is free is not quite the same for each.
    without = replace(settings, host_cache_gib=None)
    warmed = _run(built, warm, without, "warm-up", drafter=drafter())
    settings, without = (replace(s, num_pages=warmed.num_pages) for s in (settings, without))
    others = replace(settings, impl=compare)
    if compare:
        _run(built, warm, others, f"warm-up, {compare}", drafter=drafter())
    cached = _run(built, workload, settings, "caching on", drafter=drafter())
    outputs = cached.run.outputs
    dtype, sampled = settings.kv_cache_dtype, sample(outputs, num_checks)
    check = _checked(built, {key: outputs[key] for key in sampled}, dtype)
    among = outputs if dtype == "auto" else sampled
    with torch.cuda.device_of(next(model.parameters())):  # whose events and streams are timed
        rates = measure_rates(model)
    uncached = plain = other = untiered = parallel = None
    again: list[Run] = []

    def known() -> dict[str, Any]:
        return report(
            machine=describe_machine(model.device),
            model={
                "name": model.config.name,
                "source": built.source,
                "parameters": sum(weight.numel() for weight in model.parameters()),
                "weight_bytes": weight_bytes(model),
                "dtype": str(model.dtype).removeprefix("torch."),
            },
            engine={
                "impl": settings.impl or ("triton" if model.device.type == "cuda" else "torch"),
                "kv_cache_dtype": dtype,
                "retention": settings.retention,
                "num_pages": cached.num_pages,
                "max_num_seqs": settings.max_num_seqs,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "describe": cached.describe,
            },
            workload=workload,
            check=check,
            rates=rates,
            cached=metrics(
                cached.run, model, rates, cached.num_pages, kv_cache_dtype=dtype, again=again
            ),
            uncached=uncached
            and metrics(uncached.run, model, rates, uncached.num_pages, kv_cache_dtype=dtype),
            compared=uncached and comparison(cached.run, uncached.run),
            speculated=plain and speculation(speculate, draft_tokens, cached.run, plain.run),
            tiers=untiered
            and tiers(
                settings,
                cached.run,
                cached.moved,
                untiered.run,
                metrics(untiered.run, model, rates, untiered.num_pages, kv_cache_dtype=dtype),
            ),
            ranks=parallel
            and {
                **parallel[1],
                "run": metrics(parallel[0], model, rates, settings.num_pages, kv_cache_dtype=dtype),
                "comparison": comparison(parallel[0], cached.run),
            },
            other_impl=other
            and {
                "impl": compare,
                "run": metrics(other.run, model, rates, other.num_pages, kv_cache_dtype=dtype),
                "comparison": comparison(other.run, cached.run),
            },
        )

    if settings.host_cache_gib is not None:
        keep(known())
        prompts = cached.run.prompts
        untiered = _run(built, workload, without, "without tiers", prompts=prompts)
        _check_differing(built, cached.run, untiered.run, among, dtype)
    if baseline:
        keep(known())
        off = replace(without, enable_caching=False)
        prompts = cached.run.prompts
        uncached = _run(built, workload, off, "caching off", prompts=prompts, drafter=drafter())
        _check_differing(built, cached.run, uncached.run, among, dtype)
    if speculate:
        keep(known())
        plain = _run(built, workload, settings, "no drafts", prompts=cached.run.prompts)
        _check_differing(built, cached.run, plain.run, among, dtype)
    if compare:
        keep(known())
        prompts = cached.run.prompts
        other = _run(built, workload, others, compare, prompts=prompts, drafter=drafter())
        _checked(built, {key: other.run.outputs[key] for key in sampled}, dtype)
    if num_ranks:
        keep(known())
        prompts = cached.run.prompts
        parallel = run_on_ranks(
            built,
            built.directory,
            workload,
            replace(settings, tensor_parallel_size=num_ranks),
            prompts,
            bytes_per_token=cached.bytes_per_token,
        )
        _checked(built, {key: parallel[0].outputs[key] for key in sampled}, dtype)
    for _ in range(split_runs - 1):
        keep(known())
        prompts = cached.run.prompts
        more = _run(built, workload, settings, "again", prompts=prompts, drafter=drafter())
        again.append(more.run)
    return known()


def _run(
    built: BenchModel,
    workload: Workload,
    settings: EngineConfig,
    label: str,
    prompts: dict[Key, tuple[int, ...]] | None = None,
    drafter: Drafter | None = None,
) -> Measured:
    """One engine's life; its pages are free again on return."""
    engine = Engine(built.model, settings, drafter=drafter)
    describe, num_pages = engine.kv.describe(), engine.kv.num_pages
    bytes_per_token = engine.memory.bytes_per_token
    run = run_workload(
        engine, workload, concurrency=settings.max_num_seqs, prompts=prompts, label=label
    )
    engine.close()
    moved = {} if engine.tiers is None else engine.tiers.copier.num_bytes
    del engine
    gc.collect()
    return Measured(run, num_pages, bytes_per_token, describe, moved)


def _checked(built: BenchModel, outputs: dict, kv_cache_dtype: str) -> Check:
    check = check_outputs(built.model, outputs, kv_cache_dtype=kv_cache_dtype)
    if check.problems:
        raise WrongOutput(
            f"{len(check.problems)} of {check.num_requests} checked requests are not shown to be right by a full forward pass\n  "
            + "\n  ".join(check.problems)
        )
    return check


def _check_differing(
    built: BenchModel, one: Run, other: Run, among: Iterable[Key], kv_cache_dtype: str
) -> None:
    """Checks, in both runs, the requests whose outputs differ."""
    keys = [k for k in among if one.outputs[k].token_ids != other.outputs[k].token_ids]
    for run in (one, other):
        _checked(built, {key: run.outputs[key] for key in keys}, kv_cache_dtype)


def _workload(args: argparse.Namespace, built: BenchModel) -> Workload:
    config = built.model.config
    if args.trace:
        return trace_workload(
            args.trace,
            vocab_size=config.vocab_size,
            low=NUM_SPECIAL,
            limit=args.limit,
            scale=args.scale,
            seed=args.seed,
        )
    return chat_workload(
        built.tokenizer.encode,
        bos_token_id=config.bos_token_id,
        limit=args.limit,
        scale=args.scale,
        seed=args.seed,
    )


def _settings(args: argparse.Namespace, device: torch.device, workload: Workload) -> EngineConfig:
    on_gpu = device.type == "cuda"
    return EngineConfig(
        max_num_seqs=args.max_num_seqs or (16 if on_gpu else 4),
        max_num_batched_tokens=args.max_num_batched_tokens or (8192 if on_gpu else 512),
        max_model_len=workload.longest,
        num_pages=args.num_pages,
        kv_cache_dtype=args.kv_cache_dtype,
        retention=args.retention,
        impl=args.impl,
        decode_graphs=False if args.no_graphs else None,
        host_cache_gib=args.host_cache,
    )


def _retention(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _parser() -> Parser:
    parser = Parser("bench.prefill_decode", __doc__)
    add = parser.add_argument
    add(
        "--model",
        metavar="NAME|DIR",
        help="named configuration (random weights) or Hugging Face directory; default: gemma4-small, on a GPU gemma-3-4b",
    )
    add(
        "--trace",
        type=input_file,
        metavar="FILE",
        help="Mooncake JSONL, also .xz, instead of chats; timestamps give the order only",
    )
    add("--limit", type=integer(), metavar="N", help="requests of the trace, or sessions, at most")
    add(
        "--scale",
        type=number(above=True),
        default=1.0,
        metavar="F",
        help="factor of all lengths; default: 1",
    )
    add(
        "--tensor-parallel-size",
        type=integer(2, MAX_RANKS),
        metavar="N",
        help="run once more on N ranks of this machine",
    )
    add("--device", help="torch device; default: cuda where there is one, else cpu")
    add(
        "--dtype",
        choices=DTYPES,
        help="default: the checkpoint's; random: bfloat16 on a GPU, float32 on a CPU",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="what pages hold: auto (default) = the model's dtype; fp8 = e4m3 with a scale for each row; fp8_per_tensor = with one for each layer's keys and one for its values",
    )
    add("--impl", choices=IMPLS, help="kernels; default: triton on a GPU, else torch")
    add("--compare", choices=IMPLS, help="other kernels to run once more with; default: none")
    add(
        "--no-graphs",
        action="store_true",
        help="launch each kernel of a decode step by itself, and not a CUDA graph of them",
    )
    add(
        "--retention",
        type=_retention,
        default="auto",
        metavar="R",
        help="which boundaries stay resumable: auto (default), latest, dense, or an interval in tokens",
    )
    # One: the products of a small model gain little from more, and threads that wait for a busy
    # core cost much more than that.
    add("--threads", type=threads, default=1, metavar="N", help="CPU threads of torch; default: 1")
    add(
        "--num-pages",
        type=integer(most=MAX_PAGES),
        metavar="N",
        help="pool size; default: what memory allows",
    )
    add(
        "--host-cache",
        type=number(above=True),
        metavar="GIB",
        help="host memory behind the pool; default: none",
    )
    add(
        "--max-num-seqs",
        type=integer(),
        metavar="N",
        help="requests at once; default: 4, on a GPU 16",
    )
    add(
        "--max-num-batched-tokens",
        type=integer(most=MAX_TOKENS),
        metavar="N",
        help="new tokens a step; default: 512, on a GPU 8192",
    )
    add("--speculate", choices=sorted(DRAFTERS), help="what drafts tokens; default: nothing")
    add(
        "--draft-tokens",
        type=integer(most=MAX_DRAFTS),
        metavar="K",
        help="drafts a step; default: 1",
    )
    add("--check", type=integer(), default=8, metavar="N", help="requests to check; default: 8")
    add("--no-baseline", action="store_true", help="skip the run with caching off")
    add(
        "--split",
        type=integer(most=1000),
        nargs="?",
        const=3,  # what hits a step in one run is left out
        metavar="N",
        help="print what each part of a step takes of the CPU: medians of N runs of each step; default: 3",
    )
    add("--json", type=output_file, metavar="FILE", help="write all numbers, after each run")
    add("--plot", type=output_file, metavar="FILE", help="write a picture (extra: plot)")
    add(
        "--seed",
        type=integer(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="of weights, lengths and tokens",
    )
    return parser
