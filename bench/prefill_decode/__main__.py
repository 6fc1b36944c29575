"""The main benchmark: generates with a model through allocator and kernels, proves the output
right, then says how fast it was.

    python -m bench.prefill_decode
    python -m bench.prefill_decode --json result.json --plot result.png
    python -m bench.prefill_decode --model gemma4-tiny --split
    python -m bench.prefill_decode --trace conversation.jsonl.xz --limit 40 --scale 0.05
    python -m bench.prefill_decode --model gemma4-tiny --retention 64 --no-baseline --scale 0.2
    python -m bench.prefill_decode --kv-cache-dtype fp8 --limit 4
    python -m bench.prefill_decode --model deepseek-v4-tiny --limit 2 --scale 0.25 --speculate mtp
    python -m bench.prefill_decode --num-pages 400 --host-cache 0.25 --no-baseline
    python -m bench.prefill_decode --limit 4 --no-baseline --tensor-parallel-size 2

Work: chats of several turns with shared system prompts, or a trace of requests in Mooncake's
format. At most --max-num-seqs requests are in the engine at once, so the time to the first token
has no queue in front. Stop tokens do not end an answer.

Exit status 1, and no numbers, when a checked token is not that of a full forward pass without any
cache (`bench.prefill_decode.verify`). Then the same prompts run again with caching off, and each
request whose output differs is checked in both runs. Engines are warmed up before. Keys of --json:
`bench.prefill_decode.report`.

These run the prompts once more, and print both runs side by side or how they differ:

    --host-cache            without the host memory that keeps what leaves the pool
    --speculate             without a drafter: "ngram" repeats earlier text, "mtp" is the model's
                            own drafter layer (random weights: `bench.prefill_decode.build`)
    --tensor-parallel-size  on N ranks of this machine, each with a part of the model, and the
                            context that a pool of the same bytes holds

With --kv-cache-dtype fp8, the keys and values that a query sees rounded depend on how its prompt
was cut into steps, so outputs may differ with caching off: only the requests that are checked
anyway are compared. A token may be as far below the largest logit as rounding all of them moves
two.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.prefill_decode.__main__")

import argparse
import gc
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
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

from ..common.floors import device_rates
from ..common.results import require_matplotlib, write_json
from ..common.traces import load_mooncake
from ..common.workload import Workload, chat_workload, retention, trace_workload
from .build import BenchModel, build_model
from .drive import Key, WorkloadRun, run_workload
from .plot import save_plot
from .ranks import run_on_ranks
from .report import about, comparison, metrics, speculation, tiers
from .text import header, split_table, table
from .verify import Check, check_outputs, sample

DTYPES = ("bfloat16", "float16", "float32")
WARM_UP_SESSIONS = 2


class WrongOutput(Exception):
    """The model's output differs from the full forward pass; the message says where."""


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    _expect_together(args)
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(args.threads)
        if args.plot:
            require_matplotlib(args.plot)
        if args.trace:  # what is wrong with it is said before a model is built
            load_mooncake(args.trace, args.limit)
        device = find_device(args.device)
        built = build_model(
            args.model or ("gemma-3-4b" if device.type == "cuda" else "gemma4-small"),
            device=device,
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            seed=args.seed,
            kv_cache_dtype=args.kv_cache_dtype,
        )
        if args.tensor_parallel_size is not None:
            built.model.config.shard(args.tensor_parallel_size)  # raises if it cannot
        result = measure(args, built, _workload(args, built))
        write_json(args.json, result)
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
        torch.set_num_threads(threads_before)
    return 0


