"""Generate text from the command line.

    quire generate --model gemma4-tiny --prompt "Once upon a time"
    quire generate --model MODEL --file prompt.txt --temperature 0.8 --top-p 0.95 --seed 1
    echo "Once upon a time" | quire generate --model MODEL --stats
    quire chat --model MODEL --system "Answer in one sentence."

    quire generate --model MODEL --tensor-parallel-size 2 --prompt "Once upon a time"
    torchrun --nproc-per-node 2 -m quire.models.generate --model MODEL --prompt "Once upon a time"

MODEL is a Hugging Face directory, a .gguf file, a name on the Hub, or a built-in name (random
weights). One prompt is answered as a stream; several (--prompt again) are generated together and
printed in order. `quire chat` is --chat: Ctrl-C ends an answer, and at the prompt the chat; a
second one does not wait for the step.

Exit status: 0; 2 after an error, with the reason on stderr; 130 after Ctrl-C; 141 when the reader
of the output has gone.
"""

from __future__ import annotations

if __name__ == "__main__":
    from .command import run

    run("quire.models.generate")

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from .chat import find_chat
from .command import MAX_DRAFTS, MAX_PAGES, REFUSED, Parser, integer, number, program, threads
from .config.model import MAX_RANKS
from .config.named import named_configs
from .engine.config import IMPLS, KV_CACHE_DTYPES
from .engine.engine import EngineConfig
from .engine.outputs import RequestError
from .engine.request import MAX_SAMPLES, SamplingParams
from .llm import LLM, make_drafter
from .loading.locate import locate_checkpoint
from .loading.weights import DTYPES
from .parallel.launch import launched

CHAT = """Talk to a model; each line is a message.

    quire chat --model MODEL --system "Answer in one sentence."

MODEL is a Hugging Face directory, a .gguf file, a name on the Hub, or a built-in name (random
weights). Ctrl-C ends an answer, and at the prompt the chat, as does Ctrl-D; a second Ctrl-C does
not wait for the step.

Exit status: 0; 2 after an error, with the reason on stderr; 130 after Ctrl-C; 141 when the reader
of the output has gone.
"""


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    _check(args)
    torch.set_num_threads(args.threads)
    _params(args, SamplingParams())  # refuses values before weights are read
    size, rank = launched()
    prompts = [] if args.chat or rank else _prompts(args)
    model = args.model if args.model in named_configs() else locate_checkpoint(args.model)
    if args.chat and isinstance(model, Path):
        find_chat(model)
    drafter = None
    if args.speculate:
        drafter = partial(make_drafter, args.drafter or "ngram", args.speculate)
    config = EngineConfig(
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        num_pages=args.num_pages,
        memory_fraction=args.memory_fraction,
        kv_cache_dtype=args.kv_cache_dtype,
        impl=args.impl,
        decode_graphs=False if args.no_graphs else None,
        tensor_parallel_size=args.tensor_parallel_size or size,
    )
    options = {"device": args.device, "dtype": args.dtype, "seed": args.model_seed}
    llm = LLM(model, engine=config, drafter=drafter, **options)
    params = _params(args, llm.default_params)
    if args.stats:
        print(llm.engine.memory.describe(), sampling(params), sep="\n", file=sys.stderr)
    try:
        if args.chat:
            return _chat(llm, params, args.system, args.model)
        return _answer(llm, prompts, params)
    finally:
        if args.stats:
            print(stats(llm), file=sys.stderr)


def sampling(params: SamplingParams) -> str:
    names = ["repetition_penalty"]
    if params.temperature:
        names = ["temperature", "top_k", "top_p", "min_p", *names]
    changed = [n for n in names if getattr(params, n) != getattr(SamplingParams, n)]
    words = [f"{name} {getattr(params, name):.4g}" for name in changed]
    return "sampling  " + ", ".join(words if params.temperature else ["greedy", *words])


