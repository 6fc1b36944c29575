"""What policies say that they evict next is what they evict next, and to ask changes nothing."""

from __future__ import annotations

import heapq
import random

import pytest

from quire.kvcore import LRU, Adaptive, KVCache
from quire.kvcore.policies.base import in_order
from tests.kvcore.engine import groups


def busy(policy, specs) -> KVCache:
    """A cache with some dozen entries, used differently often."""
    kv = KVCache(specs, num_pages=1500, max_requests=4, max_model_len=300, policy=policy)
    rng = random.Random(0)
    for i in range(60):
        base = rng.randrange(8)
        tokens = [base] * rng.randint(10, 120) + [i] * rng.randint(1, 60)
        slot = kv.admit(i, kv.match(tokens))
        done = int(kv.num_computed[slot])
        kv.commit(kv.plan([slot], [len(tokens) - done]), tokens[done:])
        kv.release(i)
    return kv


@pytest.mark.parametrize(
    "specs", [groups((8, None), (4, 10)), groups((8, None))], ids=["hybrid", "dense"]
)
@pytest.mark.parametrize("make", [LRU, Adaptive])
def test_coming(make, specs):
    policy, twin = (busy(make(), specs).index.policy for _ in range(2))
    for one in (policy, twin):
        if make is Adaptive:  # what was not looked at yet does not come
            while one._new:
                one._look(64)
    found = policy.coming(10)
    assert len(found) == len(set(found)) == 10
    assert policy.coming(3) == found[:3] and policy.coming(0) == []
    gone = []
    for entry in iter(policy.pop, None):
        other = twin.pop()
        assert (entry.key, entry.depth) == (other.key, other.depth), "to ask changed something"
        gone.append(entry)
        policy.coming(5)
    assert twin.pop() is None and len(gone) > 30
    if make is LRU:
        assert gone[:10] == found
    assert gone[0] in found


def test_in_order():
    rng = random.Random(1)
    heap = [(rng.randrange(50), i) for i in range(200)]
    heapq.heapify(heap)
    kept = heap[:]
    assert list(in_order(heap)) == sorted(heap) and heap == kept
    assert list(in_order([])) == []
