"""Times and bytes of the allocator: each function gives rows of one kind of figure."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from quire.kvcore import LRU, Adaptive, GroupSpec, KVCache, StepPlan

MILLION = 1 << 20
CHUNK = 8192
SPECS: dict[str, list[GroupSpec]] = {
    "v4": [
        GroupSpec("dense", "dense", 256, 1),
        *(GroupSpec(f"window.{i}", "window", 64, 1, 128) for i in range(2)),
        GroupSpec("state", "state", 256, 1),
    ],
    "gemma4-31b": [
        GroupSpec("full", "dense", 32, 1),
        *(GroupSpec(f"sliding.{i}", "window", 16, 1, 1024) for i in range(5)),
    ],
}
Row = dict[str, object]


def seconds(run: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def planned(cache: KVCache, slots: object, counts: object) -> StepPlan:
    """A plan that must fit."""
    plan = cache.plan(slots, counts)
    assert isinstance(plan, StepPlan), plan
    return plan


def prefill(cache: KVCache, slot: int, tokens: np.ndarray) -> None:
    """Plan and commit a whole prompt in chunks."""
    for start in range(int(cache.num_computed[slot]), len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        cache.commit(planned(cache, [slot], [len(part)]), part)


def drop_resume_points(cache: KVCache) -> None:
    """Take every resume point away and leave the dense blocks, as eviction does first."""
    for run in cache.index.runs():
        for point in list(run.points.values()):
            cache.index.drop_point(point)
    assert cache.index.num_points == 0


def million(spec: str, repeats: int) -> list[Row]:
    """One prompt of 1,048,576 tokens: hash, admit, look up, release."""
    tokens = np.arange(MILLION, dtype=np.int32) % 50021
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for retention, name in ((32768, "admit_1m_interval"), ("dense", "admit_1m_dense")):
            start = time.perf_counter()
            cache = KVCache(
                SPECS[spec], num_pages=MILLION, max_requests=2, max_model_len=MILLION,
                retention=retention,
            )  # fmt: skip
            times.setdefault("pool_1m_build", []).append(time.perf_counter() - start)
            times.setdefault("hash_1m", []).append(seconds(lambda c=cache: c.match(tokens)))
            match = cache.match(tokens)
            slot = cache.admit("a", match)
            times.setdefault(name, []).append(
                seconds(lambda c=cache, s=slot: prefill(c, s, tokens))
            )
            times.setdefault("release_1m", []).append(seconds(lambda c=cache: c.release("a")))
            hit = seconds(lambda c=cache, m=match: c.match(m.prompt))
            times.setdefault("lookup_1m_hit", []).append(hit)
            # A state can be kept only where a chunk ends.
            assert cache.match(match.prompt).num_tokens >= MILLION - 32768
        drop_resume_points(cache)
        times.setdefault("lookup_1m_tails_gone", []).append(
            seconds(lambda c=cache, m=match: c.match(m.prompt))
        )
        assert cache.match(match.prompt).dense_tokens == MILLION
    return [row(name, spec, statistics.median(t), "s") for name, t in times.items()]


def pool_bytes(spec: str) -> Row:
    """Bytes of a cache of a million pages before its first request (two request slots)."""
    tracemalloc.start()
    cache = KVCache(SPECS[spec], num_pages=MILLION, max_requests=2, max_model_len=MILLION)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert cache.num_pages == MILLION
    return row("pool_1m_bytes", spec, used, "B")


def decoding(
    spec: list[GroupSpec],
    num_requests: int,
    context: int = CHUNK,
    num_pages: int = MILLION,
    drafts: int = 0,
) -> tuple[KVCache, np.ndarray]:
    """A cache with so many requests, staggered around `context` tokens, and their slots."""
    cache = KVCache(
        spec, num_pages=num_pages, max_requests=num_requests + 1, max_model_len=context + CHUNK,
        max_draft_tokens=drafts,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    slots = []
    for i in range(num_requests):
        tokens = rng.integers(0, 50000, context + int(rng.integers(256)), dtype=np.int32)
        slots.append(cache.admit(i, cache.match(tokens)))
        prefill(cache, slots[-1], tokens)
    return cache, np.array(slots)


def decode_times(cache: KVCache, slots: np.ndarray, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of plan, and of plan and commit, of each of `steps` decode steps."""
    ones, ids = np.ones(len(slots), dtype=np.int64), np.zeros(len(slots), dtype=np.int32)
    plans, totals = [], []
    for _ in range(steps):
        start = time.perf_counter()
        plan = planned(cache, slots, ones)
        middle = time.perf_counter()
        cache.commit(plan, ids)
        totals.append(time.perf_counter() - start)
        plans.append(middle - start)
    return plans, totals


def add_times(cache: KVCache, slots: np.ndarray, steps: int) -> list[float]:
    """Seconds that the pages of one request take (a look at its `room`, and `reserve` past that),
    on average in each of `steps` decode steps that are reserved one by one.
    """
    ids, times = np.zeros(len(slots), dtype=np.int32), []
    for _ in range(steps):
        starts = cache.num_computed[slots]
        each = list(zip(slots.tolist(), (starts + 1).tolist(), strict=True))
        start = time.perf_counter()
        for slot, end in each:
            if end > cache.room(slot):
                cache.reserve(slot, end)
        times.append((time.perf_counter() - start) / len(each))
        cache.arrays(slots, starts, starts + 1)
        cache.advance(slots, starts + 1)
        cache.publish(slots, starts + 1, ids)
    return times


