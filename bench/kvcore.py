"""Speed of the allocator: microseconds a decode step, milliseconds for a prompt of a million tokens.

    python -m bench.kvcore
    python -m bench.kvcore --spec gemma4-31b --json kvcore.json

Everything runs in this process on one core; figures are medians. Nothing here touches a device: `kvcore` is integers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from quire.kvcore import GroupSpec, KVCache, StepPlan

MILLION = 1 << 20
CHUNK = 8192
SPECS: dict[str, list[GroupSpec]] = {
    "v4": [
        GroupSpec("dense", "dense", 256, 1),
        *(GroupSpec(f"window.{i}", "window", 64, 1, 128) for i in range(2)),
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
            cache.index._drop_point(point)
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
            assert cache.match(match.prompt).num_tokens == MILLION - cache.alignment
        drop_resume_points(cache)
        times.setdefault("lookup_1m_tails_gone", []).append(
            seconds(lambda c=cache, m=match: c.match(m.prompt))
        )
        assert cache.match(match.prompt).dense_tokens == MILLION
    return [row(name, spec, statistics.median(t), "s") for name, t in times.items()]


def pool_bytes(spec: str) -> Row:
    """Bytes that a cache of a million pages allocates before its first request (two request slots)."""
    tracemalloc.start()
    cache = KVCache(SPECS[spec], num_pages=MILLION, max_requests=2, max_model_len=MILLION)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert cache.num_pages == MILLION
    return row("pool_1m_bytes", spec, used, "B")


def decode_step(spec: str, num_requests: int, steps: int) -> list[Row]:
    """Plan and commit of one token for each of `num_requests` requests, staggered around 8k tokens."""
    cache = KVCache(
        SPECS[spec], num_pages=4 * MILLION, max_requests=num_requests, max_model_len=16384
    )
    rng = np.random.default_rng(0)
    slots = []
    for i in range(num_requests):
        tokens = rng.integers(0, 50000, CHUNK + int(rng.integers(256)), dtype=np.int32)
        slots.append(cache.admit(i, cache.match(tokens)))
        prefill(cache, slots[-1], tokens)
    batch, ones = np.array(slots), np.ones(num_requests, dtype=np.int64)
    ids = np.zeros(num_requests, dtype=np.int32)
    plans, totals = [], []
    for _ in range(steps):
        start = time.perf_counter()
        plan = planned(cache, batch, ones)
        middle = time.perf_counter()
        cache.commit(plan, ids)
        totals.append(time.perf_counter() - start)
        plans.append(middle - start)
    name = f"decode_step_{num_requests}"
    return [
        row(name, spec, statistics.median(totals), "s"),
        row(f"{name}_mean", spec, statistics.fmean(totals), "s"),
        row(f"{name}_plan", spec, statistics.median(plans), "s"),
    ]


def row(name: str, spec: str, value: float, unit: str) -> Row:
    """One figure."""
    return {"name": name, "spec": spec, "value": value, "unit": unit}


def shown(r: Row) -> str:
    """One line of the table."""
    value = float(r["value"])  # type: ignore[arg-type]
    if r["unit"] == "B":
        text = f"{value / 2**20:10.1f} MiB"
    else:
        text = f"{value * 1e6:10.1f} us" if value < 1e-3 else f"{value * 1e3:10.2f} ms"
    return f"{r['name']:<24} {r['spec']:<12} {text}"


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure, print a table, and write it where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--spec", choices=[*SPECS, "all"], default="all", help="cache groups")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the million-token prompt")
    parser.add_argument("--steps", type=int, default=300, help="decode steps to time")
    parser.add_argument(
        "--requests", type=int, nargs="*", default=[256, 4096], help="decode batch sizes"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as a list of objects")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for spec in SPECS if args.spec == "all" else [args.spec]:
        new = million(spec, args.repeats) if args.repeats else []
        new.append(pool_bytes(spec))
        for n in args.requests:
            new += decode_step(spec, n, args.steps)
        print("\n".join(shown(r) for r in new), flush=True)
        rows += new
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return rows


if __name__ == "__main__":
    main()
