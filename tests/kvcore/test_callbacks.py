"""Code that a cache calls and did not write (policies, event logs, ids) may raise anywhere: nothing is left half-done."""

from __future__ import annotations

import pytest

from quire.kvcore import (
    LRU,
    Adaptive,
    EventLog,
    GroupSpec,
    KVCache,
    Ranked,
)
from tests.kvcore.test_faults import CASES
from tests.support.kvcore.engine import Engine, groups

BASE = {"num_pages": 50, "max_requests": 3, "max_model_len": 300}
DENSE = GroupSpec("dense", "dense", 4, 1)


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
