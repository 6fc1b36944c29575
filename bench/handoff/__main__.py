"""Prefill in one process, decode in another: time and bytes of the hand-off, by part, and the same
output as of one engine.

    python -m bench.handoff
    python -m bench.handoff --store mooncake --models gemma4-tiny --prompt-tokens 2000
    python -m bench.handoff --store nixl --models gemma-3-4b --device cuda --json handoff.json

For each model two processes start. The first computes a prompt and exports it to the store, the
second imports it and generates (`quire.models.engine.handoff_calls`). One row each: tokens, bytes of
full-attention blocks and of the resume point, milliseconds of both ends, and the time to the first
token with the hand-off (import and all) and without, in an engine that has to compute the prompt.

Exit status 1 where an answer is not that of one engine that found the prompt in its own cache, or
in float32 not that of one without a cache. Stores: a folder; Mooncake Store and NIXL on the
loopback, where they are installed. Random weights, unless a model is a Hugging Face directory.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.handoff.__main__")

import argparse
import multiprocessing
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from quire.models.command import MAX_TOKENS, Parser, integer, number, output_file, program, threads
from quire.models.device import find_device
from quire.models.tokenizer import NUM_SPECIAL

from ..common.machine import describe_machine
from ..common.results import write_json
from ..common.table import aligned
from .ends import Settings, decode, prefill
from .stores import KINDS, RunningStore, running

MODELS = (
    "gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "deepseek-v4-tiny",
    "llama-tiny", "gpt-oss-tiny",
)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")
START, TAKES = 600.0, 600.0  # seconds for a process to load its model, and for each of its parts
LEAST_ID, IDS = NUM_SPECIAL, 250  # of tokens of prompts, which every vocabulary has


class Failed(RuntimeError):
    """A process ended before it should."""


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    args = _parser().parse_args(argv)
    device = find_device(args.device)
    result: dict[str, Any] = {"machine": describe_machine(device), "store": args.store, "rows": []}
    machine = result["machine"]
    print(f"{machine['device']}, {args.threads} threads a process, store: {args.store}")
    wrong = []
    with running(args.store, gib=args.gib) as store:
        for name in args.models:
            found = hand_off(_of(args, name, store))
            result["rows"].append({"model": name, **found})
            write_json(args.json, result, final=False)
            if not found["same"]:
                wrong.append(name)
    print("\n".join(aligned([HEADER, *map(_row, result["rows"])])))
    if wrong:
        print(f"WRONG: other output than that of one engine: {', '.join(wrong)}")
        return 1
    write_json(args.json, result)
    print("output: that of one engine, in all rows")
    return 0


def hand_off(settings: Settings) -> dict[str, Any]:
    """One prompt from a process to another; keys as of --json."""
    context = multiprocessing.get_context("spawn")
    ends: list[tuple[Any, Connection]] = []
    try:
        for work in (prefill, decode):
            ends.append(_start(context, work, settings))
        for end in ends:
            _receive(*end, START)
        (first, to_first), (second, to_second) = ends
        to_first.send("compute")
        sent = _receive(first, to_first, TAKES)
        to_second.send(sent["num_tokens"] or None)
        came = _receive(second, to_second, TAKES)
        to_first.send("generate")
        alone = _receive(first, to_first, TAKES)
        for process, _ in ends:
            process.join(TAKES)
    finally:
        for process, pipe in ends:
            with suppress(OSError):
                pipe.close()
            process.kill()
            process.join()
    answer = came.pop("answer")
    same = answer["token_ids"] == alone["own"]["token_ids"]
    same_as_cold = answer["token_ids"] == alone["cold"]["token_ids"]
    exact = settings.dtype == "float32" or (settings.dtype is None and settings.device == "cpu")
    return {
        "prompt_tokens": len(settings.prompt),
        "num_tokens": came["num_tokens"],
        "sent": sent,
        "received": came,
        "ttft_handed_off": came["seconds"]["total"] + answer["ttft"],
        "ttft_cold": alone["cold"]["ttft"],
        "found": answer["found"],
        "same_as_cold": same_as_cold,
        "same": same
        and (same_as_cold or not exact)
        and answer["found"] == sent["num_tokens"] == came["num_tokens"] > 0,
    }


def _start(
    context: Any, work: Callable[[Connection, Settings], None], settings: Settings
) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, settings), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _receive(process: Any, pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise Failed(f"{process.name}: expected an answer in {seconds:g} s, got none")
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        raise Failed(f"{process.name}: ended with status {process.exitcode}") from None


def _of(args: argparse.Namespace, name: str, store: RunningStore) -> Settings:
    ids = random.Random(args.seed).choices(range(LEAST_ID, IDS), k=args.prompt_tokens)
    device = str(find_device(args.device))
    return Settings(
        model=name,
        prompt=tuple(ids),
        max_tokens=args.max_tokens,
        device=device,
        dtype=args.dtype,
        seed=args.seed,
        kind=store.kind,
        address=store.address,
        threads=args.threads,
    )


HEADER = (
    "model", "tokens", "dense MiB", "point MiB", "prefill ms", "export: copy", "checksum", "store",
    "all ms", "import: copy", "checksum", "store", "all ms", "TTFT", "cold", "output",
)  # fmt: skip


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    sent, came = row["sent"], row["received"]
    sizes = [f"{sent['num_bytes'].get(kind, 0) / 2**20:.3f}" for kind in ("segment", "point")]
    parts = [
        f"{1e3 * end['seconds'].get(part, 0.0):.1f}"
        for end in (sent, came)
        for part in ("copy", "checksum", "store", "total")
    ]
    return (
        row["model"],
        str(row["num_tokens"]),
        *sizes,
        f"{1e3 * sent['prefill']:.1f}",
        *parts,
        f"{1e3 * row['ttft_handed_off']:.1f}",
        f"{1e3 * row['ttft_cold']:.1f}",
        "same" if row["same"] else "WRONG",
    )


def _parser() -> Parser:
    parser = Parser("bench.handoff", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), metavar="MODEL",
        help="named configurations or Hugging Face directories; default: a tiny one of each family")  # fmt: skip
    add("--store", choices=KINDS, default="files", help="what is between them; default: files")
    add("--gib", type=number(above=True), default=0.5, metavar="N",
        help="memory of the store, of mooncake and nixl; default: 0.5")  # fmt: skip
    add("--prompt-tokens", type=integer(2, MAX_TOKENS), default=500, metavar="N",
        help="default: 500")  # fmt: skip
    add("--max-tokens", type=integer(1, MAX_TOKENS), default=16, metavar="N",
        help="of an answer; default: 16")  # fmt: skip
    add("--device", help="torch device; default: cuda where there is one, else cpu")
    add("--dtype", choices=DTYPES,
        help="default: the checkpoint's; random: bfloat16 on a GPU, float32 on a CPU")  # fmt: skip
    add("--seed", type=integer(0), default=0, metavar="N", help="of prompts and random weights")
    add("--threads", type=threads, default=torch.get_num_threads(), metavar="N",
        help="CPU threads of torch, of each process; default: torch's own")  # fmt: skip
    add("--json", type=output_file, metavar="FILE", help="write all numbers there")
    return parser
