"""Bytes of DeepSeek-V4's caches: a token, a request and a resume point, beside vLLM 0.33's groups.

Computed, not measured: from the page layout that the engine allocates, and from vLLM's published
groups and block sizes.

    python -m bench.deepseek_v4_memory

Source: `quire.models.deepseek_v4.cache`; vLLM 0.33 ``models/deepseek_v4`` and ``v1/core``.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.deepseek_v4_memory")

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.models.command import Parser, program
from quire.models.deepseek_v4.cache import (
    COMPRESSED,
    CacheFormat,
    CachePlan,
    plan_cache,
    ring_bytes,
)
from quire.models.deepseek_v4.config import CONFIGS, DeepseekV4Config

CHUNK = 8192  # tokens of a prefill chunk in the table
FP8, BF16 = CacheFormat(torch.bfloat16, fp8=True), CacheFormat(torch.bfloat16)


class CacheCost(NamedTuple):
    """Bytes of one model's cache.

    Attributes:
        token: bytes of a token of context: pages of entries and index keys.
        request: further bytes of a request that decodes: windows, rings, the last resume point.
        prefill: the same while it computes a chunk of `CHUNK` tokens.
        resume_pages, resume_point: pages and bytes that a prefix needs to be resumed, besides its
            entries.
    """

    token: float
    request: int
    prefill: int
    resume_point: int
    resume_pages: int


def cost(config: DeepseekV4Config, plan: CachePlan, max_draft_tokens: int = 1) -> CacheCost:
    """Bytes of our cache, padding included, at the worst position in a block."""
    page = plan.groups[0].page_bytes
    windows = [group for group in plan.groups if group.kind == "window"]
    tail = sum(group.tail_blocks for group in windows)
    # Blocks of the last rows and the open block; one more while looked-ahead tokens are unknown.
    live = sum(-(-(g.sliding_window - 1 + max_draft_tokens) // g.block_size) + 1 for g in windows)
    held = live + tail + sum(-(-max(g.lookahead for g in windows) // g.block_size) for g in windows)
    # A step with drafts may take a new block of each group before the oldest ones go.
    starting = len(windows) if max_draft_tokens else 0
    rings = ring_bytes(config, max_draft_tokens)
    token = page / plan.groups[plan.index(COMPRESSED)].block_size
    # A chunk writes only rows that outlive it: new live blocks, and tails of two boundaries.
    prefill = (held + live + 2 * tail) * page + rings
    return CacheCost(token, (held + starting) * page + rings, prefill, tail * page, tail)


def vllm_cost(config: DeepseekV4Config) -> CacheCost:
    """Bytes of vLLM 0.33's fp8 groups, for the released ratios (4 and 128).

    Every block has the bytes of the largest. Windows are two groups; compressor state is in pages
    of 4 and 8 tokens.
    """
    page = plan_cache(config, FP8).groups[0].page_bytes
    window, csa, hca = config.sliding_window, 2 * config.csa_ratio, config.hca_ratio
    groups = [(window, 64), (window, 64), (csa, 4), (hca, 8)]  # (rows seen, tokens of a block)

    def blocks(tokens: int) -> int:
        return sum(-(-(seen - 1 + tokens) // block) + 1 for seen, block in groups)

    resume = blocks(0) - len(groups)
    return CacheCost(page / 256, blocks(0) * page, blocks(CHUNK) * page, resume * page, resume)


def table() -> str:
    """Costs of Flash and Pro: ours in two formats, and vLLM's."""
    lines = [
        f"{'model':17} {'cache':10} {'B / token':>9} {'GiB / 1M':>8} {'MiB / request':>13} "
        f"{'MiB, 8k chunk':>13} {'MiB / resume':>12} {'pages':>5}"
    ]
    for name in ("deepseek-v4-flash", "deepseek-v4-pro"):
        config = CONFIGS[name]
        rows = {
            "ours, fp8": cost(config, plan_cache(config, FP8)),
            "ours, bf16": cost(config, plan_cache(config, BF16)),
            "vLLM, fp8": vllm_cost(config),
        }
        for label, c in rows.items():
            mib = [size / 2**20 for size in (c.request, c.prefill, c.resume_point)]
            lines.append(
                f"{name:17} {label:10} {c.token:9.0f} {c.token * 2**20 / 2**30:8.2f} "
                f"{mib[0]:13.1f} {mib[1]:13.1f} {mib[2]:12.1f} {c.resume_pages:5}"
            )
    return "\n".join(lines)


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    _parser().parse_args(argv)
    print(table())
    return 0


def _parser() -> Parser:
    return Parser("bench.deepseek_v4_memory", __doc__)
