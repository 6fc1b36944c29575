"""Retention x eviction x pool and host size on one workload: rows for the table, the plot and `--json`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.kvcore import LRU, Adaptive, EvictionPolicy, GroupSpec, KVCache
from quire.kvcore.policies.retention import parse_retention
from quire.models.progress import tqdm

from .bounds import clairvoyant_hits, dense_working_set, infinite_hits
from .presets import PRESETS
from .simulate import Outcome, Timing, Workload, replay
from .tiers import TierMemory

EVICTIONS: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "adaptive": Adaptive,
}
Row = dict[str, Any]


def empty_cache(groups: Sequence[GroupSpec], workload: Workload) -> KVCache:
    """A cache that serves nothing: for layout and keys."""
    return KVCache(groups, num_pages=2, max_requests=1, max_model_len=workload.longest)


def pool_pages(text: str, groups: Sequence[GroupSpec], workload: Workload) -> int:
    """Pages of a pool given as ``"64GiB"``, ``"10%"`` (of the dense working set), ``"20requests"`` (of mean length, each with a resume
    point), or ``"5000pages"``.

    Raises: ValueError naming the accepted forms.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|%|requests|pages)", text)
    if found is None or not 0 < float(found[1]) < 2**31:
        raise ValueError(f"pool: expected e.g. 64GiB, 10%, 20requests or 5000pages, got {text!r}")
    amount, unit = float(found[1]), found[2]
    cache = empty_cache(groups, workload)
    if unit == "pages":
        return max(1, int(amount))
    if unit == "GiB":
        return max(1, int(amount * 2**30) // cache.layout.page_bytes)
    if unit == "%":
        return max(1, int(dense_working_set(workload, cache) * amount / 100))
    return max(1, int(_request_pages(cache, workload) * amount))


def _request_pages(cache: KVCache, workload: Workload) -> int:
    mean = sum(r.input + r.output for r in workload.requests) / len(workload.requests)
    segments = math.ceil(mean / cache.alignment)
    return segments * cache.layout.pages_per_segment + cache.layout.pages_per_point


def run_grid(
    workload: Workload,
    preset: str,
    pools: Sequence[str],
    retentions: Sequence[str | int],
    evictions: Sequence[str],
    timing: Timing,
    *,
    hosts: Sequence[str] = (),
    link: float = 50e9,
    progress: bool = True,
) -> list[Row]:
    """One row for each retention, eviction and pool, alone and over each host, and for each bound.

    preset: of `PRESETS`. pools, hosts: see `pool_pages`. retentions: of `KVCache`. evictions: of `EVICTIONS`; the host has the
    same, and with `Adaptive` its own default, which learns with the pool's. link: bytes a second of each direction.

    Raises: ValueError for unknown names, or a pool that one request does not fit.
    """
    groups = PRESETS[preset]
    cache = empty_cache(groups, workload)
    judged = judged_requests(workload)
    prompt_tokens = sum(workload.requests[i].input for i in judged)
    sizes = {pool: pool_pages(pool, groups, workload) for pool in pools}
    host_sizes = {host: pool_pages(host, groups, workload) for host in hosts}
    page_bytes, per_segment = cache.layout.page_bytes, cache.layout.pages_per_segment
    common: Row = {"workload": workload.name, "preset": preset}
    rows: list[Row] = []
    unlimited = infinite_hits(workload, cache)
    all_tokens = sum(r.input for r in workload.requests)
    bar = tqdm(
        total=len(retentions) * (len(evictions) * len(pools) * (1 + len(hosts)) + 1) * len(workload.requests),
        unit="request", disable=not progress, leave=False,
    )  # fmt: skip

    def one(
        retention: str | int, eviction: str, pages: int, pool: str | None, host: str | None = None
    ) -> Row:
        policy = EVICTIONS[eviction]() if eviction in EVICTIONS else LRU()
        bar.set_description(f"{preset} {retention} {eviction} {pool or ''} {host or ''}")

        def behind(cache: KVCache) -> TierMemory:
            return TierMemory(
                cache, host=host_sizes[host], link=link, timing=timing,
                policy=None if eviction == "adaptive" else EVICTIONS[eviction],
            )  # fmt: skip

        outcome = replay(
            workload, groups, num_pages=pages + 1, timing=timing, retention=retention, policy=policy,
            behind=None if host is None else behind, progress=bar.update,
        )  # fmt: skip
        row = {**common, "retention": retention, "eviction": eviction, "pool": pool}
        row["pool_bytes"] = pages * page_bytes if pool else None
        row |= measured(outcome, workload, judged)
        if host is not None:
            row |= {"host": host, "host_bytes": host_sizes[host] * page_bytes, "link": link}
            row |= outcome.behind | {"stalled_s": outcome.stalled}
            row["device_tokens"] = int(np.minimum(outcome.from_device, outcome.hits)[judged].sum())
        return row

    with bar:
        for retention in retentions:
            everything = enough_pages(cache, workload, retention)
            best = one(retention, "infinite", everything, None)
            best["recomputed_tokens"] = 0
            rows.append(best)
            for pool, pages in sizes.items():
                for host, eviction in itertools.product((None, *hosts), evictions):
                    row = one(retention, eviction, pages, pool, host)
                    row["recomputed_tokens"] = best["hit_tokens"] - row["hit_tokens"]
                    rows.append(row)
    if len(judged) == len(
        workload.requests
    ):  # look-ups alone have no bound: what is served between them counts too
        for pool, pages in sizes.items():
            hits = clairvoyant_hits(workload, cache, pages // per_segment)
            rows.append(
                {**common, "retention": "any", "eviction": "clairvoyant", "pool": pool, "pool_bytes": pages * page_bytes,
                 "hit_rate": hits / prompt_tokens, "hit_tokens": hits}
            )  # fmt: skip
        rows.append(
            {**common, "retention": "any", "eviction": "infinite", "pool": None, "pool_bytes": None,
             "hit_rate": unlimited / all_tokens, "hit_tokens": unlimited}
        )  # fmt: skip
    return rows


def judged_requests(workload: Workload) -> list[int]:
    """Requests whose hits count: the look-ups where there are any, else all."""
    lookups = [i for i, r in enumerate(workload.requests) if r.output == 0]
    return lookups or list(range(len(workload.requests)))


def enough_pages(cache: KVCache, workload: Workload, retention: str | int) -> int:
    """Pages that a replay of `workload` can never exhaust."""
    layout, a = cache.layout, cache.alignment
    every = parse_retention(retention, layout)
    pages = 64 * (layout.num_columns + layout.pages_per_point)
    for r in workload.requests:
        length = r.input + r.output
        points = 6 + (length // every if every else 0)
        pages += (length // a + 2) * layout.pages_per_segment + points * layout.pages_per_point
    return pages


def measured(outcome: Outcome, workload: Workload, judged: list[int]) -> Row:
    """The figures of one replay."""
    lengths = np.array([workload.requests[i].input for i in judged])
    hits = outcome.hits[judged]
    ran = [i for i, r in enumerate(workload.requests) if r.output]
    ttft = outcome.ttft[ran]
    tokens = sum(workload.requests[i].input + workload.requests[i].output for i in ran)
    return {
        "hit_rate": float(hits.sum() / lengths.sum()),
        "mean_hit": float((hits / lengths).mean()),
        "hit_tokens": int(hits.sum()),
        "ttft_p50": float(np.percentile(ttft, 50)),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "tokens_per_s": float(tokens / max(outcome.makespan, 1e-9)),
        "evicted_resume_points": outcome.stats["evicted_resume_points"],
        "evicted_segments": outcome.stats["evicted_segments"],
    }
