"""What the host tier costs: microseconds an entry to match, load and store it, and to end a job."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.kvcore import LRU, KVCache
from quire.kvcore.tier import Job, Tiers

from .measure import CHUNK, SPECS, Row, pool_for, prefill, row, seconds

TOKENS = CHUNK  # of a prompt
LONG = 16 * CHUNK
TOGETHER = 8  # prompts
CALLS = ("store", "store_done", "match", "load", "load_done")


def entry_times(spec: str, prompts: int) -> list[Row]:
    """Seconds of each call of `quire.kvcore.tier.Tiers` by the entries of a prompt: its segments,
    and its resume points. Medians over prompts that share nothing; each leaves the device for the
    host alone, and comes back: those of 8,192 tokens have one resume point, those of 131,072
    (``chain``) one every 8,192. Each prompt is stored, loaded and ended by calls of its own, which
    other work comes between; of eight of 8,192 tokens together (``batch``) one call makes the jobs
    of all, and nothing comes between the others.
    """
    rows = _entry_times(spec, prompts, TOKENS, "tier", 1)
    rows += _entry_times(spec, prompts, TOKENS, "tier_batch", TOGETHER)
    return rows + _entry_times(spec, max(1, prompts // 4), LONG, "tier_chain", 1)


def _entry_times(spec: str, prompts: int, tokens: int, name: str, together: int) -> list[Row]:
    size = pool_for(spec, prompts * tokens // CHUNK)
    cache = KVCache(
        SPECS[spec], num_pages=size, max_requests=1, max_model_len=tokens + CHUNK, policy=LRU(),
        retention=CHUNK,
    )  # fmt: skip
    tiers = Tiers(
        cache, num_pages=size, bytes_per_second=1e12, prefill_tokens_per_second=1.0, policy=LRU(),
        watermark=size,
    )  # fmt: skip
    texts = [np.arange(tokens + 1, dtype=np.int32) + i * tokens for i in range(prompts)]
    batches = [texts[i : i + together] for i in range(0, prompts, together)]
    times: dict[str, list[float]] = {call: [] for call in CALLS}

    def begin_batch(*calls: str) -> None:
        for call in calls:
            times[call].append(0.0)

    def timed(call: str, run: Callable[[Any], object], *arguments: Any) -> list[Any]:
        """What `run` returns of each of `arguments`; adds the seconds of a prompt."""
        found: list[Any] = []
        times[call][-1] += seconds(lambda: found.extend(map(run, arguments))) / len(batch)
        return found

    for batch in batches:
        for text in batch:
            prefill(cache, cache.admit("a", cache.match(text)), text)
            cache.release("a")
        begin_batch("store", "store_done")
        (jobs,) = timed("store", tiers.stores, 1 << 62)
        assert len(jobs) == len(batch)
        while jobs:  # first all segments and one resume point, then the others
            timed("store_done", tiers.done, *jobs)
            (jobs,) = timed("store", tiers.stores, 1 << 62)
        cache.evict(size)
    stored = _counts(tiers, "stored")
    for batch in batches:
        begin_batch("match", "load", "load_done")
        matches = timed("match", tiers.match, *(cache.match(text).prompt for text in batch))
        assert all(m.num_saved_tokens == tokens for m in matches), matches[0].explain()
        jobs = timed("load", tiers.load, *matches)
        assert all(isinstance(job, Job) for job in jobs)
        timed("load_done", tiers.done, *jobs)
    loaded = _counts(tiers, "loaded")  # of the resume points the last one alone
    each = {call: stored if call.startswith("store") else loaded for call in CALLS}
    return [
        row(f"{name}_{call}", spec, statistics.median(times[call]) * prompts / each[call], "s")
        for call in CALLS
    ]


def _counts(tiers: Tiers, what: str) -> int:
    stats = tiers.stats()
    return stats[f"tier_{what}_segments/host"] + stats[f"tier_{what}_points/host"]