def stats(llm: LLM) -> str:
    """Counts and times of the engine, in a few lines."""
    totals, cache = llm.engine.totals, llm.engine.kv.stats()
    seconds = max(totals.total, 1e-9)
    rest = totals.total - totals.model - totals.allocator
    lines = [
        f"tokens    {totals.num_generated_tokens} generated, {totals.num_tokens} computed in "
        f"{totals.num_steps} steps, {totals.num_generated_tokens / seconds:.4g} generated/s",
        f"time      {totals.total:.3f} s: model and sampling {totals.model / seconds:.1%}, "
        f"allocator {totals.allocator / seconds:.1%}, rest {rest / seconds:.1%}; hashing of "
        f"prompts {totals.hashing * 1e3:.2f} ms; device idle between steps "
        f"{totals.idle / seconds:.1%}",
        f"cache     {cache['hit_tokens']} of {cache['prompt_tokens']} prompt tokens were cached; "
        f"{totals.num_preempted} preemptions",
    ]
    if llm.engine.drafter is not None:
        lines.append(f"drafts    {totals.num_accepted} of {totals.num_drafts} accepted")
    return "\n".join(lines)


def _answer(llm: LLM, prompts: list[str], params: SamplingParams) -> int:
    if len(prompts) == 1 and params.n == 1:
        try:
            _show(llm, prompts[0], params)
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            return REFUSED
        return 0
    status = 0
    for output in llm.generate(prompts, params, progress=sys.stderr.isatty()):
        print(output.text, flush=True)
        if output.error is not None:
            print(f"error: {output.error}", file=sys.stderr)
            status = REFUSED
    return status


def _show(llm: LLM, prompt: str | list[int], params: SamplingParams) -> str:
    """Print an answer as it comes; return it."""
    text, deltas = "", llm.stream(prompt, params)
    try:
        for delta in deltas:
            text += delta.text
            print(delta.text, end="", flush=True)
            if delta.error is not None:
                raise delta.error
    finally:
        print(flush=True)
    return text


def _chat(llm: LLM, params: SamplingParams, system: str | None, name: str) -> int:
    messages = [{"role": "system", "content": system}] if system else []
    # Refuses a missing template, or a system message, before the first line is typed.
    llm.encode_chat([*messages, {"role": "user", "content": "?"}])
    status, at_terminal = 0, sys.stdin.isatty()
    if at_terminal:
        print(f"{name}: Ctrl-C ends an answer, Ctrl-D the chat", file=sys.stderr)
    while line := _line():
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        num_before, start = llm.engine.totals.num_generated_tokens, perf_counter()
        try:
            answer = _show(llm, llm.encode_chat(messages), params)
        except (KeyboardInterrupt, ValueError, RequestError) as error:
            messages.pop()  # as if it had not been asked
            if not isinstance(error, KeyboardInterrupt):  # such as a chat that became too long
                print(f"error: {error}", file=sys.stderr)
                status = REFUSED
            continue
        messages.append({"role": "assistant", "content": answer})
        if at_terminal:
            count = llm.engine.totals.num_generated_tokens - num_before
            speed = count / (perf_counter() - start)
            print(f"[{count} tokens, {speed:.3g} tokens/s]", file=sys.stderr)
    return status


def _line() -> str:
    """The next line of stdin; "" at the end, or for Ctrl-C."""
    at_terminal, line = sys.stdin.isatty(), ""
    with suppress(EOFError, KeyboardInterrupt):
        if at_terminal and sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 (gives input() arrows and a history)
            return _utf8("stdin", lambda: input("> ") + "\n")
        print("> " if at_terminal else "", end="", file=sys.stderr, flush=True)
        line = _utf8("stdin", sys.stdin.readline)
    if at_terminal and not line:
        print(file=sys.stderr)
    return line


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        name, prompts = "prompt", [_utf8("prompt", prompt.__str__) for prompt in args.prompt]
    elif args.file:
        name = "file"
        try:
            prompts = [_utf8("file", lambda: Path(args.file).read_text(encoding="utf-8"))]
        except OSError as error:
            raise ValueError(f"file: cannot read {args.file!r}: {error.strerror}") from error
    else:
        name, prompts = "stdin", [_utf8("stdin", sys.stdin.read)]
    prompts = [prompt.removesuffix("\n") for prompt in prompts]
    if not all(prompts):
        raise ValueError(f"{name}: expected a prompt, got an empty text")
    return prompts


