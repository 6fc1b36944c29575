"""What the allocator costs, beside vLLM's: ``kvcore.json``."""

from __future__ import annotations

from . import memory
from .data import NONE, mebibytes, rows, seconds, table

# What a row of the table says, and the figures that it shows.
COSTS = {
    "segment keys of a prompt of 1,048,576 tokens": ["hash_1m"],
    "plan and commit of its 128 chunks, `retention=32768`": ["admit_1m_interval"],
    'the same, `retention="dense"`': ["admit_1m_dense"],
    "look it up, all cached": ["lookup_1m_hit"],
    "look it up, no resume point left": ["lookup_1m_tails_gone"],
    "release it": ["release_1m"],
    "one decode step of 256 requests at 8k tokens": ["decode_step_256"],
    "the same, each step with another batch": ["decode_step_256_churn"],
    "a pool of 1M pages": ["pool_1m_build", "pool_1m_bytes"],
}

# Calls of tiers, and the prompts that they are measured with.
CALLS = {
    "`stores`": "store", "`done` of a store": "store_done", "`match`": "match", "`load`": "load",
    "`done` of a load": "load_done",
}  # fmt: skip
PROMPTS = {
    "one of 8,192 tokens": "tier", "eight of them together": "tier_batch",
    "one of 131,072 tokens": "tier_chain",
}  # fmt: skip


def figures() -> dict[tuple[str, str], str]:
    """Figures of ``kvcore.json`` as text by (spec, name); vLLM's names start with ``vllm_``."""
    show = {"s": seconds, "B": mebibytes}
    return {(r["spec"], r["name"]): show[r["unit"]](r["value"]) for r in rows("kvcore.json")}


def costs() -> str:
    """Ours and vLLM's, of V4-like and Gemma-like cache groups."""
    found = figures()
    columns = [(spec, prefix) for spec in ("v4", "gemma4-31b") for prefix in ("", "vllm_")]
    return table(
        ["", "V4-like, ours", "vLLM", "Gemma-like, ours", "vLLM"],
        [
            [what, *(_cell(found, spec, [prefix + n for n in names]) for spec, prefix in columns)]
            for what, names in COSTS.items()
        ],
    )


def tier_costs() -> str:
    """Microseconds an entry of the calls of tiers."""
    value = {(r["spec"], r["name"]): r["value"] for r in rows("kvcore.json")}
    columns = [
        (spec, f"{name}, {prompt}", row)
        for spec, name in (("v4", "V4-like"), ("gemma4-31b", "Gemma-like"))
        for prompt, row in PROMPTS.items()
    ]
    return table(
        ["us an entry", *(title for _, title, _ in columns)],
        [
            [call, *(f"{value[spec, f'{row}_{name}'] * 1e6:.2f}" for spec, _, row in columns)]
            for call, name in CALLS.items()
        ],
    )


def first_figures() -> str:
    """Two costs of the allocator and two of DeepSeek-V4's caches."""
    found = figures()
    costs = {
        "allocator, one decode step of 256 requests, DeepSeek-V4's groups": "decode_step_256",
        "allocator, look-up of a cached prompt of 1,048,576 tokens": "lookup_1m_hit",
    }
    flash = memory.costs("deepseek-v4-flash")
    return table(
        ["measured or counted without a GPU", "quire", "vLLM 0.33.0"],
        [
            *([what, found["v4", n], found["v4", f"vllm_{n}"]] for what, n in costs.items()),
            [
                "cache of a prefill chunk of 8,192 tokens in flight, V4-Flash",
                *(mebibytes(c.prefill) for c in flash),
            ],
            [
                "cache that lets a prefix be resumed at one position, V4-Flash",
                *(mebibytes(c.resume_point) for c in flash),
            ],
        ],
    )


def _cell(found: dict[tuple[str, str], str], spec: str, names: list[str]) -> str:
    shown = [found[spec, name] for name in names if (spec, name) in found]
    return ", ".join(shown) or NONE
