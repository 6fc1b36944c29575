"""Failures at any point of a plan leave no trace; aborts at any time leak nothing; memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import LRU, GroupSpec, OutOfPages
from tests.support.kvcore.engine import Engine, groups

STATE = GroupSpec("state", "state", 4, 4096)
DENSE = ((8, None),)
HYBRID = ((8, None), (4, 10))
STATEFUL = ((8, None), (4, 10), STATE)


class Fault(Exception):
    """The injected failure."""


def engine(specs, **options) -> Engine:
    base = {"num_pages": 40, "max_requests": 3, "max_model_len": 300, "track_deltas": True}
    return Engine(groups(*specs), **(base | options))


def picture(e: Engine) -> tuple:
    """All that a failed plan must not change, eviction aside."""
    kv = e.kv
    slots = [kv.slot_of(r) for r in e.slots]
    return (
        kv.tables.tolist(),
        kv.num_computed.tolist(),
        kv._chains.cached.tolist(),
        [kv.sequences.num_keys(slot) for slot in range(kv.max_requests)],
        [kv._chains.runs[s].depth for s in slots],
        kv._tables.snapshot_at.tolist(),
        kv.counters.copy(),
        kv.pool.users.tolist(),
        [[part.tolist() for part in delta] for delta in kv._tables.deltas or []],
    )


def free_and_cached(e: Engine) -> tuple:
    return e.kv.stats(), e.kv.pool.free_pages().tolist(), e.kv.pool.holds.tolist()


CASES = {"dense": DENSE, "hybrid": HYBRID, "state": STATEFUL}


def queued(policy) -> int:
    """Entries in all the lists that a policy keeps, stale ones included."""
    return sum(
        len(getattr(policy, q, ())) for q in ("_heap", "_tickets", "_small", "_main", "_place")
    )


@pytest.mark.parametrize("budget", [200])
@pytest.mark.parametrize(
    ("specs", "policy"),
    [(DENSE, LRU), (HYBRID, LRU), (STATEFUL, LRU)],
)
@pytest.mark.parametrize("pages", [60, 3000], ids=["full", "roomy"])
def test_long_traffic_keeps_memory_bounded(specs, policy, pages, budget):
    """Requests come, hit, decode and go on a small set of prompts, with a pool that is always full or never."""
    kv = engine(specs, num_pages=pages, policy=policy(), track_deltas=False, debug=False).kv
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, rng.integers(10, 100)).tolist() for _ in range(12)]
    sizes, steps, refused = [], 0, 0
    for i in range(budget):
        slot = kv.admit(i, kv.match(prompts[rng.integers(len(prompts))]))
        left = int(kv.sequences.prompt_len[slot] - kv.num_computed[slot])
        todo = [n for n in [16] * (left // 16) + [left % 16] if n] + [1] * int(rng.integers(8))
        for n in todo:
            plan = kv.plan([slot], [n])
            steps += 1
            if isinstance(plan, OutOfPages):
                refused += 1
                break
            kv.commit(plan, [7] * n)
        kv.release(i)
        if i % 50 == 49:
            kv.check_invariants()
            sizes.append((len(kv.index._useless), queued(kv.index.policy)))
    assert refused == 0 and steps > 3 * budget
    stats = kv.stats()
    assert (stats["evicted_segments"] > budget // 6) == (pages == 60)
    # What the lists may hold: the entries there are, and a constant of stale ones.
    entries = stats["resume_points"] + stats["cached_segments"]
    assert max(size for size, _ in sizes) <= 2 * stats["cached_segments"], sizes
    assert max(size for _, size in sizes) <= 6 * entries + 1024, sizes


def test_a_prefix_without_a_resume_point_is_listed_once():
    """Each release of it made one more record of what can go first: 2,000 after 2,000 requests."""
    e = engine(((8, None), STATE), num_pages=300)
    for i in range(50):
        e.admit(i, [1] * 30)
        e.step({i: 30})  # ends at no boundary: the state is kept nowhere
        e.release(i)
    assert e.kv.stats()["resume_points"] == 0 and len(e.kv.index._useless) == 1
