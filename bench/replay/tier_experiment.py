"""Tiers behind a pool on one workload: rows for the table and `--json`.

Beside them, with the same bytes or more: the pool alone, one pool of the bytes of all, vLLM's host
tier, what a clairvoyant gets of these bytes, and a pool that never fills.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.kvcore import KVCache
from quire.models.progress import tqdm

from ..common.machine import commit
from .bounds import clairvoyant_hits, infinite_hits
from .engine import Behind, Timing
from .experiment import (
    EVICTIONS,
    Row,
    empty_cache,
    enough_pages,
    judged_requests,
    measured,
    pool_pages,
)
from .presets import PARTS, PRESETS
from .simulate import Outcome, Workload, replay
from .tiers import TierMemory
from .vllm_host import VllmHost, available

# Of a tier: `Adaptive` is what tiers have by default, which learns with the pool's.
TIER_EVICTIONS = {**EVICTIONS, "adaptive": None}
POOL, SUM, TIERS, VLLM = "pool", "one pool", "tiers", "vllm"


def run_tier_grid(
    workload: Workload, preset: str, pools: Sequence[str], hosts: Sequence[str],
    disks: Sequence[str], evictions: Sequence[str], timing: Timing, *, link: float,
    disk_link: float, retention: str | int = "auto", progress: bool = True,
) -> list[Row]:  # fmt: skip
    """One row for each pool and eviction alone, and for each host and disk behind it; and bounds.

    Args:
        preset, pools, evictions, retention: as of `run_grid`.
        hosts, disks: sizes as `pool_pages` has them; a disk of "0" is none.
        link, disk_link: bytes a second of each direction between device and host, and to or from
            the disk.

    Returns:
        Rows; seconds saved are those of prefill that the pool alone would have computed.

    Raises:
        ValueError: unknown names, or a pool that one request does not fit.
    """
    groups, cache = PRESETS[preset], empty_cache(PRESETS[preset], workload)
    judged = judged_requests(workload)
    page_bytes = cache.layout.page_bytes
    common: Row = {
        "workload": workload.name, "preset": preset, "retention": retention, "link": link,
        "disk_link": disk_link, "prefill_rate": timing.prefill_rate, "hints": timing.hints, "versions": versions(),
    }  # fmt: skip
    sizes = [
        (pool, host, disk, *(pages_of(text, preset, workload) for text in (pool, host, disk)))
        for pool, host, disk in itertools.product(pools, hosts, disks)
    ]
    rows: list[Row] = []
    runs = len(pools) * len(evictions) + len(sizes) * (2 * len(evictions) + bool(available())) + 1
    bar = tqdm(
        total=runs * len(workload.requests), unit="request", disable=not progress, leave=False
    )
    whole = None if available() is None else whole_chains(workload, cache)

    def one(
        memory: str, eviction: str, pages: int, sized: tuple[str | None, str, str],
        behind: Callable[[KVCache], Behind] | None, all_pages: int, alone: int,
    ) -> Outcome:  # fmt: skip
        pool, host, disk = sized
        policy = EVICTIONS[eviction if eviction in EVICTIONS else "lru"]()
        bar.set_description(f"{preset} {memory} {eviction} {pool or ''} {host} {disk}")
        outcome = replay(
            workload, groups, num_pages=pages + 1, timing=timing, retention=retention,
            policy=policy, behind=behind, progress=bar.update,
        )  # fmt: skip
        figures = measured(outcome, workload, judged)
        row = {**common, "memory": memory, "eviction": eviction, "pool": pool, "host": host}
        row |= {"disk": disk, "bytes": all_pages * page_bytes if pool else None}
        row |= figures | outcome.behind
        row["device_rate"] = row["hit_rate"] * _share(outcome, judged)
        row["stalled_s"] = outcome.stalled
        saved = figures["hit_tokens"] - (alone if alone >= 0 else figures["hit_tokens"])
        row["saved_s"] = saved / timing.prefill_rate
        rows.append(row)
        return outcome

    with bar:
        alone: dict[tuple[str, str], int] = {}
        for pool, eviction in itertools.product(pools, evictions):
            pages = pool_pages(pool, groups, workload)
            one(POOL, eviction, pages, (pool, "0", "0"), None, pages, -1)
            alone[pool, eviction] = rows[-1]["hit_tokens"]
        for pool, host, disk, *counts in sizes:
            pages, host_pages, disk_pages = counts
            for eviction in evictions:
                before = alone[pool, eviction]

                def tiers(
                    cache: KVCache, eviction: str = eviction, host_pages: int = host_pages,
                    disk_pages: int = disk_pages,
                ) -> TierMemory:  # fmt: skip
                    return TierMemory(
                        cache, host=host_pages, disk=disk_pages, link=link, disk_link=disk_link,
                        policy=TIER_EVICTIONS[eviction], timing=timing,
                        parts=PARTS[preset][disk_pages > 0] if preset in PARTS else None,
                    )  # fmt: skip

                sized = pool, host, disk
                has_tiers = host_pages + disk_pages > 0
                one(
                    TIERS, eviction, pages, sized, tiers if has_tiers else None, sum(counts), before
                )  # fmt: skip
                one(SUM, eviction, sum(counts), sized, None, sum(counts), before)
            if whole is not None and "lru" in evictions and host_pages and not disk_pages:

                def vllm(cache: KVCache, host_pages: int = host_pages) -> VllmHost:
                    assert whole is not None
                    return VllmHost(cache, chains=whole, pages=host_pages, link=link)

                one(VLLM, "lru", pages, sized, vllm, sum(counts), alone[pool, "lru"])
            if len(judged) == len(workload.requests):
                hits = clairvoyant_hits(
                    workload, cache, sum(counts) // cache.layout.pages_per_segment
                )
                rows.append(
                    _bound(common, "clairvoyant", pool, host, disk, hits, workload)
                    | {"bytes": sum(counts) * page_bytes}
                )
        everything = enough_pages(cache, workload, retention)
        one(SUM, "infinite", everything, (None, "0", "0"), None, everything, -1)
    if len(judged) == len(workload.requests):
        hits = infinite_hits(workload, cache)
        rows.append(_bound(common, "infinite", None, "0", "0", hits, workload) | {"bytes": None})
    for row in rows:  # bounds save over the best pool alone, which they are beside
        if "saved_s" not in row:
            best = max((n for (p, _), n in alone.items() if p == row["pool"]), default=None)
            row["saved_s"] = (
                None if best is None else (row["hit_tokens"] - best) / timing.prefill_rate
            )
    return rows


def pages_of(text: str, preset: str, workload: Workload) -> int:
    """Pages of a tier: ``"0"`` is none, a number alone is of GiB, else as of `pool_pages`.

    Raises:
        ValueError: naming the accepted forms.
    """
    try:
        if float(text) == 0:
            return 0
        text = f"{text}GiB"
    except ValueError:
        pass
    return pool_pages(text, PRESETS[preset], workload)


def whole_chains(workload: Workload, cache: KVCache) -> list[bytes]:
    """Keys of each prompt and its answer."""
    return [
        cache.match(r.tokens(i), salt=r.scope.encode()).prompt.keys
        for i, r in enumerate(workload.requests)
    ]


def versions() -> dict[str, str]:
    """What the figures depend on."""
    found = {"commit": commit(), "python": platform.python_version(), "numpy": np.__version__}
    return found | ({"vllm": version} if (version := available()) else {})


def _share(outcome: Outcome, judged: Sequence[int]) -> float:
    """Part of the hits that no load brought."""
    hits = int(outcome.hits[judged].sum())
    return (
        float(np.minimum(outcome.from_device, outcome.hits)[judged].sum() / hits) if hits else 0.0
    )


def _bound(
    common: Row, name: str, pool: str | None, host: str, disk: str, hits: int, workload: Workload
) -> dict[str, Any]:
    tokens = sum(r.input for r in workload.requests)
    return {
        **common, "retention": "any", "memory": SUM, "eviction": name, "pool": pool, "host": host,
        "disk": disk, "hit_rate": hits / tokens, "hit_tokens": hits,
    }  # fmt: skip
