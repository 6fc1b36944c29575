"""What tiers cost the host: microseconds an entry to match, load and store it, and to end a job."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.kvcore import LRU, KVCache
from quire.kvcore.tier import Job, Tiers, TierSpec

from .measure import SPECS, Row, pool_for, prefill, row, seconds

TOKENS = 8192  # of a prompt
CALLS = ("store", "store_done", "match", "load", "load_done")


def entry_times(spec: str, prompts: int) -> list[Row]:
    """Seconds of each call of `quire.kvcore.tier.Tiers` by the entries of a prompt: its segments,
    and the resume point at its end. Medians over prompts of 8,192 tokens that share nothing; all
    of them leave the device for the host, and come back.
    """
    size = pool_for(spec, prompts)
    cache = KVCache(
        SPECS[spec], num_pages=size, max_requests=1, max_model_len=2 * TOKENS, policy=LRU()
    )
    tiers = Tiers(
        cache, host=TierSpec(size, 1e12, LRU()), prefill_tokens_per_second=1.0, watermark=size
    )
    texts = [np.arange(TOKENS + 1, dtype=np.int32) + i * TOKENS for i in range(prompts)]
    times: dict[str, list[float]] = {name: [] for name in CALLS}
    found: list[Any] = []

    def timed(name: str, call: Callable[..., object], *args: object) -> None:
        times[name].append(seconds(lambda: found.append(call(*args))))

    for text in texts:
        prefill(cache, cache.admit("a", cache.match(text)), text)
        cache.release("a")
        timed("store", tiers.stores, 1 << 62)
        for job in found.pop():
            timed("store_done", tiers.done, job)
    cache.evict(size)
    for text in texts:
        prompt = cache.match(text).prompt
        timed("match", tiers.match, prompt)
        match = found.pop()
        assert match.num_tokens == TOKENS, match.explain()
        timed("load", tiers.load, match)
        job = found.pop()
        assert isinstance(job, Job)
        timed("load_done", tiers.done, job)
    stats = tiers.stats()
    entries = stats["tier_stored_segments/host"] + stats["tier_stored_points/host"]
    assert entries == stats["tier_loaded_segments/host"] + stats["tier_loaded_points/host"]
    each = entries / prompts
    return [row(f"tier_{name}", spec, statistics.median(times[name]) / each, "s") for name in CALLS]
