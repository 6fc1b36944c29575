"""Times and bytes of the allocator: each function gives rows of one kind of figure."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from statistics import fmean, median
from typing import TypeVar

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
T = TypeVar("T")


def row(name: str, spec: str, value: float, unit: str = "s") -> Row:
    """One figure, in seconds ("s") or bytes ("B")."""
    return {"name": name, "spec": spec, "value": value, "unit": unit}


def show(rows: list[Row]) -> None:
    for r in rows:
        value = float(r["value"])  # type: ignore[arg-type]
        if r["unit"] == "B":
            text = f"{value / 2**20:10.1f} MiB" if abs(value) > 1e5 else f"{value:10.1f} B"
        else:
            text = f"{value * 1e6:10.1f} us" if value < 1e-3 else f"{value * 1e3:10.2f} ms"
        print(f"{r['name']:<24} {r['spec']:<12} {text}", flush=True)


class Times:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def run(self, name: str, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def rows(self, spec: str) -> list[Row]:
        return [row(name, spec, median(t)) for name, t in self.seconds.items()]


def spec_rows(spec: str, requests: list[int], repeats: int, steps: int) -> list[Row]:
    rows = million(spec, repeats)
    rows.append(row("pool_1m_bytes", spec, bytes_of(lambda: million_pages(spec)), "B"))
    for n in requests:
        rows += decode_step(spec, n, steps)
        rows.append(drafts_step(spec, n, steps))
    return rows + (split_lookup(spec, 1024) if repeats else [])


def planned(cache: KVCache, slots: object, counts: object) -> StepPlan:
    plan = cache.plan(slots, counts)
    assert isinstance(plan, StepPlan), plan
    return plan


def prefill(cache: KVCache, slot: int, tokens: np.ndarray) -> None:
    for start in range(int(cache.num_computed[slot]), len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        cache.commit(planned(cache, [slot], [len(part)]), part)


def million_pages(spec: str, retention: str | int = "auto") -> KVCache:
    return KVCache(
        SPECS[spec], num_pages=MILLION, max_requests=2, max_model_len=MILLION, retention=retention
    )


def million(spec: str, repeats: int) -> list[Row]:
    """One prompt of 1,048,576 tokens: hash, admit, look up, release.

    ``_tails_gone`` is the look-up after all resume points were evicted.
    """
    tokens = np.arange(MILLION, dtype=np.int32) % 50021
    times = Times()
    for _ in range(repeats):
        for retention, name in ((32768, "admit_1m_interval"), ("dense", "admit_1m_dense")):
            cache = times.run("pool_1m_build", lambda r=retention: million_pages(spec, r))
            match = times.run("hash_1m", lambda c=cache: c.match(tokens))
            slot = cache.admit("a", match)
            times.run(name, lambda c=cache, s=slot: prefill(c, s, tokens))
            times.run("release_1m", lambda c=cache: c.release("a"))
            hit = times.run("lookup_1m_hit", lambda c=cache, m=match: c.match(m.prompt))
            # A state can be kept only where a chunk ends.
            assert hit.num_tokens >= MILLION - 32768
        for run in cache.index.runs():
            for point in list(run.points.values()):
                cache.index.drop_point(point)
        gone = times.run("lookup_1m_tails_gone", lambda c=cache, m=match: c.match(m.prompt))
        assert gone.num_tokens == 0 and gone.dense_tokens == MILLION
    return times.rows(spec)


def bytes_of(make: Callable[[], object]) -> int:
    tracemalloc.start()
    made = make()  # noqa: F841  it has to live
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used


def decoding(
    spec: str, num_requests: int, *, context: int = CHUNK, drafts: int = 0
) -> tuple[KVCache, np.ndarray]:
    """A cache with requests staggered around `context` tokens, and their slots."""
    reach = [2 * CHUNK if g.kind == "dense" else (g.sliding_window or 0) + 256 for g in SPECS[spec]]
    pages = sum(-(-n // g.block_size) + 1 for n, g in zip(reach, SPECS[spec], strict=True))
    cache = KVCache(
        SPECS[spec], num_pages=-(-num_requests * pages // MILLION) * MILLION,
        max_requests=num_requests + 1, max_model_len=context + CHUNK, max_draft_tokens=drafts,
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


def reserve_times(cache: KVCache, slots: np.ndarray, steps: int) -> list[float]:
    """Mean seconds a request of each decode step whose pages are reserved one by one.

    That is a look at the `room` of each request, and `reserve` past it.
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


def decode_step(spec: str, num_requests: int, steps: int) -> list[Row]:
    """Plan and commit of one token for each of `num_requests` requests, staggered around 8k tokens.

    ``_churn`` is the same where each step has another batch, as in a busy server. ``_add`` is one
    request where pages are reserved one by one.
    """
    cache, slots = decoding(spec, num_requests)
    plans, totals = decode_times(cache, slots, steps)
    churn = []
    for i in range(max(1, steps // 2)):
        batch = np.delete(slots, i % num_requests) if num_requests > 1 else slots
        churn += decode_times(cache, batch, 1)[1]
    name = f"decode_step_{num_requests}"
    return [
        row(name, spec, median(totals)),
        row(f"{name}_mean", spec, fmean(totals)),
        row(f"{name}_plan", spec, median(plans)),
        row(f"{name}_churn", spec, median(churn)),
        row(f"{name}_add", spec, median(reserve_times(cache, slots, steps))),
        row(f"{name}_garbage", spec, garbage(cache, slots, steps), "B"),
    ]


def garbage(cache: KVCache, slots: np.ndarray, steps: int) -> float:
    """Bytes that a decode step leaves behind on average, beyond the keys and pages that it caches.

    Keys take 32 bytes a segment twice (with the request and in the index), pages 4 bytes each.
    Arrays grow by doubling, so the figure is only about zero.
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


def drafts_step(spec: str, num_requests: int, steps: int) -> Row:
    """Plan and commit of four tokens a request, of which up to three are rejected at random."""
    cache, slots = decoding(spec, num_requests, drafts=3)
    counts, ids = np.full(len(slots), 4), np.zeros(4 * len(slots), dtype=np.int32)
    rng, times, name = np.random.default_rng(0), Times(), f"drafts_step_{num_requests}"
    for _ in range(steps):
        accepted = rng.integers(1, 5, len(slots))
        call = lambda a=accepted: cache.commit(planned(cache, slots, counts), ids, a)  # noqa: E731
        times.run(name, call)
    return times.rows(spec)[0]


def split_lookup(spec: str, branches: int) -> list[Row]:
    """Look-up of a chain that one request left, and of one that a request left at each boundary."""
    cache = KVCache(
        SPECS[spec], num_pages=MILLION, max_requests=1, max_model_len=MILLION, retention="dense"
    )
    tokens = np.arange((branches + 1) * cache.alignment, dtype=np.int32)
    prefixes = [tokens[: (i + 1) * cache.alignment + 1] for i in range(branches)]
    times = Times()
    for name, left in (("lookup_whole", [tokens]), ("lookup_left", prefixes)):
        for part in left:
            prefill(cache, cache.admit("a", cache.match(part)), part)
            cache.release("a")
        prompt = cache.match(tokens).prompt
        for _ in range(50):
            times.run(f"{name}_{branches}", lambda p=prompt: cache.match(p))
    return times.rows(spec)


def full_pool(repeats: int) -> list[Row]:
    """Plan of 8,192 tokens in a full pool of chains that keep every boundary, for each policy."""
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
        rows.append(row(f"plan_8k_full_{policy.__name__.lower()}", "dense-16", median(times)))
    return rows
