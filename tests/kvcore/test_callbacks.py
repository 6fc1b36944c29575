"""Code that a cache calls and did not write (policies, event logs, ids) may raise anywhere: nothing is left half-done."""

from __future__ import annotations

import random

import pytest

from quire.kvcore import (
    LRU,
    Adaptive,
    EventLog,
    GroupSpec,
    KVCache,
    Ranked,
    StepPlan,
)
from tests.kvcore.test_faults import CASES, Fault, free_and_cached, picture
from tests.support.kvcore.engine import Engine, groups

BASE = {"num_pages": 50, "max_requests": 3, "max_model_len": 300}
DENSE = GroupSpec("dense", "dense", 4, 1)


class Failing:
    """A policy that passes all on to `policy`, and raises before or after that in `methods`, as often as `share` says."""

    def __init__(self, policy, methods, share: float = 1.0, seed: int = 0) -> None:
        self.policy, self.methods, self.share, self.armed = policy, methods, share, True
        self._dice = random.Random(seed)
        for name in ("rank", "evicted"):  # which the policy calls itself
            if name in methods:
                setattr(policy, name, self._wrapped(name, getattr(policy, name)))
        for name in ("add", "discard", "pop", "asked"):
            setattr(self, name, self._wrapped(name, getattr(policy, name)))

    def _wrapped(self, name: str, call):
        def method(*args):
            fails = self.armed and name in self.methods and self._dice.random() < self.share
            if fails and self._dice.random() < 0.5:
                raise Fault(name)
            result = call(*args)
            if fails and name != "pop":  # no cache can know of what was taken out
                raise Fault(name)
            return result

        return method


@pytest.mark.parametrize("specs", CASES.values(), ids=CASES)
def test_a_policy_that_fails_when_asked_leaves_no_request(specs):
    policy = Failing(LRU(), ["asked"])
    e = Engine(groups(*specs), policy=policy, **BASE)
    policy.armed = False
    e.run("old", [1] * 50, chunk=8)
    match = e.kv.match([1] * 60)
    assert match.num_tokens > 0
    policy.armed = True
    before = picture(e), free_and_cached(e), e.kv.index.tick
    with pytest.raises(Fault):
        e.kv.admit("a", match)
    assert (picture(e), free_and_cached(e), e.kv.index.tick) == before
    assert e.kv.num_free_slots == 3 and "a" not in e.kv.sequences
    e.check()
    policy.armed = False
    assert e.run("a", [1] * 60).num_tokens == match.num_tokens
    e.check()


