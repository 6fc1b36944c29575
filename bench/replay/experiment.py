"""Retention x eviction x pool and host size on one workload: rows of the table and of `--json`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.kvcore import LRU, Adaptive, EvictionPolicy, GroupSpec, KVCache
from quire.kvcore.policies.retention import parse_retention
from quire.models.progress import tqdm

from .bounds import clairvoyant_hits, dense_working_set, segment_uses
from .host import HostMemory
from .presets import PRESETS
from .simulate import Replay, SimulatedTiming, TraceWorkload, replay

EVICTIONS: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "adaptive": Adaptive}
Row = dict[str, Any]


def empty_cache(groups: Sequence[GroupSpec], workload: TraceWorkload) -> KVCache:
    """A cache for layout and keys alone."""
    return KVCache(groups, num_pages=2, max_requests=1, max_model_len=workload.longest)


def pool_pages(
    text: str, groups: Sequence[GroupSpec], workload: TraceWorkload, name: str = "pool"
) -> int:
    """Pages of a size: ``"64GiB"``, ``"10%"`` (of the dense working set) or ``"5000pages"``.

    Raises:
        ValueError: another form; the message begins with `name`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|%|pages)", text)
    if found is None or not 0 < float(found[1]) < 2**31:
        raise ValueError(f"{name}: expected e.g. 64GiB, 10% or 5000pages, got {text!r}")
    amount, cache = float(found[1]), empty_cache(groups, workload)
    if found[2] == "GiB":
        amount = amount * 2**30 / cache.layout.page_bytes
    elif found[2] == "%":
        amount = dense_working_set(workload, cache) * amount / 100
    return max(1, int(amount))


