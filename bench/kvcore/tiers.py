"""Cost of the host tier: seconds an entry to match, load and store it, and to end a job."""

from __future__ import annotations

from statistics import median

import numpy as np

from quire.kvcore import LRU, KVCache
from quire.kvcore.tier import Job, Tiers

from .measure import CHUNK, SPECS, Row, Times, pool_for, prefill, row

LONG = 16 * CHUNK
TOGETHER = 8  # prompts of a batch
EVERYTHING = 1 << 62  # bytes
CALLS = ("store", "store_done", "match", "load", "load_done")


def entry_times(spec: str, prompts: int) -> list[Row]:
    """Seconds of each call of `quire.kvcore.tier.Tiers`, by the entries of a prompt.

    Entries are segments and resume points. Prompts share nothing; each leaves the device for the
    host and comes back. Those of 8,192 tokens have one resume point, those of 131,072 (``chain``)
    one every 8,192. Each prompt has calls of its own; in ``batch`` one store makes the jobs of
    eight prompts, and other calls follow each other without a break.
    """
    return [
        *_entry_times(spec, prompts, CHUNK, "tier", 1),
        *_entry_times(spec, prompts, CHUNK, "tier_batch", TOGETHER),
        *_entry_times(spec, max(1, prompts // 4), LONG, "tier_chain", 1),
    ]


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
    seconds: dict[str, list[float]] = {call: [] for call in CALLS}  # of a prompt

    for batch in batches:
        for text in batch:
            prefill(cache, cache.admit("a", cache.match(text)), text)
            cache.release("a")
        times = Times()
        jobs = times.run("store", lambda: tiers.stores(EVERYTHING))
        assert len(jobs) == len(batch)
        while jobs:  # first all segments and one resume point, then the others
            times.run("store_done", lambda jobs=jobs: [tiers.done(job) for job in jobs])
            jobs = times.run("store", lambda: tiers.stores(EVERYTHING))
        cache.evict(size)
        for call, each in times.seconds.items():
            seconds[call].append(sum(each) / len(batch))
    stored = _count(tiers, "stored")
    for batch in batches:
        times, chains = Times(), [cache.match(text).prompt for text in batch]
        matches = times.run("match", lambda c=chains: [tiers.match(prompt) for prompt in c])
        assert all(m.num_saved_tokens == tokens for m in matches), matches[0].explain()
        jobs = times.run("load", lambda m=matches: [tiers.load(match) for match in m])
        assert all(isinstance(job, Job) for job in jobs)
        times.run("load_done", lambda jobs=jobs: [tiers.done(job) for job in jobs])
        for call, each in times.seconds.items():
            seconds[call].append(sum(each) / len(batch))
    loaded = _count(tiers, "loaded")  # of the resume points only the last one
    entries = {call: stored if call.startswith("store") else loaded for call in CALLS}
    return [
        row(f"{name}_{call}", spec, median(seconds[call]) * prompts / entries[call], "s")
        for call in CALLS
    ]


def _count(tiers: Tiers, done: str) -> int:
    stats = tiers.stats()
    return stats[f"tier_{done}_segments/host"] + stats[f"tier_{done}_points/host"]