@pytest.mark.parametrize("budget", [16])
@pytest.mark.parametrize("specs", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("base", "methods"),
    [
        (LRU, ["rank"]), (LRU, ["add", "discard"]), (LRU, ["evicted"]), (LRU, ["pop"]), (LRU, ["rank", "evicted"]),
        (Adaptive, ["add", "discard", "asked"]), (LRU, ["asked", "rank", "discard", "evicted", "pop"]),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "-".join(x),
)  # fmt: skip
@pytest.mark.parametrize("seed", [0])
def test_traffic_goes_on_under_a_policy_that_fails_now_and_then(specs, base, methods, seed, budget):
    """Whatever fails is raised by an admission or an eviction, or by nobody; every page is accounted for, every row is right."""
    policy = Failing(base(), methods, 0.4, seed)
    e = Engine(groups(*specs), policy=policy, max_draft_tokens=2, **BASE)
    dice, raised = random.Random(seed), 0

    def attempt(call, *args):
        nonlocal raised
        for _ in range(200):
            try:
                return call(*args)
            except Fault:
                raised += 1
                e.kv.check_invariants()
        raise AssertionError("it never came through")

    for i in range(budget):
        prompt = [dice.randrange(4)] * dice.randrange(60) + [dice.randrange(9)]
        attempt(e.admit, i, prompt)
        while e.computed(i) < len(prompt):
            step = {i: min(8, len(prompt) - e.computed(i))}
            assert isinstance(attempt(e.step, step), StepPlan)
        for token in range(dice.randrange(12)):
            e.tokens[i].append(token)
            assert isinstance(attempt(e.step, {i: 1}), StepPlan)
        if len(e.slots) == 2:
            e.release(dice.choice(list(e.slots)))  # never raises
        e.check()
    for rid in list(e.slots):
        e.release(rid)
    attempt(e.kv.evict, 20)
    e.check()
    assert raised > 0 and e.kv.stats()["evicted_segments"] > budget // 4
    e.kv.clear()
    e.check()
    assert e.kv.num_free_pages == e.kv.num_pages - 1


class Stubborn(LRU):
    """Returns from `pop` what `answer` says."""

    answer = None

    def pop(self):
        return self.answer(self)


@pytest.mark.parametrize("specs", CASES.values(), ids=CASES)
@pytest.mark.parametrize("case", ["nothing", "an-evicted-entry", "a-used-entry", "anything"])
def test_a_policy_that_chooses_what_it_may_not_is_named(specs, case):
    policy = Stubborn()
    e = Engine(groups(*specs), policy=policy, **BASE)
    e.run("old", [1] * 50, chunk=8)
    if case == "an-evicted-entry":
        gone = []
        policy.answer = lambda p: gone.append(LRU.pop(p)) or gone[-1]
        e.kv.evict(e.kv.num_evictable_pages)
        e.run("new", [2] * 50, chunk=8)
        policy.answer = lambda p: gone[0]
    elif case == "a-used-entry":
        e.admit("a", [1] * 60)
        used = e.kv._chains.runs[e.slots["a"]]
        policy.answer = lambda p: used
    else:
        policy.answer = lambda p: None if case == "nothing" else "x"
    e.check()
    e.run("other", [3] * 40, chunk=8)
    with pytest.raises(RuntimeError, match="policy: expected pop to return an entry that was"):
        e.kv.evict(e.kv.num_evictable_pages)
    e.check()
    policy.answer = LRU.pop
    e.kv.evict(e.kv.num_evictable_pages)
    e.check()


class Log(EventLog):
    """Raises for every third event, half of these after it took them."""

    count = 0

    def append(self, event):
        self.count += 1
        if self.count % 6 == 0:
            super().append(event)
        if self.count % 3 == 0:
            raise OSError("no reader")
        super().append(event)


@pytest.mark.parametrize("specs", CASES.values(), ids=CASES)
def test_a_log_that_fails_loses_events_and_nothing_else(specs):
    log = Log()
    e = Engine(groups(*specs), events=log, **BASE)
    for i in range(12):
        e.run(i, [i % 5] * 50, [7] * 9, chunk=8)
        e.check()
    e.kv.announce()
    assert 0 < log.num_dropped <= log.count // 3
    assert log.next_number == log.num_dropped + len(log)
    first, events = log.take()
    assert first == log.num_dropped > 0, "a reader sees the gap"
    assert len(events) == log.next_number - first
    e.kv.clear()
    e.check()


@pytest.mark.parametrize("policy", [LRU, Adaptive])
def test_one_policy_serves_one_cache(policy):
    one = policy()
    KVCache([DENSE], num_pages=9, max_requests=1, max_model_len=40, policy=one)
    with pytest.raises(ValueError, match="policy: expected one that no cache was made with, got <"):
        KVCache([DENSE], num_pages=9, max_requests=1, max_model_len=40, policy=one)


def test_one_log_serves_one_cache():
    log = EventLog()
    KVCache([DENSE], num_pages=9, max_requests=1, max_model_len=40, events=log)
    with pytest.raises(ValueError, match="events: expected one that no cache was made with, got <"):
        KVCache([DENSE], num_pages=9, max_requests=1, max_model_len=40, events=log)


def test_a_constructor_that_fails_takes_no_policy_and_no_log():
    policy, log = LRU(), EventLog()
    options = {
        "num_pages": 9,
        "max_requests": 1,
        "max_model_len": 40,
        "policy": policy,
        "events": log,
    }
    for bad in ({"retention": "x"}, {"hash_seed": "x"}, {"replay_tokens": 0}, {"num_pages": 1}):
        with pytest.raises(ValueError, match="expected"):
            KVCache([DENSE], **(options | bad))
    assert KVCache([DENSE], **options).num_pages == 9


def test_a_policy_that_cannot_be_marked_is_refused():
    class Slots:
        __slots__ = ()

        def add(self, entry): ...
        def discard(self, entry): ...
        def pop(self): ...
        def asked(self, keys, hit, kept=()): ...

    with pytest.raises(ValueError, match="policy: expected a class without __slots__"):
        KVCache([DENSE], num_pages=9, max_requests=1, max_model_len=40, policy=Slots())


@pytest.mark.parametrize("call", ["admit", "release", "slot_of", "pin_request"])
def test_an_id_that_is_not_hashable_is_named(call):
    e = Engine([DENSE], **BASE)
    arguments = {"admit": (e.kv.match([1]),)}.get(call, ())
    times = {"now": 0.0, "ttl": 1.0} if call == "pin_request" else {}
    with pytest.raises(ValueError, match=r"request_id: expected a hashable id, got \[1\]"):
        getattr(e.kv, call)([1], *arguments, **times)
    assert e.kv.num_free_slots == 3


def test_a_rank_that_is_no_number_is_raised_by_an_eviction():
    class Nan(Ranked):
        def rank(self, entry):
            return float("nan")

    e = Engine([DENSE], policy=Nan(), **BASE)
    e.run("a", [1] * 30)
    with pytest.raises(ValueError, match="rank: expected a number, got nan"):
        e.kv.evict(3)
    e.check()
