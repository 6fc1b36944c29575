"""Pins: kept after everything else, never in the way of an admission, never leaked."""

import numpy as np
import pytest

from quire.kvcore import OutOfPages, StepPlan
from tests.kvcore.engine import Engine, groups

MIXES = {"gemma": ((32, None), (16, 64), (16, 64)), "window": ((16, 64),)}


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


def engine(mix: str, **options) -> Engine:
    base = {"num_pages": 40 if mix == "window" else 80, "max_requests": 4, "max_model_len": 4096}
    return Engine(groups(*MIXES[mix]), **(base | options))


def flood(e: Engine, first: int, n: int = 20) -> None:
    for seed in range(first, first + n):
        e.run(("flood", seed), tokens(200, seed))
        e.check()


@pytest.mark.parametrize("mix", MIXES)
def test_a_pinned_prefix_outlives_a_flood_that_evicts_the_rest(mix):
    e = engine(mix)
    kept, lost = tokens(200), tokens(200, 1)
    e.run("kept", kept)
    e.run("lost", lost)
    hit = e.kv.match(kept).num_tokens
    assert e.kv.pin(e.kv.match(kept), now=0.0, ttl=60.0) == hit == 192
    e.check()
    flood(e, 10)
    assert e.kv.match(kept).num_tokens == hit
    assert e.kv.match(lost).num_tokens == 0
    # Hit and released, it is still pinned.
    e.run("user", [*kept[:193], 1, 2, 3])
    flood(e, 40)
    assert e.kv.match(kept).num_tokens == hit
    assert e.kv.stats()["demoted_pins"] == 0


@pytest.mark.parametrize("mix", MIXES)
def test_pins_end_by_time_by_hand_and_by_renewal(mix):
    e = engine(mix)
    prompt = tokens(200)
    e.run("a", prompt)
    match = e.kv.match(prompt)
    e.kv.pin(match, now=100.0, ttl=10.0)
    assert e.kv.expire_pins(now=109.9) == 0
    e.kv.pin(match, now=109.0, ttl=10.0)
    assert e.kv.stats()["pins"] == 1, "the same prefix, renewed"
    assert e.kv.expire_pins(now=110.0) == 0
    assert e.kv.expire_pins(now=119.0) == 1
    e.check()
    e.kv.pin(match, now=0.0, ttl=1.0)
    assert e.kv.unpin(match) and not e.kv.unpin(match)
    assert e.kv.stats()["pinned_pages"] == 0


@pytest.mark.parametrize("mix", MIXES)
def test_pins_give_way_oldest_first_before_an_admission_is_refused(mix):
    e = engine(mix, num_pages=120)
    prompts = [tokens(200, seed) for seed in range(3)]
    for i, prompt in enumerate(prompts):
        e.run(i, prompt)
        e.kv.pin(e.kv.match(prompt), now=float(i), ttl=1e9)
    e.admit("big", tokens(4000, 9))
    alive = []
    while isinstance(plan := e.step({"big": 64}), StepPlan) and e.computed("big") < 3900:
        e.check()
        alive.append([e.kv.match(p).num_tokens > 0 for p in prompts])
    for states in alive:
        assert states == sorted(states), "the oldest pin goes first"
    if mix != "window":  # a window group's pages do not grow with the sequence
        assert alive[0] == [True] * 3 and alive[-1][:2] == [False] * 2
        assert isinstance(plan, OutOfPages) and plan.needed > plan.free + plan.evictable
        assert e.kv.stats()["demoted_pins"] == 3
    e.check()


def test_the_budget_demotes_the_oldest_pins():
    e = engine("gemma", num_pages=500, max_pinned_pages=40)
    prompts = [tokens(200, seed) for seed in range(4)]
    for i, prompt in enumerate(prompts):
        e.run(i, prompt)
        # 6 segments and 8 window pages each: two fit the budget of 40
        assert e.kv.pin(e.kv.match(prompt), now=float(i), ttl=1e9) == 192
        assert e.kv.stats()["pinned_pages"] == 14 * min(2, i + 1)
        e.check()
    for pages, pinned in ((13, 0), (14, 192)):
        small = engine("gemma", num_pages=500, max_pinned_pages=pages)
        small.run("a", prompts[0])
        assert small.kv.pin(small.kv.match(prompts[0]), now=0.0, ttl=1.0) == pinned
        assert small.kv.stats()["pins"] == (pinned > 0)
        small.check()
