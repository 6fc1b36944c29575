"""`KVCache(debug=True)` names second threads, tokens not of the prompt, and writes to page 0."""

import threading

import numpy as np
import pytest

from quire.kvcore import LRU, GroupSpec, KVCache
from tests.kvcore.engine import groups

SPECS = ((4, None), (4, 10), GroupSpec("state", "state", 4, 4096))
FREE = {"table", "slot_of", "stats", "describe"}
CALLS = sorted(n for n, f in vars(KVCache).items() if n[0] != "_" and callable(f) and n not in FREE)


def cache(**options) -> KVCache:
    base = {"num_pages": 60, "max_requests": 3, "max_model_len": 100, "debug": True}
    return KVCache(groups(*SPECS), **(base | options))


def elsewhere(call) -> list[Exception]:
    """Exceptions of `call` in a thread named worker."""
    raised = []

    def run():
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    thread.join()
    return raised


class Asks(LRU):
    """Calls `then` in the middle of an admission."""

    def then(self): ...

    def asked(self, keys, hit, kept=()):
        self.then()


def test_a_second_thread_during_a_call_is_named():
    for name in CALLS:
        policy, raised = Asks(), []
        kv = cache(policy=policy)
        policy.then = lambda: raised.extend(elsewhere(getattr(kv, name)))  # noqa: B023
        kv.admit("a", kv.match([1] * 9))
        (error,) = raised
        main = threading.current_thread().name
        text = f"{name}: expected one thread at a time, got thread 'worker' while thread {main!r} is in admit"
        assert isinstance(error, RuntimeError) and str(error) == text
        kv.check_invariants()
    assert not set(CALLS) & set(vars(cache(debug=False))), "without debug, the methods of the class"


def test_threads_that_take_turns_nested_calls_and_reads_are_allowed():
    policy, raised = Asks(), []
    kv = cache(policy=policy)
    match = kv.match([1] * 9)

    def reads():
        kv.stats(), kv.describe()
        return kv.num_free_pages, kv.num_evictable_pages, kv.num_free_slots

    def then():
        kv.match([1] * 9)
        raised.extend(elsewhere(reads))

    policy.then = then
    assert elsewhere(lambda: kv.admit("a", match)) == raised == []
    assert elsewhere(lambda: kv.commit(kv.plan([0], [9]), [1] * 9)) == []
    with pytest.raises(ValueError, match="request_id: expected an admitted request"):
        kv.release("unknown")
    assert elsewhere(lambda: kv.release("a")) == []


def test_tokens_that_are_not_the_prompts_are_named():
    kv = cache(max_draft_tokens=2)
    for rid, first in (("a", 0), ("b", 50)):
        kv.admit(rid, kv.match(np.arange(first, first + 11)))
    plan = kv.plan([1, 0], [8, 4])
    ids = [*range(50, 58), *range(4)]
    for at, text in ((10, "2 at position 2 of slot 0"), (7, "57 at position 7 of slot 1")):
        wrong = [77 if i >= at else t for i, t in enumerate(ids)]
        error = f"input_ids: expected {text}, as in its prompt, got 77"
        with pytest.raises(ValueError, match=error):
            kv.commit(plan, wrong)
    kv.commit(plan, ids)
    # Past the prompt any token will do.
    kv.commit(kv.plan([0, 1], [9, 3]), [*range(4, 11), 9, 9, 58, 59, 60], [8, 3])
    kv.release("a")  # its slot's next request has a prompt of its own
    assert kv.admit("c", kv.match([3, 4])) == 0
    with pytest.raises(ValueError, match="input_ids: expected 4 at position 1 of slot 0"):
        kv.commit(kv.plan([0], [2]), [3, 3])
    kv.reserve(0, 2)
    kv.advance(0, 2)
    with pytest.raises(ValueError, match="tokens: expected 4 at position 1 of slot 0"):
        kv.publish(0, 2, [3, 3])
    kv.publish(0, 2, [3, 4])


@pytest.mark.parametrize("name", ["slot_mapping", "state_pages", "copies"])
def test_a_plan_that_writes_page_0_is_named(name, monkeypatch):
    kv = cache()
    slot = kv.admit("a", kv.match([1] * 9))
    arrays = kv._planner.arrays

    def broken(*args):
        plan = arrays(*args)
        if name == "slot_mapping":
            plan.slot_mapping[0, 3] = 3
        else:
            getattr(plan, name)[:, -1] = 0
        return plan

    monkeypatch.setattr(kv._planner, "arrays", broken)
    with pytest.raises(AssertionError, match="page 0"):
        kv.plan([slot], [9])


def test_a_page_that_nobody_holds_is_found():
    kv = cache()
    kv.pool.pop(1)
    with pytest.raises(AssertionError):
        kv.check_invariants()