def _utf8(name: str, read: Callable[[], str]) -> str:
    """The text that ``read`` returns; a ValueError names the argument if it is no UTF-8."""
    try:
        text = read()
        text.encode()  # a terminal or the command line may give surrogates
    except UnicodeError as error:
        raise ValueError(f"{name}: expected UTF-8 text, got {error}") from error
    return text


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that would change nothing."""
    if args.drafter is not None and not args.speculate:
        raise ValueError("drafter: expected --speculate K with it, got none")
    if args.system is not None and not args.chat:
        raise ValueError("system: expected --chat with it, got none")
    if args.chat and args.n != 1:
        raise ValueError(f"n: expected 1 in a chat, got {args.n}")
    if not (sys.stdin or args.prompt or args.file):
        raise ValueError("stdin: expected a prompt, got a closed stream")


def _params(args: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    names = (
        "max_tokens", "ignore_eos", "stop", "n",
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed",
    )  # fmt: skip
    return replace(default, **{k: v for k in names if (v := getattr(args, k)) is not None})


def _parser() -> Parser:
    parser = Parser("quire.models.generate", __doc__)
    add = parser.add_argument
    own = "default: of the model's generation_config.json, else"
    fp8 = "fp8 = e4m3 with a scale a row; fp8_per_tensor = with two scales a layer"
    names = "directory, .gguf file, name on the Hub, or built-in name (random weights)"
    threads_default = torch.get_num_threads()
    # fmt: off
    add("--model", required=True, metavar="MODEL", help=names)
    if parser.prog == "quire chat":
        parser.description = CHAT
        parser.set_defaults(chat=True, prompt=None, file=None, n=1, max_num_seqs=16)
    else:
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--prompt", action="append", metavar="TEXT",
            help="may be repeated; default: stdin")
        what.add_argument("--file", metavar="FILE", help="a prompt from a file")
        what.add_argument("--chat", action="store_true", help="a conversation, one line a message")
        add("--n", type=integer(most=MAX_SAMPLES), default=1, metavar="N",
            help="samples of each prompt; default: 1")
        add("--max-num-seqs", type=integer(), default=16, metavar="N",
            help="requests at once; default: 16")
    add("--system", metavar="TEXT", help="of a chat: its system message")
    add("--max-tokens", type=integer(), default=256, metavar="N",
        help="most tokens to generate; default: 256")
    add("--temperature", type=number(), metavar="T", help=f"{own} 0, greedy")
    add("--top-k", type=integer(0), metavar="K", help=f"only the K likeliest tokens; {own} 0, all")
    add("--top-p", type=number(above=True), metavar="P",
        help=f"only the likeliest tokens of this mass; {own} 1")
    add("--min-p", type=number(), metavar="P",
        help=f"only tokens with this share of the likeliest one's; {own} 0")
    add("--repetition-penalty", type=number(above=True), metavar="F", help=f"{own} 1, none")
    add("--seed", type=integer(-(2**63), 2**63 - 1), metavar="N",
        help="of the draws; default: the same every time")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="ends the answer; may be repeated")
    add("--ignore-eos", action="store_true", help="the model's own stop ids do not end the answer")
    add("--speculate", type=integer(0, MAX_DRAFTS), default=0, metavar="K",
        help="K draft tokens a step; default: 0, none")
    add("--drafter", metavar="NAME",
        help="ngram (default) = earlier text, mtp, dspark = the model's own drafter, or the "
        "directory of a Gemma-4 assistant")
    add("--stats", action="store_true", help="memory plan, speed and times, on stderr")
    add("--memory-fraction", type=number(above=True), metavar="F",
        help="of the free memory for pages; default: 0.9 on a GPU, 256 MiB on a CPU")
    add("--num-pages", type=integer(most=MAX_PAGES), metavar="N", help="pages of the pool, instead")
    add("--max-model-len", type=integer(), metavar="N",
        help="longest sequence; default: that of model and pool")
    add("--tensor-parallel-size", type=integer(most=MAX_RANKS), metavar="N",
        help="ranks with a part of the model each; default: those of torchrun, else 1")
    add("--device", help="torch device; default: cuda where there is one, else cpu")
    add("--dtype", choices=tuple(DTYPES),
        help="default: the checkpoint's; random: bfloat16 on a GPU, float32 on a CPU")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto",
        help=f"of pages: auto (default) = the model's; {fp8}")
    add("--impl", choices=IMPLS, help="kernels; default: triton on a GPU, else torch")
    add("--no-graphs", action="store_true",
        help="launch each kernel of a decode step instead of a CUDA graph")
    add("--model-seed", type=integer(0, 2**63 - 1), default=0, metavar="N",
        help="of random weights")
    add("--threads", type=threads, default=threads_default, metavar="N",
        help="CPU threads of torch; default: torch's own")
    # fmt: on
    return parser