def measure(args: argparse.Namespace, built: BenchModel, workload: Workload) -> dict[str, Any]:
    """Run, check and measure; returns the dictionary of `bench.prefill_decode.report`.

    --json is written whenever a run has been checked.

    Raises:
        WrongOutput, and the errors of the engine.
    """
    model, dtype, drafts = built.model, args.kv_cache_dtype, args.draft_tokens or 1

    def drafter() -> Drafter | None:
        return DRAFTERS[args.speculate](model, drafts) if args.speculate else None

    warm = replace(workload, sessions=tuple(s[:1] for s in workload.sessions[:WARM_UP_SESSIONS]))
    settings = _settings(args, model.device, workload)
    warmed = _run(built, warm, replace(settings, host_cache_gib=None), "warm-up", drafter=drafter())
    # One size for all engines: what is free is not quite the same for each.
    settings = replace(settings, num_pages=warmed.num_pages)
    without = replace(settings, host_cache_gib=None)
    cached = _run(built, workload, settings, "caching on", drafter=drafter())
    sampled = sample(cached.outputs, args.check)
    check = _check(built, cached, sampled, dtype)
    # Over pages of e4m3 outputs may differ, and only those that are checked anyway are checked.
    among = cached.outputs if dtype == "auto" else sampled
    with torch.cuda.device_of(next(model.parameters())):  # whose events and streams are timed
        # A copy of the size of the weights: a small model stays in a CPU's caches.
        rates = device_rates(model.device, model.dtype, copy_bytes=weight_bytes(model))

    def numbers(run: WorkloadRun) -> dict[str, Any]:
        return metrics(run, model, rates, kv_cache_dtype=dtype)

    def again(settings: EngineConfig, label: str, drafter: Drafter | None) -> WorkloadRun:
        """Run the same prompts once more; check requests with another output in both runs."""
        write_json(args.json, result, final=False)
        other = _run(built, workload, settings, label, cached.prompts, drafter)
        one, two = cached.outputs, other.outputs
        keys = [key for key in among if one[key].token_ids != two[key].token_ids]
        for run in (cached, other):
            _check(built, run, keys, dtype)
        return other

    result: dict[str, Any] = {
        **about(built, settings, workload, cached, check),
        "rates": asdict(rates),
        "cached": numbers(cached),
        **dict.fromkeys(("uncached", "comparison", "speculation", "tiers", "ranks")),
    }
    if args.host_cache is not None:
        other = again(without, "without tiers", None)
        compared = {"without": numbers(other), "comparison": comparison(cached, other)}
        result["tiers"] = {"host_gib": args.host_cache, **tiers(cached), **compared}
    if not args.no_baseline:
        other = again(replace(without, enable_caching=False), "caching off", drafter())
        result |= {"uncached": numbers(other), "comparison": comparison(cached, other)}
    if args.speculate:
        other = again(settings, "no drafts", None)
        result["speculation"] = speculation(args.speculate, drafts, cached, other)
    if args.tensor_parallel_size:
        write_json(args.json, result, final=False)
        parallel = replace(settings, tensor_parallel_size=args.tensor_parallel_size)
        other, found = run_on_ranks(built, workload, parallel, cached)
        _check(built, other, sampled, dtype)
        compared = {"run": numbers(other), "comparison": comparison(other, cached)}
        result["ranks"] = {**found, **compared}
    return result


def _run(
    built: BenchModel,
    workload: Workload,
    settings: EngineConfig,
    label: str,
    prompts: dict[Key, tuple[int, ...]] | None = None,
    drafter: Drafter | None = None,
) -> WorkloadRun:
    """One engine's life; its pages are free again on return."""
    engine = Engine(built.model, settings, drafter=drafter)
    concurrency = settings.max_num_seqs
    run = run_workload(engine, workload, concurrency=concurrency, prompts=prompts, label=label)
    engine.close()
    del engine
    gc.collect()
    return run


def _check(built: BenchModel, run: WorkloadRun, keys: Iterable[Key], kv_cache_dtype: str) -> Check:
    """Check some requests of a run; raises WrongOutput."""
    outputs = {key: run.outputs[key] for key in keys}
    check = check_outputs(built.model, outputs, kv_cache_dtype=kv_cache_dtype)
    if check.problems:
        raise WrongOutput(
            f"{len(check.problems)} of {check.num_requests} checked requests are not shown to be "
            "right by a full forward pass\n  " + "\n  ".join(check.problems)
        )
    return check


