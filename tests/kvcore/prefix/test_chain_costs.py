"""Long chains: nothing recurses along them, and what an operation does grows no faster than what it is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import LRU, Adaptive, KVCache, Prompt, StepPlan
from quire.kvcore.prefix.requests import Sequences
from tests.support.kvcore.engine import groups

POLICIES = [Adaptive, LRU]


class Point:
    """An entry of one chain."""

    def __init__(self, depth: int, shorter: Point | None) -> None:
        self.depth, self.shorter = depth, shorter
        self.key = depth.to_bytes(32, "big")
        self.gain = self.num_pages = self.freed = 1
        self.last_used = self.num_uses = 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_filed_deepest_first_is_evicted(policy):
    """As a restored cache, or one whose pins end, files it."""
    chain: list[Point] = []
    for depth in range(1, 2001):
        chain.append(Point(depth, chain[-1] if chain else None))
    p = policy()
    for entry in chain[::-1]:
        p.add(entry)
    gone = [p.pop() for _ in chain]
    assert {id(e) for e in gone} == {id(e) for e in chain} and p.pop() is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_remembers_no_more_than_what_is_filed(policy):
    """Every request that shares a chain takes its entry out and files it again."""
    p, entries = policy(), [Point(depth, None) for depth in range(1, 4)]
    for _ in range(5000):
        for entry in entries:
            p.discard(entry)
            p.add(entry)
    containers = [c for c in vars(p).values() if hasattr(c, "__len__")]
    containers += [heap for c in containers if isinstance(c, dict) for heap in c.values() if isinstance(heap, list)]  # fmt: skip
    assert max(map(len, containers)) <= 4 * len(entries) + 1024


def finish(kv: KVCache, rid: object, prompt: np.ndarray) -> None:
    match = kv.match(prompt)
    slot, hit = kv.admit(rid, match), match.num_tokens
    plan = kv.plan([slot], [len(prompt) - hit])
    assert isinstance(plan, StepPlan)
    kv.commit(plan, prompt[hit:])
    kv.check_invariants()
    kv.release(rid)


@pytest.mark.parametrize("specs", [((8, None),), ((8, None), (8, 9))], ids=["dense", "hybrid"])
def test_a_chain_that_requests_left_everywhere_is_one_run_again(specs):
    """Each left it at another boundary, some with segments of their own, which were evicted since."""
    kv = KVCache(groups(*specs), num_pages=4000, max_requests=2, max_model_len=4096, retention="dense")  # fmt: skip
    chain = np.arange(800)
    finish(kv, "first", chain)
    for depth in range(1, 99):
        own = [5000 + depth] * (20 if depth % 3 == 0 else 3)
        finish(kv, depth, np.concatenate([chain[: 8 * depth], own]))
    branches = [r for r in kv.index.runs() if not r.children]
    for run in branches:
        if run.start % 3 == 0 and run.length < 10:
            for point in list(run.points.values()):
                kv.index.drop_point(point)
            kv.index.policy.discard(run)
            kv.index._trim(run, run.length)
    kv.check_invariants()
    finish(kv, "again", np.concatenate([chain, [1]]))
    kv.check_invariants()
    assert len(list(kv.index.runs())) == 1
    assert kv.match([*chain, 1]).num_tokens == 800


def test_a_run_is_two_as_long_as_a_branch_or_a_pin_needs_it():
    kv = KVCache(groups((8, None), (8, 9)), num_pages=400, max_requests=2, max_model_len=400, retention="dense")  # fmt: skip
    chain = np.arange(80)

    def runs() -> list[tuple[int, int]]:
        kv.check_invariants()
        return sorted((run.start, run.length) for run in kv.index.runs())

    finish(kv, "first", chain)
    other = np.array([*chain[:40], *range(500, 540)])
    finish(kv, "branch", other)
    assert runs() == [(0, 5), (5, 5), (5, 5)]
    branch, _ = kv.index.find(kv.match(other).prompt.keys, 10)
    for point in list(branch.points.values()):
        kv.index.drop_point(point)
    kv.evict(5)  # what serves no hit goes first
    assert runs() == [(0, 10)]
    match = kv.match([*chain[:40], 1])
    assert kv.pin(match, now=0, ttl=1) == 40
    finish(kv, "again", np.array([*chain, 1]))
    assert runs() == [(0, 5), (5, 5)]
    assert kv.unpin(match) and runs() == [(0, 10)]


def test_a_pin_at_release_outlives_the_merging_of_its_run():
    kv = KVCache(groups((8, None), (8, 9)), num_pages=400, max_requests=2, max_model_len=400)
    chain = np.arange(80)
    finish(kv, "first", chain)
    kv.admit("a", kv.match([*chain[:72], 1]))
    kv.pin_request("a", now=0, ttl=1)
    kv.release("a")
    kv.check_invariants()
    assert kv.stats()["pins"] == 1
    (pinned,) = kv.index.pins
    assert pinned.depth * 8 == kv.match([*chain[:72], 1]).num_tokens == 72
    kv.clear()
    kv.check_invariants()
    assert kv.num_free_pages == kv.num_pages - 1


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_tokens_of_several_requests_make_the_keys_that_each_alone_makes(lookahead):
    rng, n, a = np.random.default_rng(0), 5, 8
    together, alone = Sequences(n, a, lookahead), Sequences(n, a, lookahead)
    for i in range(n):
        prompt = Prompt(rng.integers(0, 9, 3 + 4 * i), a, lookahead, b"seed", b"")
        assert together.add(i, prompt, 0, 0) == alone.add(i, prompt, 0, 0)
    slots = np.array([together.slot_of(i) for i in range(n)])
    start = np.zeros(n, dtype=np.int64)
    for _ in range(60):
        counts = rng.integers(1, 3 * a if rng.random() < 0.1 else 5, n)
        tokens = rng.integers(0, 9, int(counts.sum()) + n).astype(np.int32)
        first = (np.cumsum(counts + 1) - counts - 1).astype(np.int32)  # one rejected token each
        together.feed(slots, start, start + counts, tokens, first)
        for i in range(n):
            part = tokens[first[i] : first[i] + counts[i]]
            alone.feed_one(int(slots[i]), int(start[i]), part)
        start += counts
        for slot in slots.tolist():
            known = alone.num_keys(slot)
            assert together.num_keys(slot) == known
            assert together.keys(slot, 0, known) == alone.keys(slot, 0, known)
    assert known > 10
