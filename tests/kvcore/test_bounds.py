"""Each number that a caller can give is refused, with its name, before anything changes, or means what it says."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from quire.kvcore import Adaptive, EventLog, GroupSpec, KVCache, linear_table
from tests.support.kvcore.engine import Engine, groups

NAN, INF = math.nan, math.inf
OPTIONS = {"num_pages": 60, "max_requests": 2, "max_model_len": 100}
SPEC = {"name": "g", "kind": "window", "block_size": 4, "page_bytes": 1, "sliding_window": 9}
NO_INTS = [True, 1.0, NAN, "1", None, -(10**30), 10**30]


def cache(*specs, **options) -> KVCache:
    return KVCache(groups(*specs or ((4, None), (4, 10))), **(OPTIONS | options))


def running(**options) -> tuple[KVCache, int]:
    kv = cache(**options)
    return kv, kv.admit("a", kv.match([1] * 9))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("num_pages", [*NO_INTS, 0, 1, 2**31]), ("max_requests", [*NO_INTS, 0, 2**31]), ("max_model_len", [*NO_INTS, 0, 2**31]),
        ("max_draft_tokens", [*NO_INTS, -1, 101]), ("replay_tokens", [*NO_INTS[:4], -(10**30), 10**30, 0]),
        ("max_pinned_pages", [*NO_INTS[:4], -(10**30), 10**30, -1]), ("hash_seed", ["x", 1, None]),
        ("enable_caching", [1, None, "no"]), ("track_deltas", [0, None]), ("retention", [True, 1.5, NAN, 0, -4, 3, "x", {}, {"g9": 4}]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_arguments_of_a_cache(name, bad):
    for value in bad:
        with pytest.raises(ValueError, match=f"{name}: expected"):
            cache(**{name: value})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("block_size", [*NO_INTS, 0, 2**31]), ("page_bytes", [*NO_INTS, 0]), ("sliding_window", [*NO_INTS, 0]),
        ("lookahead", [*NO_INTS, -1, 2**31]), ("kind", ["x", None, 1]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_fields_of_a_group(name, bad):
    for value in bad:
        with pytest.raises(ValueError, match=f"{name}: expected"):
            GroupSpec(**(SPEC | {name: value}))


def test_fields_that_no_state_has():
    with pytest.raises(ValueError, match="sliding_window: expected None for a state group, got 9"):
        GroupSpec("s", "state", 16, 4096, sliding_window=9)
    with pytest.raises(NotImplementedError, match="lookahead: supported are dense and window"):
        GroupSpec("s", "state", 4, 64, lookahead=1)


def test_block_sizes_without_a_common_segment_are_refused():
    primes = [65521, 65519, 65497]
    with pytest.raises(
        ValueError, match="block_size: expected a least common multiple <= 2147483647, got"
    ):
        cache(*((p, None) for p in primes))


def test_numpy_ints_are_ints():
    kv = cache(
        (4, None), num_pages=np.int32(60), max_model_len=np.int64(100), retention=np.int64(8)
    )
    assert kv.num_pages == 60 and kv.interval == 8 and kv.match([1]).num_tokens == 0


@pytest.mark.parametrize("window", [100, 101, 2**31, 2**40, 2**62])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_window_past_the_longest_sequence_is_all_of_it(window, drafts):
    """Its tables and tails are as long as those of a window of max_model_len, and it hits the same."""
    options = OPTIONS | {"max_draft_tokens": drafts, "num_pages": 200}
    e, same = (Engine(groups((4, None), (4, w)), **options) for w in (window, 100))
    assert e.kv.layout.num_columns == same.kv.layout.num_columns
    for i, n in enumerate((30, 97, 60, 97)):
        hits = [x.run(i, list(range(n)), [5] * (99 - n), chunk=16).num_tokens for x in (e, same)]
        assert hits[0] == hits[1]
        e.check()
    slot = e.kv.admit("a", e.kv.match(list(range(97))))
    assert (linear_table(e.kv, 1, [slot]) > 0).all()
    assert e.kv.num_computed[slot] == hits[0] > 0


def test_a_window_past_all_numbers_shows_in_no_error():
    assert "window 4611686018427387904" in cache((4, None), (4, 2**62)).describe()


@pytest.mark.parametrize("interval", [4 * 10**30, 2**62, 2**40, 100])
def test_an_interval_past_the_longest_sequence_keeps_what_latest_keeps(interval):
    e = Engine(groups((4, None), (4, 10)), **OPTIONS, retention=interval)
    e.run("a", list(range(90)), chunk=16)
    latest = Engine(groups((4, None), (4, 10)), **OPTIONS, retention="latest")
    latest.run("a", list(range(90)), chunk=16)
    assert e.kv.index.num_points == latest.kv.index.num_points > 0
    cache(retention={"g0": 4 * 10**20, "g1": 12 * 10**20})


@pytest.mark.parametrize(
    ("slots", "counts", "name"),
    [
        ([0.0], [1], "slots"), ([NAN], [1], "slots"), ([True], [1], "slots"), (["0"], [1], "slots"), ([None], [1], "slots"),
        ([-1], [1], "slots"), ([2], [1], "slots"), ([2**62], [1], "slots"), ([2**64 - 1], [1], "slots"), ([10**30], [1], "slots"),
        ([[0]], [1], "slots"), ([[0], [0, 1]], [1], "slots"), (0, 1, "slots"), ([], [], "slots"), ([0, 0], [1, 1], "slots"), ([1], [1], "slots"),
        ([0], [0], "num_new_tokens"), ([0], [-1], "num_new_tokens"), ([0], [-(2**63)], "num_new_tokens"), ([0], [2**63 - 1], "num_new_tokens"),
        ([0], [2**64 - 1], "num_new_tokens"), ([0], [10**30], "num_new_tokens"), ([0], [1.0], "num_new_tokens"), ([0], [True], "num_new_tokens"),
        ([0], [101], "num_new_tokens"), ([0], [2**31], "num_new_tokens"), ([0], [1, 1], "slots, num_new_tokens"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["plan", "cut", "needed"])
def test_arguments_of_a_step(call, slots, counts, name):
    kv, _ = running()
    if (call, name) == ("cut", "num_new_tokens") and counts in ([101], [2**31 - 1]):
        return  # what does not fit is the plan's to refuse
    with pytest.raises(ValueError, match=f"{name}.*: "):
        getattr(kv, call)(slots, counts)
    kv.check_invariants()
    assert kv.num_computed.tolist() == [0, 0]


@pytest.mark.parametrize(
    "accepted",
    [[0], [10], [-1], [2**63 - 1], [-(2**63)], [2**64 - 1], [10**30], [1.0], [NAN], [True], [], [9, 9], 9, [[9]], ["9"]],
)  # fmt: skip
def test_arguments_of_a_commit(accepted):
    kv, slot = running(max_draft_tokens=3)
    plan = kv.plan([slot], [9])
    with pytest.raises(ValueError, match="accepted: expected"):
        kv.commit(plan, [1] * 9, accepted)
    for ids in (
        [1] * 8,
        [1.0] * 9,
        [-1] * 9,
        [2**31] * 9,
        [[1] * 9],
        [True] * 9,
        ["1"] * 9,
        [10**30] * 9,
    ):
        with pytest.raises(ValueError, match="input_ids: expected"):
            kv.commit(plan, ids)
    for other in (None, 1, "plan", kv):
        with pytest.raises(ValueError, match="plan: expected a StepPlan"):
            kv.commit(other, [1] * 9)
    kv.commit(plan, [1] * 9, [9])
    assert kv.num_computed[slot] == 9


def test_arguments_of_other_calls():
    kv, slot = running(max_draft_tokens=3)
    kv.commit(kv.plan([slot], [9]), [1] * 9)
    for bad in [*NO_INTS, 0, 4]:
        with pytest.raises(ValueError, match="num_tokens: expected"):
            kv.rollback(slot, bad)
    for bad in [*NO_INTS, -1, 2, 1]:
        with pytest.raises(ValueError, match="slot: expected"):
            kv.rollback(bad, 1)
        with pytest.raises(ValueError, match="slot: expected"):
            kv.lowest_rollback(bad)
    for bad in [*NO_INTS, -1]:
        with pytest.raises(ValueError, match="num_pages: expected"):
            kv.evict(bad)
    for bad in [-1, 9, None, 0.0, "0", 10**30]:
        with pytest.raises(ValueError, match="group: expected"):
            kv.table(bad)
        with pytest.raises(ValueError, match="group: expected"):
            linear_table(kv, bad, [slot])
    kv.check_invariants()
    assert kv.evict(2**62) == 0


@pytest.mark.parametrize(
    "now", [NAN, INF, -INF, "1", None, True, 10**400, np.float32("nan"), [1.0]]
)
def test_a_time_that_is_none_is_refused(now):
    kv, slot = running()
    kv.commit(kv.plan([slot], [9]), [1] * 9)
    match = kv.match([1] * 30)
    assert kv.pin(match, now=0.0, ttl=5.0) == 8
    calls = (
        lambda: kv.pin(match, now=now, ttl=1.0), lambda: kv.pin_request("a", now=now, ttl=1.0), lambda: kv.expire_pins(now),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(
            ValueError,
            match=f"now: expected a finite number of seconds, got {re.escape(repr(now))}",
        ):
            call()
    assert kv.expire_pins(np.float64(4.9)) == 0 and kv.expire_pins(5) == 1
    kv.check_invariants()


@pytest.mark.parametrize("ttl", [NAN, -INF, 0, -1.0, "1", None, True, 10**400])
def test_a_time_to_live_that_is_none_is_refused(ttl):
    kv, slot = running()
    kv.commit(kv.plan([slot], [9]), [1] * 9)
    for call in (
        lambda: kv.pin(kv.match([1] * 30), now=0.0, ttl=ttl),
        lambda: kv.pin_request("a", now=0.0, ttl=ttl),
    ):
        with pytest.raises(ValueError, match="ttl: expected"):
            call()
    assert kv.stats()["pins"] == 0 and not kv.index.pins.at_release


def test_a_pin_for_ever():
    kv, slot = running()
    kv.commit(kv.plan([slot], [9]), [1] * 9)
    assert kv.pin(kv.match([1] * 30), now=0, ttl=INF) == 8
    assert kv.expire_pins(1e300) == 0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Adaptive(patience=NAN), "patience"), (lambda: Adaptive(patience=INF), "patience"), (lambda: Adaptive(memory=INF), "memory"), (lambda: Adaptive(patience=-1), "patience"),
        (lambda: EventLog(0), "capacity"), (lambda: EventLog(max_bytes=0), "max_bytes"), (lambda: EventLog().take(0), "most"), (lambda: EventLog(10**30), "capacity"), (lambda: EventLog(NAN), "capacity"),
    ],
)  # fmt: skip
def test_arguments_of_policies_and_logs(make, name):
    with pytest.raises(ValueError, match=f"{name}.*: expected"):
        make()
