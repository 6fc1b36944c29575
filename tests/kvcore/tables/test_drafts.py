"""Steps in which each request computes the same few tokens and rejects some: they end like chunks, and are none."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache
from quire.kvcore.tables.drafts import DraftBatch
from quire.kvcore.tables.prefill import BlockTables

DRAFTS = 3
DENSE = GroupSpec("dense", "dense", 8, 1, pages_per_block=2)
MIXES = {
    "dense": [DENSE],
    "windows": [DENSE, GroupSpec("near", "window", 4, 1, 6), GroupSpec("far", "window", 4, 1, 40)],
    "long segment": [GroupSpec("dense", "dense", 64, 1), GroupSpec("near", "window", 4, 1, 6)],
    "state": [DENSE, GroupSpec("near", "window", 4, 1, 6), GroupSpec("state", "state", 16, 1)],
    "small pages": [DENSE, GroupSpec("near", "window", 2, 1, 6)],
    "drafter": [DENSE, GroupSpec("drafter", "window", 4, 1, 6, lookahead=2)],
}
N, GIVEN = 4, 21


def longest(mix: str) -> int:
    """Tokens of a step that is no chunk."""
    return min(DRAFTS + 1, *(g.block_size for g in MIXES[mix]))


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


@pytest.mark.parametrize("caching", [True])
@pytest.mark.parametrize("mix", MIXES)
def test_they_end_like_chunks(mix, caching):
    """The same requests, with and without: the same lengths, dense pages in number, copies, keys, hits and counters."""
    texts, rng = texts_of(), np.random.default_rng(1)
    pair = [cache(mix, enable_caching=caching) for _ in range(2)]
    quick, slow = pair
    slow._tables.batches.most_drafts = 0
    slots = [started(kv, texts) for kv in pair]
    for i in range(120):
        size = int(rng.choice([1, 2, 4, 4, 4]))
        accepted = rng.integers(1, size + 1, N) if rng.random() < 0.9 else None
        if i % 17 == 3:  # an uneven step comes between
            counts = [[3, 1, 5, 2], [3, 2, 4, 2]][i % 2]
            for kv, own in zip(pair, slots, strict=True):
                start = kv.num_computed[own].tolist()
                ids = [t[s : s + n] for t, s, n in zip(texts, start, counts, strict=True)]
                kv.commit(kv.plan(own, counts), np.concatenate(ids))
        if i % 11 == 5:  # tokens are taken back
            low = [kv.lowest_rollback(own[1]) for kv, own in zip(pair, slots, strict=True)]
            assert low[0] == low[1]
            back = int(quick.num_computed[slots[0][1]]) - low[0]
            for kv, own in zip(pair, slots, strict=True):
                if back:
                    kv.rollback(own[1], back)
        done = [step(kv, own, texts, size, accepted) for kv, own in zip(pair, slots, strict=True)]
        (new, copies), (old, as_many) = done
        assert copies == as_many
        assert isinstance(new.changes.batch, DraftBatch) == (
            1 < size <= longest(mix)
        ) and not isinstance(old.changes.batch, DraftBatch)
        for name in ("positions", "cu_seqlens_q", "seq_lens", "num_new_tokens"):
            assert (getattr(new, name) == getattr(old, name)).all(), name
        assert ((new.slot_mapping >= 0) | (old.slot_mapping < 0)).all(), "a row that chunks write"
        assert (quick.num_computed == slow.num_computed).all()
    pages = {"pages_in_use", "free_pages"}  # rings keep pages out of reach, as plain steps do
    assert quick.num_computed[slots[0]].min() > 200
    hits = []
    for kv in pair:
        for i in range(N):
            kv.release(i)
        kv.check_invariants()
        stats = {k: v for k, v in kv.stats().items() if k not in pages or not caching}
        hits.append(([kv.match(t).num_tokens for t in texts], stats))
    assert hits[0] == hits[1] and (max(hits[0][0]) > 150 or not caching)


@pytest.mark.parametrize("mix", MIXES)
def test_no_chunk_is_planned(mix, monkeypatch):
    """Not for an unchanged batch, nor when requests leave and come back."""
    kv, texts = cache(mix), texts_of()
    slots, size = started(kv, texts), longest(mix)
    accepted = np.minimum([4, 1, 2, 3], size)
    monkeypatch.setattr(BlockTables, "plan_chunk", None)
    for i in range(40):
        rows = np.arange(N) if i % 5 else np.array([2, 0, 3])
        step(kv, slots[rows], texts[rows], size, accepted[: len(rows)])
    assert (kv.num_computed[slots] > GIVEN + 30).all()


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
    assert plan.changes.drafts is not None
    with pytest.raises(ValueError, match=r"accepted: expected between \[1, 1, 1, 1\] and \[4"):
        kv.commit(plan, np.zeros(4 * N, dtype=np.int32), accepted)
    kv.check_invariants()