def run_grid(
    workload: TraceWorkload, preset: str, pools: Sequence[str], retentions: Sequence[str | int],
    evictions: Sequence[str], timing: SimulatedTiming, *, hosts: Sequence[str] = (),
    link: float = 50e9, progress: bool = True, vllm: Sequence[int | None] = (),
    replay_tokens: int | None = None,
) -> list[Row]:  # fmt: skip
    """Replay each retention, eviction and pool, alone and over each host; add the bounds.

    Args:
        preset: key of `PRESETS`.
        pools, hosts: sizes, see `pool_pages`.
        retentions: as `KVCache` takes them.
        evictions: keys of `EVICTIONS`. The host has the same policy; with "adaptive" its own
            default, which learns with the pool's.
        link: bytes a second of each direction between device and host.
        vllm: retention intervals of vLLM's manager, which serves each pool beside.
        replay_tokens: as `KVCache` takes it, for all but vLLM.

    Raises:
        ValueError: a bad size, or a pool that is too small for one request.
    """
    groups, requests = PRESETS[preset], workload.requests
    empty = empty_cache(groups, workload)
    page_bytes = empty.layout.page_bytes
    sizes = {pool: pool_pages(pool, groups, workload) for pool in pools}
    host_sizes = {host: pool_pages(host, groups, workload, "host") for host in hosts}
    lookups = [i for i, r in enumerate(requests) if r.output == 0]
    counted = lookups or list(range(len(requests)))  # requests with hits that count
    num_replays = len(retentions) * (len(evictions) * len(pools) * (1 + len(hosts)) + 1)
    total = (num_replays + len(vllm) * len(pools)) * len(requests)
    bar = tqdm(total=total, unit="request", disable=None if progress else True, leave=False)

    def row_of(retention: str | int, eviction: str, pool: str | None) -> Row:
        row: Row = {"workload": workload.name, "preset": preset, "retention": retention}
        row |= {"eviction": eviction, "pool": pool}
        return row | {"pool_bytes": sizes[pool] * page_bytes if pool else None}

    def one(retention: str | int, eviction: str, pool: str | None, host: str | None = None) -> Row:
        """A replay; pool None: one that is never full."""
        policy = EVICTIONS[eviction] if pool else LRU
        pages = sizes[pool] if pool else enough_pages(empty, workload, retention)
        bar.set_description(f"{preset} {retention} {eviction} {pool or ''} {host or ''}")

        def behind(cache: KVCache) -> HostMemory:
            return HostMemory(
                cache, num_pages=host_sizes[host], link=link, prefill_rate=timing.prefill_rate,
                chunk=timing.chunk, policy=None if eviction == "adaptive" else policy(),
            )  # fmt: skip

        run = replay(
            workload, groups, num_pages=pages + 1, timing=timing, retention=retention,
            policy=policy(), behind=behind if host else None, progress=bar.update,
            replay_tokens=replay_tokens,
        )  # fmt: skip
        row, stats = row_of(retention, eviction, pool), run.cache.stats()
        if replay_tokens is not None:
            row["replay_tokens"] = replay_tokens
        row |= measured(run, counted)
        row |= {name: stats[name] for name in ("evicted_resume_points", "evicted_segments")}
        if run.host is not None:
            row |= {"host": host, "host_bytes": host_sizes[host] * page_bytes, "link": link}
            row |= {"bytes device>host": run.host.stored, "bytes host>device": run.host.loaded}
            row |= run.host.tiers.stats() | {"stalled_s": run.loading}
            row["device_tokens"] = int(np.minimum(run.from_device, run.hits)[counted].sum())
        return row

    rows: list[Row] = []
    with bar:
        for retention in retentions:
            best = one(retention, "infinite", None)
            rows.append(best | {"recomputed_tokens": 0})
            for pool, host, eviction in itertools.product(sizes, (None, *hosts), evictions):
                row = one(retention, eviction, pool, host)
                rows.append(row | {"recomputed_tokens": best["hit_tokens"] - row["hit_tokens"]})
        for pool, interval in itertools.product(sizes, vllm):
            from .vllm import VLLMReplay  # needs vLLM

            bar.set_description(f"{preset} vllm {interval} {pool}")
            run = VLLMReplay(workload, empty, preset, timing, sizes[pool] + 1, interval)
            run.run(bar.update)
            row = row_of("dense" if interval is None else interval, "vllm", pool)
            rows.append(row | measured(run, counted))
    if lookups:
        return rows  # the bounds count all requests, not look-ups alone
    uses, prompt_tokens = segment_uses(workload, empty), sum(r.input for r in requests)
    for pool in (*sizes, None):
        hits = clairvoyant_hits(uses, empty, sizes[pool] if pool else None) * empty.alignment
        row = row_of("any", "clairvoyant" if pool else "infinite", pool)
        rows.append(row | {"hit_rate": hits / prompt_tokens, "hit_tokens": hits})
    return rows


def enough_pages(cache: KVCache, workload: TraceWorkload, retention: str | int) -> int:
    """Pages that a replay of `workload` can never exhaust."""
    layout = cache.layout
    every = parse_retention(retention, layout)
    pages = 64 * (layout.num_columns + layout.pages_per_point)
    for r in workload.requests:
        length = r.input + r.output
        points = 6 + (length // every if every else 0)
        pages += (length // cache.alignment + 2) * layout.pages_per_segment
        pages += points * layout.pages_per_point
    return pages


def measured(run: Replay, counted: list[int]) -> Row:
    requests = run.requests
    lengths, hits = np.array([requests[i].input for i in counted]), run.hits[counted]
    ran = [i for i, r in enumerate(requests) if r.output]
    tokens = sum(requests[i].input + requests[i].output for i in ran)
    return {
        "hit_rate": float(hits.sum() / lengths.sum()),
        "mean_hit": float((hits / lengths).mean()),
        "hit_tokens": int(hits.sum()),
        "ttft_p50": float(np.percentile(run.ttft[ran], 50)),
        "ttft_p99": float(np.percentile(run.ttft[ran], 99)),
        "tokens_per_s": float(tokens / max(run.makespan, 1e-9)),
    }