def _expect_together(args: argparse.Namespace) -> None:
    """Raise ValueError for options that exclude each other."""
    has_host, has_ranks = args.host_cache is not None, args.tensor_parallel_size is not None
    if args.draft_tokens is not None and not args.speculate:
        raise ValueError("draft_tokens: expected --speculate with it, got none")
    if has_host and args.speculate:
        raise ValueError("host_cache: expected no --speculate with it")
    if has_ranks and (has_host or args.speculate):
        raise ValueError("tensor_parallel_size: expected no --host-cache or --speculate with it")


def _workload(args: argparse.Namespace, built: BenchModel) -> Workload:
    config = built.model.config
    sizes = {"limit": args.limit, "scale": args.scale, "seed": args.seed}
    if args.trace:
        return trace_workload(args.trace, vocab_size=config.vocab_size, low=NUM_SPECIAL, **sizes)
    return chat_workload(built.tokenizer.encode, bos_token_id=config.bos_token_id, **sizes)


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
        host_cache_gib=args.host_cache,
    )


def _parser() -> Parser:
    parser = Parser("bench.prefill_decode", __doc__)
    add, count = parser.add_argument, integer()
    model = (
        "configuration (random weights) or Hugging Face directory; "
        "default: gemma4-small, on a GPU gemma-3-4b"
    )
    add("--model", metavar="NAME|DIR", help=model)
    add("--trace", type=input_file, metavar="FILE", help="Mooncake JSONL, also .xz; not chats")
    add("--limit", type=count, metavar="N", help="requests of the trace, or sessions, at most")
    add("--scale", type=number(above=True), default=1.0, metavar="F", help="factor of all lengths")
    ranks = integer(2, MAX_RANKS)
    add("--tensor-parallel-size", type=ranks, metavar="N", help="run once more on N ranks here")
    add("--device", help="torch device; default: cuda where there is one, else cpu")
    dtype = "default: the checkpoint's; random: bfloat16, float32 (CPU)"
    add("--dtype", choices=DTYPES, help=dtype)
    pages = (
        "of pages: auto (default) = the model's; fp8 = e4m3 with a scale for each row; "
        "fp8_per_tensor = with one for each layer's keys and one for its values"
    )
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help=pages)
    add("--impl", choices=IMPLS, help="kernels; default: triton on a GPU, else torch")
    kept = "boundaries that stay resumable: auto (default), latest, dense, or a number of tokens"
    add("--retention", type=retention, default="auto", metavar="R", help=kept)
    # One: small products gain little from more, and waiting for a busy core costs much.
    add("--threads", type=threads, default=1, metavar="N", help="CPU threads of torch; default: 1")
    most_pages, tokens = integer(most=MAX_PAGES), integer(most=MAX_TOKENS)
    add("--num-pages", type=most_pages, metavar="N", help="pool size; default: what memory allows")
    host = "host memory behind the pool; default: none"
    add("--host-cache", type=number(above=True), metavar="GIB", help=host)
    add("--max-num-seqs", type=count, metavar="N", help="requests at once; default: 4, GPU 16")
    new = "new tokens a step; default: 512, on a GPU 8192"
    add("--max-num-batched-tokens", type=tokens, metavar="N", help=new)
    drafts = integer(most=MAX_DRAFTS)
    add("--speculate", choices=sorted(DRAFTERS), help="what drafts tokens; default: nothing")
    add("--draft-tokens", type=drafts, metavar="K", help="drafts a step; default: 1")
    add("--check", type=count, default=8, metavar="N", help="requests to check; default: 8")
    add("--no-baseline", action="store_true", help="skip the run with caching off")
    add("--split", action="store_true", help="print the CPU time of each part of a step")
    add("--json", type=output_file, metavar="FILE", help="write all numbers, after each run")
    add("--plot", type=output_file, metavar="FILE", help="write a picture (extra: plot)")
    seed = integer(0, 2**63 - 1)
    add("--seed", type=seed, default=0, metavar="N", help="of weights, lengths and tokens")
    return parser
