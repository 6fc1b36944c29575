"""`KVCache(debug=True)` names a second thread, tokens that are not the prompt's, and writes to page 0."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from quire.kvcore import LRU, EventLog, GroupSpec, KVCache
from tests.support.kvcore.engine import groups

SPECS = ((4, None), (4, 10), GroupSpec("state", "state", 4, 4096))


def cache(**options) -> KVCache:
    base = {"num_pages": 60, "max_requests": 3, "max_model_len": 100, "debug": True}
    return KVCache(groups(*SPECS), **(base | options))


FREE = {"table", "slot_of", "stats", "describe"}
CALLS = sorted(n for n, f in vars(KVCache).items() if n[0] != "_" and callable(f) and n not in FREE)


def elsewhere(call) -> list[Exception]:
    """What `call` raises in a thread named worker."""
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


def calls(kv: KVCache, match) -> dict:
    return {
        "match": lambda: kv.match([1]), "admit": lambda: kv.admit("b", match), "cut": lambda: kv.cut([0], [1]), "plan": lambda: kv.plan([0], [1]), "room": lambda: kv.room(0),
        "reserve": lambda: kv.reserve(0, 1), "arrays": lambda: kv.arrays(0, 0, 1), "advance": lambda: kv.advance(0, 1), "publish": lambda: kv.publish(0, 0),
        "num_published": lambda: kv.num_published(0), "pages_of": lambda: kv.pages_of(0),
        "commit": lambda: kv.commit(None, []), "rollback": lambda: kv.rollback(0, 1), "lowest_rollback": lambda: kv.lowest_rollback(0),
        "release": lambda: kv.release("a"), "pin": lambda: kv.pin(match, now=0, ttl=1), "pin_request": lambda: kv.pin_request("a", now=0, ttl=1),
        "unpin": lambda: kv.unpin(match), "expire_pins": lambda: kv.expire_pins(0), "clear": kv.clear, "announce": kv.announce,
        "needed": lambda: kv.needed([0], [1]), "evict_pages": lambda: kv.evict_pages([1]), "reset": kv.reset, "evict": lambda: kv.evict(1), "take_deltas": kv.take_deltas, "check_invariants": kv.check_invariants,
    }  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_during_a_call_is_named(name):
    policy = Asks()
    kv = cache(policy=policy)
    match = kv.match([1] * 9)
    raised = []
    policy.then = lambda: raised.extend(elsewhere(calls(kv, match)[name]))
    kv.admit("a", match)
    (error,) = raised
    assert isinstance(error, RuntimeError)
    main = threading.current_thread().name
    text = f"{name}: expected one thread at a time, got thread 'worker' while thread {main!r} is in admit"
    assert str(error) == text
    kv.check_invariants()


def test_threads_one_after_another_and_calls_inside_of_calls_are_none_of_its_business():
    policy = Asks()
    kv = cache(policy=policy)
    match = kv.match([1] * 9)
    policy.then = lambda: (kv.match([1] * 9), kv.stats())
    assert elsewhere(lambda: kv.admit("a", match)) == []
    assert elsewhere(lambda: kv.commit(kv.plan([0], [9]), [1] * 9)) == []
    kv.release("a")
    kv.check_invariants()


def test_numbers_may_be_read_from_another_thread():
    policy = Asks()
    kv, raised = cache(policy=policy), []
    policy.then = lambda: raised.extend(
        elsewhere(lambda: (kv.stats(), kv.describe(), kv.num_free_pages, kv.num_evictable_pages, kv.num_free_slots))
    )  # fmt: skip
    kv.admit("a", kv.match([1] * 9))
    assert raised == []


def test_a_call_that_raises_lets_the_next_thread_in():
    kv = cache()
    with pytest.raises(ValueError, match="request_id: expected an admitted request"):
        kv.release("nobody")
    assert elsewhere(lambda: kv.match([1])) == []


def test_tokens_that_are_not_the_prompts_are_named():
    kv = cache(max_draft_tokens=2)
    for rid, first in (("a", 0), ("b", 50)):
        kv.admit(rid, kv.match(np.arange(first, first + 11)))
    plan = kv.plan([1, 0], [8, 4])
    ids = [*range(50, 58), *range(4)]
    for at, text in ((10, "2 at position 2 of slot 0"), (7, "57 at position 7 of slot 1")):
        wrong = [77 if i == at else t for i, t in enumerate(ids)]
        with pytest.raises(
            ValueError, match=f"input_ids: expected {text}, as in its prompt, got 77"
        ):
            kv.commit(plan, wrong)
        kv.check_invariants()
    kv.commit(plan, ids)
    # Past the prompt any token will do.
    kv.commit(kv.plan([0, 1], [9, 3]), [*range(4, 11), 9, 9, 58, 59, 60], [8, 3])
    kv.release("a")  # and its slot's next request has a prompt of its own
    assert kv.admit("c", kv.match([3, 4])) == 0
    with pytest.raises(ValueError, match="input_ids: expected 4 at position 1 of slot 0"):
        kv.commit(kv.plan([0], [2]), [3, 3])
    kv.reserve(0, 2)
    kv.advance(0, 2)
    with pytest.raises(ValueError, match="tokens: expected 4 at position 1 of slot 0"):
        kv.publish(0, 2, [3, 3])
    kv.publish(0, 2, [3, 4])
    kv.check_invariants()


def test_a_prompt_without_tokens_is_refused():
    kv, plain = cache(), cache(debug=False)
    with pytest.raises(ValueError, match="a prompt made by a cache with events or debug"):
        kv.match(plain.match([1] * 9).prompt)
    assert kv.match(cache(debug=False, events=EventLog()).match([1] * 9).prompt).num_tokens == 0
    assert plain.match(kv.match([1] * 9).prompt).num_tokens == 0


@pytest.mark.parametrize("what", ["slot_mapping", "state_pages", "copies"])
def test_a_plan_that_writes_page_0_is_named(what, monkeypatch):
    kv = cache()
    slot = kv.admit("a", kv.match([1] * 9))
    fill = kv._planner.mapping

    def broken(step, *args):
        mapping = fill(step, *args)
        if what == "slot_mapping":
            mapping[0, 3] = 3
        else:
            getattr(step, what)[:, -1] = 0
        return mapping

    monkeypatch.setattr(kv._planner, "mapping", broken)
    with pytest.raises(AssertionError, match=re.compile("page 0")):
        kv.plan([slot], [9])


def test_without_debug_the_methods_are_the_class_s():
    kv = cache(debug=False)
    assert not set(CALLS) & set(vars(kv))
    with pytest.raises(ValueError, match="debug: expected True or False, got 1"):
        cache(debug=1)