def pool_for(spec: str, num_requests: int) -> int:
    """A million pages, or as many millions as requests of up to two chunks and their window rings
    need.
    """
    reach = [2 * CHUNK if g.kind == "dense" else (g.sliding_window or 0) + 256 for g in SPECS[spec]]
    pages = sum(
        -(-tokens // g.block_size) + 1 for tokens, g in zip(reach, SPECS[spec], strict=True)
    )
    return -(-num_requests * pages // MILLION) * MILLION


def decode_step(spec: str, num_requests: int, steps: int) -> list[Row]:
    """Plan and commit of one token for each of `num_requests` requests, staggered around 8k tokens.

    ``_churn`` is the same where each step has another batch: one request ends and one comes, as in
    a busy server. ``_add`` is one request where pages are reserved one by one.
    """
    cache, slots = decoding(SPECS[spec], num_requests, num_pages=pool_for(spec, num_requests))
    plans, totals = decode_times(cache, slots, steps)
    name = f"decode_step_{num_requests}"
    churn = []
    for i in range(steps // 2):
        out = i % num_requests
        one = decode_times(cache, np.delete(slots, out), 1)[1]
        churn += one
    return [
        row(name, spec, statistics.median(totals), "s"),
        row(f"{name}_mean", spec, statistics.fmean(totals), "s"),
        row(f"{name}_plan", spec, statistics.median(plans), "s"),
        row(f"{name}_churn", spec, statistics.median(churn), "s"),
        row(f"{name}_add", spec, statistics.median(add_times(cache, slots, steps)), "s"),
        row(f"{name}_garbage", spec, garbage(cache, slots, steps), "B"),
    ]


def drafts_step(spec: str, num_requests: int, steps: int) -> Row:
    """Plan and commit of four tokens a request, of which up to three are rejected at random."""
    cache, slots = decoding(
        SPECS[spec], num_requests, num_pages=pool_for(spec, num_requests), drafts=3
    )
    counts, ids = np.full(len(slots), 4), np.zeros(4 * len(slots), dtype=np.int32)
    rng, times = np.random.default_rng(0), []
    for _ in range(steps):
        accepted = rng.integers(1, 5, len(slots))
        start = time.perf_counter()
        cache.commit(planned(cache, slots, counts), ids, accepted)
        times.append(time.perf_counter() - start)
    return row(f"drafts_step_{num_requests}", spec, statistics.median(times), "s")


def full_pool(repeats: int) -> list[Row]:
    """Plan of 8,192 tokens where chains that keep every boundary of 16 tokens must make room, for
    each policy.
    """
    groups = [GroupSpec("full", "dense", 16, 1), GroupSpec("sliding", "window", 16, 1, 128)]
    rows = []
    for policy in (Adaptive, LRU):
        cache = KVCache(
            groups, num_pages=MILLION >> 6, max_requests=1, max_model_len=CHUNK, retention="dense",
            policy=policy(),
        )  # fmt: skip
        rng, times = np.random.default_rng(0), []
        while len(times) < repeats:
            tokens = rng.integers(0, 50000, CHUNK, dtype=np.int32)
            slot, evicted = cache.admit("a", cache.match(tokens)), cache.index.num_evicted_points
            start = time.perf_counter()
            plan = planned(cache, [slot], [CHUNK])
            if cache.index.num_evicted_points > evicted:
                times.append(time.perf_counter() - start)
            cache.commit(plan, tokens)
            cache.release("a")
        name = f"plan_8k_full_{policy.__name__.lower()}"
        rows.append(row(name, "dense-16", statistics.median(times), "s"))
    return rows


def split_lookup(spec: str, branches: int) -> list[Row]:
    """Look-up of a chain that requests left at each of so many boundaries, and of one that nobody
    left.
    """
    cache = KVCache(
        SPECS[spec], num_pages=MILLION, max_requests=1, max_model_len=MILLION, retention="dense"
    )
    tokens = np.arange((branches + 1) * cache.alignment, dtype=np.int32)
    rows = []
    for name, cuts in (("lookup_whole", 1), ("lookup_left", branches)):
        for depth in range(cuts):
            part = tokens[: (depth + 1) * cache.alignment + 1] if cuts > 1 else tokens
            slot = cache.admit("a", cache.match(part))
            prefill(cache, slot, part)
            cache.release("a")
        prompt = cache.match(tokens).prompt
        times = [seconds(lambda p=prompt: cache.match(p)) for _ in range(50)]
        rows.append(row(f"{name}_{branches}", spec, statistics.median(times), "s"))
    return rows


def garbage(cache: KVCache, slots: np.ndarray, steps: int) -> float:
    """Bytes that a decode step leaves behind, on average, beyond the keys and pages that it caches.

    Keys take 32 bytes a segment twice (with the request and in the index), pages 4 bytes each;
    arrays grow by doubling, so that the figure is about zero, not zero.
    """
    ones, ids = np.ones(len(slots), dtype=np.int64), np.zeros(len(slots), dtype=np.int32)
    tracemalloc.start()
    decode_times(cache, slots, 20)
    before, segments = tracemalloc.get_traced_memory()[0], cache.index.num_segments
    for _ in range(steps):
        cache.commit(planned(cache, slots, ones), ids)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    cached = (cache.index.num_segments - segments) * (64 + 4 * cache.layout.pages_per_segment)
    return (grown - cached) / steps


def row(name: str, spec: str, value: float, unit: str) -> Row:
    """One figure."""
    return {"name": name, "spec": spec, "value": value, "unit": unit}


def shown(r: Row) -> str:
    """One line of the table."""
    value = float(r["value"])  # type: ignore[arg-type]
    if r["unit"] == "B":
        text = f"{value / 2**20:10.1f} MiB" if abs(value) > 1e5 else f"{value:10.1f} B"
    else:
        text = f"{value * 1e6:10.1f} us" if value < 1e-3 else f"{value * 1e3:10.2f} ms"
    return f"{r['name']:<24} {r['spec']:<12} {text}"
