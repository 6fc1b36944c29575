"""Failures at any point of a plan leave no trace; aborts at any time leak nothing; memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kvcore import LRU, GroupSpec, OutOfPages, StepPlan
from quire.kvcore import cache as manager_module
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


def under_pressure(specs, **options) -> tuple[Engine, dict[str, int]]:
    """An engine with a full cache, a decoding and a prefilling request, and a step for them that must evict."""
    e = engine(specs, **options)
    e.run("old", [1] * 50, chunk=8)
    e.admit("a", [2] * 20)
    e.finish_prompt("a", chunk=8)
    e.tokens["a"].append(3)
    for i in range(9):  # fill the pool with what can be evicted
        e.run(("filler", i), [10 + i] * 33, chunk=8)
    e.admit("b", [4] * 130)
    return e, {"a": 1, "b": 96}


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


def points_of_failure(e: Engine) -> list[tuple[object, str]]:
    """(owner, name) of each function that `plan` calls."""
    kv = e.kv
    return [
        (kv.sequences, "check"), (kv._chains, "boundaries"), (kv._planner, "plan"), (kv.index, "evict"),
        (kv.pool, "peek"), (kv._planner, "give"), (manager_module, "StepPlan"),
    ]  # fmt: skip


CASES = {"dense": DENSE, "hybrid": HYBRID, "state": STATEFUL}


@pytest.mark.parametrize("specs", CASES.values(), ids=CASES)
@pytest.mark.parametrize("after", [True], ids=["after"])
def test_a_failure_in_a_plan_leaves_no_trace(specs, after, monkeypatch):
    """Each function that `plan` calls fails once, before or after it did its work; the next plan is right."""
    names = points_of_failure(under_pressure(specs)[0])
    for i, (_, name) in enumerate(names):
        e, counts = under_pressure(specs)
        owner, _ = points_of_failure(e)[i]
        before, stock = picture(e), free_and_cached(e)
        original = getattr(owner, name)
        calls = []

        def fail(*args, original=original, calls=calls, **kwargs):
            calls.append(1)
            if after:
                original(*args, **kwargs)
            raise Fault

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(Fault):
                e.kv.plan([e.slots[r] for r in counts], list(counts.values()))
        assert calls, name
        assert picture(e) == before, name
        evicted = name in ("peek", "give", "StepPlan") or (name == "evict" and after)
        if not evicted:
            assert free_and_cached(e) == stock, name
        e.check()
        assert isinstance(e.step(counts), StepPlan), name
        e.check()


@pytest.mark.parametrize("specs", CASES.values(), ids=CASES)
def test_a_policy_that_fails_in_the_middle_of_an_eviction_loses_no_page(specs, monkeypatch):
    """The policy fails at its n-th choice, for every n that a plan reaches; what was chosen before is evicted."""
    n = 0
    while True:
        e, counts = under_pressure(specs)
        policy = e.kv.index.policy
        original, calls = policy.pop, []

        def fail(original=original, calls=calls, n=n):
            calls.append(1)
            if len(calls) == n + 1:
                raise Fault
            return original()

        before = picture(e)
        with monkeypatch.context() as patch:
            patch.setattr(policy, "pop", fail)
            try:
                e.kv.plan([e.slots[r] for r in counts], list(counts.values()))
                break  # the n-th choice is never reached
            except Fault:
                n += 1
        assert picture(e) == before
        e.check()
        assert isinstance(e.step(counts), StepPlan)
        e.check()
    assert n > 1


@pytest.mark.parametrize("specs", CASES.values(), ids=CASES)
def test_out_of_pages_changes_nothing(specs):
    e, _ = under_pressure(specs)
    before, stock = picture(e), free_and_cached(e)
    e.tokens["b"] += [7] * 260
    plan = e.kv.plan([e.slots["b"]], [290])
    assert isinstance(plan, OutOfPages) and plan.needed > plan.free + plan.evictable
    assert picture(e) == before and free_and_cached(e) == stock
    e.check()


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    specs=st.sampled_from(list(CASES.values())), seed=st.integers(0, 10_000), abort_at=st.integers(0, 40)
)  # fmt: skip
def test_any_request_can_be_aborted_at_any_step(specs, seed, abort_at):
    rng = np.random.default_rng(seed)
    e = engine(specs, max_draft_tokens=2)
    made = 0
    for step in range(60):
        if len(e.slots) < 3 and rng.random() < 0.5:
            e.admit(made, rng.integers(0, 2, rng.integers(1, 60)).tolist())
            made += 1
        counts = {}
        for r in e.slots:
            if e.computed(r) == len(e.tokens[r]):
                e.tokens[r].append(int(rng.integers(2)))
            left = len(e.tokens[r]) - e.computed(r)
            counts[r] = int(rng.integers(1, left + 1))
        if counts:
            plan = e.kv.plan([e.slots[r] for r in counts], list(counts.values()))
            if step == abort_at and rng.random() < 0.5:
                e.release(next(iter(counts)))  # between a plan and its commit: the plan is void
                if isinstance(plan, StepPlan):
                    with pytest.raises(ValueError, match="plan: expected the newest plan"):
                        e.kv.commit(plan, [0] * len(plan.positions))
            else:
                e.step(counts)
        longest = [r for r in e.slots if e.computed(r) > 80]
        for r in longest or list(e.slots)[: int(step == abort_at)]:
            e.release(r)
        e.check()
    for r in list(e.slots):
        e.release(r)
    e.check()
    assert e.kv.num_free_pages + e.kv.num_evictable_pages == e.kv.num_pages - 1
    e.kv.clear()
    assert e.kv.num_free_pages == e.kv.num_pages - 1


@pytest.mark.parametrize("specs", CASES.values(), ids=CASES)
def test_a_second_release_is_an_error_and_changes_nothing(specs):
    e, _ = under_pressure(specs)
    e.kv.release("b")
    del e.slots["b"]
    before, stock = picture(e), free_and_cached(e)
    for rid in ("b", "never admitted"):
        with pytest.raises(
            ValueError, match=f"request_id: expected an admitted request, got '{rid}'"
        ):
            e.kv.release(rid)
    assert picture(e) == before and free_and_cached(e) == stock
    e.kv.check_invariants()


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
