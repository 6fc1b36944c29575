"""Only the newest plan of a cache can be committed."""

import pytest

from quire.kvcore import GroupSpec, KVCache, OutOfPages, StepPlan
from tests.kvcore.engine import Engine, groups
from tests.kvcore.expected import digest

SPECS = ((8, None), (4, 10), GroupSpec("state", "state", 4, 4096))


def engine(**options) -> Engine:
    sizes = {"num_pages": 120, "max_requests": 4, "max_model_len": 200, "max_draft_tokens": 2}
    return Engine(groups(*SPECS), debug=False, **(sizes | options))


def refused(e: Engine, plan: StepPlan) -> None:
    """`commit` refuses `plan` and changes nothing."""
    before = digest(e.kv)
    with pytest.raises(ValueError, match="plan: expected the newest plan of this cache"):
        e.kv.commit(plan, [0] * len(plan.positions))
    assert digest(e.kv) == before


def fails(call, *args) -> None:
    with pytest.raises(ValueError, match="expected"):
        call(*args)


CHANGES = {
    "plan": lambda e: e.kv.plan([e.slots["b"]], [1]),
    "commit": lambda e: e.kv.commit(e.kv.plan([e.slots["b"]], [1]), [2]),
    "admit": lambda e: e.kv.admit("new", e.kv.match([9] * 9)),
    "release": lambda e: e.kv.release("b"),
    "rollback": lambda e: e.kv.rollback(e.slots["b"], 1),
    "evict": lambda e: e.kv.evict(1),
    "evict-nothing": lambda e: e.kv.evict(0),
    "clear": lambda e: e.kv.clear(),
    "reserve": lambda e: e.kv.reserve(e.slots["b"], 30),
    "arrays": lambda e: (e.kv.reserve(e.slots["b"], 13), e.kv.arrays(e.slots["b"], e.computed("b"), 13)),
    "advance": lambda e: e.kv.advance(e.slots["b"], e.computed("b")),
}  # fmt: skip
NO_CHANGES = {
    "match": lambda e: e.kv.match([1] * 30),
    "cut": lambda e: e.kv.cut([e.slots["a"]], [9]),
    "describe": lambda e: (e.kv.describe(), e.kv.stats(), e.kv.check_invariants()),
    "out-of-pages": lambda e: e.kv.plan([e.slots["a"]], [180]),
    "bad-plan": lambda e: fails(e.kv.plan, [e.slots["a"]], [0]),
    "bad-release": lambda e: fails(e.kv.release, "unknown"),
    "bad-rollback": lambda e: fails(e.kv.rollback, e.slots["b"], 99),
    "bad-admit": lambda e: fails(e.kv.admit, "a", e.kv.match([1])),
    # Pins change the order of eviction alone.
    "pin": lambda e: e.kv.pin(e.kv.match([1] * 30), now=0.0, ttl=1.0),
    "unpin": lambda e: (e.kv.pin(e.kv.match([1] * 30), now=0.0, ttl=1.0), e.kv.unpin(e.kv.match([1] * 30))),
    "expire": lambda e: (e.kv.pin(e.kv.match([1] * 30), now=0.0, ttl=1.0), e.kv.expire_pins(2.0)),
}  # fmt: skip


def planned(**options) -> tuple[Engine, StepPlan]:
    """An engine with a cached prefix, a decoding request b and a plan for the prompt of a."""
    e = engine(**options)
    e.run("old", [1] * 29, [5])
    e.admit("b", [2] * 9)
    e.finish_prompt("b")
    e.decode("b", [2])
    e.tokens["b"].append(2)
    e.admit("a", [3] * 20)
    plan = e.kv.plan([e.slots["a"]], [20])
    assert isinstance(plan, StepPlan)
    return e, plan


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_call_that_changes_something_voids_a_plan(change):
    e, plan = planned()
    change(e)
    e.slots = {r: s for r, s in e.slots.items() if r in e.kv.sequences}
    refused(e, plan)


@pytest.mark.parametrize("call", NO_CHANGES.values(), ids=NO_CHANGES)
def test_a_call_that_changes_no_page_and_no_request_voids_no_plan(call):
    e, plan = planned(num_pages=30)
    result = call(e)
    with pytest.raises(ValueError, match="input_ids: expected 20 tokens"):
        e.kv.commit(plan, [3])
    assert call is not NO_CHANGES["out-of-pages"] or isinstance(result, OutOfPages)
    e.kv.commit(plan, [3] * 20)
    assert e.computed("a") == 20
    e.kv.check_invariants()


def test_keys_that_are_published_void_a_plan_of_another_request():
    kv = KVCache(groups((4, None)), num_pages=60, max_requests=2, max_model_len=100)
    keyed = kv.admit("keyed", kv.match(keys=b"", num_tokens=9))
    other = kv.admit("other", kv.match([1] * 9))
    kv.reserve(keyed, 8)
    kv.arrays(keyed, 0, 8)
    kv.advance(keyed, 8)
    plan = kv.plan([other], [9])
    kv.publish(keyed, 8, keys=b"k" * 64)
    with pytest.raises(ValueError, match="plan: expected the newest plan of this cache"):
        kv.commit(plan, [1] * 9)
