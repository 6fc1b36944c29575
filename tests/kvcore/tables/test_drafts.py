"""Steps in which each request computes a few tokens and rejects some."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache

DRAFTS = 3
DENSE = GroupSpec("dense", "dense", 8, 1)
MIXES = {
    "dense": [DENSE],
    "windows": [DENSE, GroupSpec("near", "window", 4, 1, 6), GroupSpec("far", "window", 4, 1, 40)],
    "long segment": [GroupSpec("dense", "dense", 64, 1), GroupSpec("near", "window", 4, 1, 6)],
    "state": [DENSE, GroupSpec("near", "window", 4, 1, 6), GroupSpec("state", "state", 16, 1)],
    "small pages": [DENSE, GroupSpec("near", "window", 2, 1, 6)],
    "drafter": [DENSE, GroupSpec("drafter", "window", 4, 1, 6, lookahead=2)],
}
N, GIVEN = 4, 21


def cache(mix: str, **options) -> KVCache:
    base = {"num_pages": 2000, "max_requests": N + 1, "max_model_len": 700, "retention": "dense"}
    return KVCache(MIXES[mix], max_draft_tokens=DRAFTS, **(base | options))


def started(kv: KVCache, texts: np.ndarray) -> np.ndarray:
    """Slots of requests that have computed their prompts, and a token more each."""
    slots = np.array([kv.admit(i, kv.match(t[: GIVEN + i])) for i, t in enumerate(texts)])
    for i, slot in enumerate(slots.tolist()):
        kv.commit(kv.plan([slot], [GIVEN + i]), texts[i, : GIVEN + i])
    step(kv, slots, texts, 1)
    return slots


def step(kv: KVCache, slots, texts, size: int, accepted=None):
    """A step of `size` tokens for each; returns its plan, and how many copies follow."""
    start = kv.num_computed[slots]
    plan = kv.plan(slots, [size] * len(slots))
    ids = np.concatenate([t[s : s + size] for t, s in zip(texts, start.tolist(), strict=True)])
    copies = kv.commit(plan, ids, accepted)
    kv.check_invariants()
    return plan, len(copies)


def texts_of(n: int = N) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 1000, (n, 700), dtype=np.int32)


def test_a_step_that_does_not_fit_changes_nothing():
    """Of some pages that are left, some requests would get theirs: none does, and the plan before still holds."""
    kv, texts = cache("state", num_pages=60, enable_caching=False), texts_of()
    slots = started(kv, texts)
    while True:
        plan = kv.plan(slots, [1] * N)
        more = kv.plan(slots, [4] * N)
        if not hasattr(more, "slots"):
            break
        step(kv, slots, texts, 4)
    assert sum(more.per_group.values()) == more.needed > more.free + more.evictable
    before = kv.tables.copy(), kv.num_computed.copy(), kv.num_free_pages
    if hasattr(plan, "slots"):
        kv.commit(plan, [t[s] for t, s in zip(texts, before[1][slots].tolist(), strict=True)])
        assert (kv.num_computed[slots] == before[1][slots] + 1).all()
    kv.check_invariants()
    for i in range(N):
        kv.release(i)
    assert kv.num_free_pages == 59


@pytest.mark.parametrize("accepted", [[0, 1, 1, 1], [5, 1, 1, 1], [-(2**63), 1, 1, 1], [1, 1, 1]])
def test_wrong_counts_are_refused(accepted):
    kv, texts = cache("windows"), texts_of()
    slots = started(kv, texts)
    plan = kv.plan(slots, [4] * N)
    with pytest.raises(ValueError, match=r"accepted: expected between \[1, 1, 1, 1\] and \[4"):
        kv.commit(plan, np.zeros(4 * N, dtype=np.int32), accepted)
    kv.check_invariants()
