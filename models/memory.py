"""Print the pages and bytes that a model's KV cache takes, computed from its configuration.

    quire memory --model gemma-4-31b
    quire memory --model deepseek-v4-flash --kv-cache-dtype fp8 --context 131072 1048576
    quire memory --model DIR --gib 24

No weight is read. A row of the table is one request that decodes at that context. Requests that
share a prefix share its pages. "other" is memory of all requests that is not in pages.
"""

from __future__ import annotations

if __name__ == "__main__":
    from .command import run

    run("quire.models.memory")

from collections.abc import Sequence

from quire.kvcore.spec import Layout

from .command import MAX_TOKENS, Parser, integer, number, program
from .config.hf import load_config
from .config.named import named_configs
from .engine.config import KV_CACHE_DTYPES, EngineConfig
from .engine.memory import model_cache, pages_of_request, plan_memory, weight_bytes
from .loading.locate import locate_checkpoint
from .loading.weights import DTYPES, build_model

CONTEXTS = (1024, 8192, 32768, 131072, 1048576)
MIB, GIB = 2**20, 2**30


def describe(
    model: str, *, dtype: str = "bfloat16", kv_cache_dtype: str = "auto",
    contexts: Sequence[int] | None = None, gib: float | None = None,
) -> str:  # fmt: skip
    """Weights, pages, requests and, with ``gib`` of memory for pages, a pool of a model.

    Args:
        contexts: tokens of a request; default: powers of two up to the model's limit.

    Raises:
        ValueError: an unknown model, a context over its limit, or a pool that is too small.
        NotImplementedError: a kv_cache_dtype that the model has not.
    """
    config = named_configs().get(model) or load_config(locate_checkpoint(model))
    built = build_model(config, device="meta", dtype=DTYPES[dtype])
    cache = model_cache(built, kv_cache_dtype=kv_cache_dtype)
    longest = config.max_position_embeddings
    if contexts is None:
        contexts = [n for n in CONTEXTS if n < longest] + [longest]
    elif max(contexts) > longest:
        raise ValueError(f"context: expected at most {longest}, got {max(contexts)}")
    point = Layout(cache.groups, longest, 0).pages_per_point
    num_pages = 1 + pages_of_request(cache.groups, longest)
    token = plan_memory(built, cache, EngineConfig(num_pages=num_pages)).bytes_per_token
    lines = [
        f"model     {config.name}: {weight_bytes(built) / GIB:.4g} GiB of weights in {dtype}",
        f"token     {token:.0f} bytes a token of context",
        f"page      {cache.page_bytes / MIB:.4g} MiB, all layers of a page id",
    ]
    for group in cache.groups:
        window = f", window {group.sliding_window}" if group.sliding_window else ""
        lines.append(f"group     {group.name}: {group.kind}, {group.block_size} tokens{window}")
    lines += [
        f"resume    {point} pages, {point * cache.page_bytes / MIB:.4g} MiB a resume point",
        "",
        "context, tokens    pages  pages, MiB  other, MiB",
    ]
    for tokens in contexts:
        pages = pages_of_request(cache.groups, tokens)
        lines.append(
            f"{tokens:15}{pages:9}{pages * cache.page_bytes / MIB:12.1f}"
            f"{cache.fixed_bytes / MIB:12.1f}"
        )
    if gib is not None:
        pages = int(gib * GIB) // cache.page_bytes
        lines += ["", plan_memory(built, cache, EngineConfig(num_pages=pages)).describe()]
    return "\n".join(lines)


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = vars(_parser().parse_args(argv))
    print(describe(args.pop("model"), contexts=args.pop("context"), **args))
    return 0


def _parser() -> Parser:
    parser = Parser("quire.models.memory", __doc__)
    add = parser.add_argument
    names = "directory, .gguf file, name on the Hub, or a built-in name such as deepseek-v4-flash"
    add("--model", required=True, metavar="MODEL", help=names)
    add("--context", type=integer(2, MAX_TOKENS), nargs="+", metavar="N",
        help="tokens of a request; default: up to the model's limit")  # fmt: skip
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="default: bfloat16")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of pages; default: auto")
    add("--gib", type=number(above=True), metavar="F",
        help="memory for pages: print the pool that fits it")  # fmt: skip
    return parser
