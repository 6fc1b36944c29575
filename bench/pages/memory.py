"""Bytes of DeepSeek-V4's caches by arithmetic, ours and those of vLLM 0.33's published layout."""

from __future__ import annotations

import torch

from quire.models.deepseek_v4.cache_plan import CacheFormat, plan_cache
from quire.models.deepseek_v4.config import CONFIGS
from quire.models.deepseek_v4.memory import CHUNK, CacheCost, cost, vllm_cost

from . import data

MODELS = ("deepseek-v4-flash", "deepseek-v4-pro")


def costs(model: str) -> tuple[CacheCost, CacheCost]:
    """Bytes of a model's cache with quantised rows: ours, vLLM's."""
    config = CONFIGS[model]
    plan = plan_cache(config, CacheFormat(torch.bfloat16, fp8=True))
    return cost(config, plan), vllm_cost(config)


def table() -> str:
    """Flash and Pro: a token of context, a resume point, a chunk, a request."""
    found = [c for model in MODELS for c in costs(model)]
    return data.table(
        ["", "Flash, ours", "Flash, vLLM", "Pro, ours", "Pro, vLLM"],
        [
            ["a token of context", *(f"{c.token:.0f} B" for c in found)],
            [
                "a resume point",
                *(f"{data.mebibytes(c.resume_point)} ({c.resume_pages} pages)" for c in found),
            ],
            [
                f"a chunk of {CHUNK:,} tokens in flight",
                *(data.mebibytes(c.prefill) for c in found),
            ],
            [
                "a request besides its context, with drafts",
                *(data.mebibytes(c.request) for c in found),
            ],
        ],
    )
