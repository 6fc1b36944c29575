"""What DeepSeek-V4's caches cost.

Bytes of a token, of a request and of a resume point, beside those of vLLM 0.33's groups.

    python -m models.deepseek_v4.memory

Source: `models.deepseek_v4.cache_plan` for ours; vLLM 0.33 ``models/deepseek_v4`` and ``v1/core``
    for its groups and block sizes.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..command import run

    run("quire.models.deepseek_v4.memory")

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..command import Parser, program
from .cache_plan import COMPRESSED, CacheFormat, CachePlan, plan_cache, ring_bytes
from .config import CONFIGS, DeepseekV4Config

CHUNK = 8192  # tokens of a prefill chunk in the tables


@dataclass(frozen=True)
class CacheCost:
    """Bytes of one model's cache.

    Attributes:
        token: of context, for ever: pages of entries and index keys.
        request: besides, while one decodes: windows, compressor rows, and the resume point of the
            last boundary.
        prefill: the same while one computes a chunk of `CHUNK` tokens.
        resume_point: what stays for a prefix to be resumed at, besides its entries.
        resume_pages: in pages.
    """

    token: float
    request: int
    prefill: int
    resume_point: int
    resume_pages: int


def cost(config: DeepseekV4Config, plan: CachePlan, max_draft_tokens: int = 1) -> CacheCost:
    """Bytes of our caches, padding included; the worst case of every block boundary."""
    page = plan.groups[0].page_bytes
    dense = plan.group_index(COMPRESSED)
    windows = [group for group in plan.groups if group.kind == "window"]
    tail = sum(group.tail_blocks for group in windows)
    lookahead = max(group.lookahead for group in windows)
    # Blocks of the last rows, wherever the first of them lies in its block, and the block that is
    # open; while the tokens that a drafter's rows look ahead to are not known, one block more.
    live = sum(-(-(g.sliding_window - 1 + max_draft_tokens) // g.block_size) + 1 for g in windows)
    waiting = sum(-(-lookahead // g.block_size) for g in windows)
    held = live + tail + waiting
    # A step with drafts may take the page of a new block of each group before the oldest ones go.
    starting = len(windows) if max_draft_tokens else 0
    rings = ring_bytes(config, max_draft_tokens)
    return CacheCost(
        token=page / plan.groups[dense].block_size if dense is not None else 0.0,
        request=(held + starting) * page + rings,
        # A chunk writes only the rows that outlive it: new live blocks, and the tails of the two
        # boundaries that a prompt keeps.
        prefill=(held + live + 2 * tail) * page + rings,
        resume_point=tail * page,
        resume_pages=tail,
    )


def vllm_cost(config: DeepseekV4Config) -> CacheCost:
    """Bytes of vLLM 0.33's groups in the fp8 layout.

    Compressor state in pages of 4 and 8 tokens, each a whole block.

    Released ratios only (4 and 128). A block is as large as the largest group's, windows are two
    groups.
    """
    page = plan_cache(config, CacheFormat(torch.bfloat16, fp8=True)).groups[0].page_bytes
    window, csa, hca = config.sliding_window, 2 * config.csa_ratio, config.hca_ratio
    groups = [(window, 64), (window, 64), (csa, 4), (hca, 8)]  # (rows seen, tokens of a block)

    def blocks(tokens: int) -> int:
        return sum(math.ceil((seen - 1 + tokens) / block) + 1 for seen, block in groups)

    resume = sum(math.ceil((seen - 1) / block) for seen, block in groups)
    return CacheCost(
        token=page / 256,
        request=blocks(0) * page,
        prefill=blocks(CHUNK) * page,
        resume_point=resume * page,
        resume_pages=resume,
    )


def table() -> str:
    """The costs of Flash and Pro, ours in three formats and vLLM's, as a table."""
    formats = {
        "fp8": CacheFormat(torch.bfloat16, fp8=True),
        "bf16": CacheFormat(torch.bfloat16),
    }
    lines = [
        f"{'model':18} {'cache':12} {'B / token':>10} {'GiB / 1M':>9} {'MiB / request':>14} "
        f"{'MiB, 8k chunk':>14} {'MiB / resume point':>19} {'pages':>6}"
    ]
    for name in ("deepseek-v4-flash", "deepseek-v4-pro"):
        config = CONFIGS[name]
        rows = {f"ours, {kind}": cost(config, plan_cache(config, f)) for kind, f in formats.items()}
        rows["vLLM, fp8"] = vllm_cost(config)
        for label, c in rows.items():
            lines.append(
                f"{name:18} {label:12} {c.token:10.0f} {c.token * 2**20 / 2**30:9.2f} "
                f"{c.request / 2**20:14.1f} "
                f"{c.prefill / 2**20:14.1f} {c.resume_point / 2**20:19.1f} {c.resume_pages:6}"
            )
    return "\n".join(lines)


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    _parser().parse_args(argv)
    print(table())
    return 0


def _parser() -> Parser:
    return Parser("models.deepseek_v4.memory", __doc__)
