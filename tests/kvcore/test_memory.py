"""Memory stays bounded over long traffic."""

import numpy as np
import pytest

from quire.kvcore import LRU, GroupSpec, OutOfPages
from tests.kvcore.engine import Engine, groups

STATE = GroupSpec("state", "state", 4, 4096)
DENSE = ((8, None),)
STATEFUL = ((8, None), (4, 10), STATE)


def engine(specs, **options) -> Engine:
    return Engine(groups(*specs), max_requests=3, max_model_len=300, debug=False, **options)


def queued(policy) -> int:
    """Entries that a policy keeps, stale ones included."""
    return len(policy._heap) + len(policy._tickets)


@pytest.mark.parametrize("specs", [DENSE, STATEFUL], ids=["dense", "state"])
@pytest.mark.parametrize("pages", [60, 3000], ids=["full", "roomy"])
def test_long_traffic_keeps_memory_bounded(specs, pages, budget=200):
    """Requests of a few prompts come, hit, decode and go, in a pool that is always full or never."""
    kv = engine(specs, num_pages=pages, policy=LRU()).kv
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
