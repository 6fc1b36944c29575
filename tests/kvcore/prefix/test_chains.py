"""Chains of segments: work grows no faster than a chain, which is as few runs as possible."""

import math
import os
import sys

import numpy as np
import pytest

import quire.kvcore
from quire.kvcore import LRU, Adaptive, EventLog, KVCache, StepPlan
from tests.kvcore.engine import groups

HOME = os.path.dirname(quire.kvcore.__file__)
BLOCK, FIRST, TIMES = 4, 48, 4
MOST = TIMES * (1 + math.log(TIMES) / math.log(FIRST))  # n log n; n * n would be TIMES * TIMES
ONCE = 3000  # lines that do not depend on the length
SPECS = {"dense": ((4, None),), "hybrid": ((4, None), (4, 5)), "overlapping": ((4, None), (4, 17))}


def lines(call) -> int:
    """Count the lines of kvcore that `call` runs."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def cache(specs, policy, segments: int) -> KVCache:
    return KVCache(
        groups(*specs), num_pages=40 * segments, max_requests=3, max_model_len=8 * BLOCK * segments, retention="dense",
        max_draft_tokens=4, policy=policy(), events=EventLog(),
    )  # fmt: skip


def compute(kv: KVCache, rid: str, prompt: np.ndarray) -> None:
    slot = kv.slot_of(rid)
    rest = prompt[int(kv.num_computed[slot]) :]
    plan = kv.plan([slot], [len(rest)])
    assert isinstance(plan, StepPlan)
    kv.commit(plan, rest)


def whole(kv: KVCache, rid: str, prompt: np.ndarray) -> None:
    kv.admit(rid, kv.match(prompt))
    compute(kv, rid, prompt)
    kv.release(rid)


def life(specs, policy, segments: int, branches: bool) -> dict[str, int]:
    """Count lines by call about a chain of `segments`; `branches` leave it at every third boundary."""
    kv, counts = cache(specs, policy, segments), {}

    def count(name, call, *args, **options):
        counts[name] = lines(lambda: call(*args, **options))

    chain = np.arange(BLOCK * segments + 2, dtype=np.int32)
    prompt = kv.match(chain).prompt
    count("match", kv.match, chain)
    count("admit", kv.admit, "a", kv.match(chain))
    count("compute", compute, kv, "a", chain)
    count("rollback", kv.rollback, 0, 1)
    count("release", kv.release, "a")
    if branches:
        for depth in range(3, segments, 3):
            own = np.full(2 * BLOCK, 10**6 + depth, dtype=np.int32)
            whole(kv, "branch", np.concatenate([chain[: BLOCK * depth], own]))
    count("match a hit", kv.match, prompt)
    count("admit a hit", kv.admit, "b", kv.match(prompt))
    count("release a hit", kv.release, "b")
    count("pin", kv.pin, kv.match(prompt), now=0, ttl=9)
    count("unpin", kv.unpin, kv.match(prompt))
    kv.pin(kv.match(prompt), now=0, ttl=9)
    count("expire", kv.expire_pins, 10)
    count("announce", kv.announce)
    count("take", kv._event_writer.log.take)
    kv.admit("b", kv.match(prompt))
    kv.release("b")
    count("evict", kv.evict, kv.num_evictable_pages)
    assert kv.num_free_pages == kv.num_pages - 1
    whole(kv, "c", chain)
    count("clear", kv.clear)
    assert kv.num_free_pages == kv.num_pages - 1
    return counts


@pytest.mark.parametrize("branches", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("policy", [Adaptive, LRU])
def test_no_call_is_quadratic_in_a_chain(policy, specs, branches):
    short, long = (life(specs, policy, TIMES**k * FIRST, branches) for k in range(2))
    worse = {name: (short[name], n) for name, n in long.items() if n > MOST * short[name] + ONCE}
    assert not worse


def test_a_run_is_two_as_long_as_a_branch_or_a_pin_needs_it():
    kv = KVCache(groups((8, None), (8, 9)), num_pages=400, max_requests=2, max_model_len=400, retention="dense")  # fmt: skip
    chain = np.arange(80)

    def runs() -> list[tuple[int, int]]:
        kv.check_invariants()
        return sorted((run.start, run.length) for run in kv.index.runs())

    whole(kv, "first", chain)
    other = np.array([*chain[:40], *range(500, 540)])
    whole(kv, "branch", other)
    assert runs() == [(0, 5), (5, 5), (5, 5)]
    branch, _ = kv.index.find(kv.match(other).prompt.keys, 10)
    for point in list(branch.points.values()):
        kv.index.drop_point(point)
    kv.evict(5)  # what serves no hit goes first
    assert runs() == [(0, 10)]
    match = kv.match([*chain[:40], 1])
    assert kv.pin(match, now=0, ttl=1) == 40
    whole(kv, "again", np.array([*chain, 1]))
    assert runs() == [(0, 5), (5, 5)]
    assert kv.unpin(match) and runs() == [(0, 10)]
