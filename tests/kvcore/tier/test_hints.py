"""Hints: what callers intend changes where entries are, and nothing that a request reads."""

from __future__ import annotations

import pytest

from quire.kvcore import LRU, StepPlan
from tests.kvcore.tier.test_tiers import DENSE, HYBRID, PROMPT, Setup


@pytest.fixture(params=[HYBRID, DENSE], ids=["hybrid", "dense"])
def stored(request) -> Setup:
    """Two prefixes of 13 segments, on the host alone."""
    s = Setup(request.param, pages=200)
    for i in (1, 2):
        s.serve([i, *PROMPT])
    s.store()
    s.forget()
    return s


def match_of(s: Setup, i: int):
    return s.tiers.match([i, *PROMPT, 1])


def test_a_prefetch_is_there_when_the_request_comes(stored):
    s = stored
    answer = s.tiers.hint(match_of(s, 1), "prefetch")
    assert answer.outcome == "accepted" and answer.num_bytes == answer.job.num_bytes > 0
    again = s.tiers.hint(match_of(s, 1), "prefetch")
    assert again.job is answer.job and again.num_bytes == 0
    s.memory.copy(answer.job)
    s.tiers.done(answer.job)
    assert s.tiers.hint(match_of(s, 1), "prefetch").reason == "it is on the device"
    assert s.serve([1, *PROMPT, 1]).num_tokens == answer.num_tokens == 96
    nothing = s.tiers.hint(s.tiers.match([77, 78, *PROMPT]), "prefetch")
    assert (nothing.outcome, nothing.num_bytes) == ("refused", 0)


def test_a_prefetch_is_clipped_and_refused_by_its_bytes_and_deferred_without_room():
    s = Setup(pages=48, retention=32)
    s.serve(PROMPT)
    s.store()
    s.forget()
    match = s.tiers.match([*PROMPT, 1])
    assert s.tiers.hint(match, "prefetch", max_bytes=100).outcome == "refused"
    answer = s.tiers.hint(match, "prefetch", max_bytes=8 * 4096)
    assert answer.outcome == "clipped" and 0 < answer.num_bytes <= 8 * 4096
    assert answer.num_tokens == 32
    s.tiers.cancel(answer.job)
    s.e.admit("long", list(range(200, 490)))
    for _ in range(8):
        assert isinstance(s.e.step({"long": 32}), StepPlan)
    before = s.e.kv.stats()
    answer = s.tiers.hint(match, "prefetch")
    assert answer.outcome == "deferred" and "out of pages" in answer.reason
    assert before == s.e.kv.stats()


def test_what_is_retained_outlives_what_is_newer(stored):
    s = stored
    host = s.tiers.tiers[0].index
    answer = s.tiers.hint(match_of(s, 1), "retain", now=0.0, ttl=10.0)
    assert answer.outcome == "accepted" and answer.num_tokens == 96 and "host" in answer.reason
    host.evict(1)
    assert match_of(s, 1).num_tokens == 96 and match_of(s, 2).num_tokens < 96
    assert s.e.kv.expire_pins(11.0) == 1
    host.evict(20)  # what is left of the other chain, and then this one
    assert match_of(s, 1).num_tokens < 96
    s.check()


def test_what_is_retained_on_the_device_stays_there(stored):
    s = stored
    for i in (1, 2):
        s.load([i, *PROMPT, 1])
    answer = s.tiers.hint(match_of(s, 1), "retain", now=0.0, ttl=10.0)
    assert answer.outcome == "accepted" and "device" in answer.reason
    s.e.kv.evict(3)
    assert match_of(s, 1).device.num_tokens == 96 > match_of(s, 2).device.num_tokens
    s.tiers.hint(match_of(s, 1), "release")
    assert not s.e.kv.index.pins
    s.check()


def test_what_is_demoted_leaves_first_and_is_not_lost(stored):
    s = stored
    for i in (1, 2):
        s.load([i, *PROMPT, 1])
    s.serve([2, *PROMPT, 1])
    answer = s.tiers.hint(match_of(s, 2), "demote")  # the newest
    assert answer.outcome == "accepted" and answer.num_bytes > 0
    s.store()
    s.e.kv.evict(1)
    assert match_of(s, 1).device.num_tokens == 96 > match_of(s, 2).device.num_tokens
    assert match_of(s, 2).num_tokens >= 96
    assert s.serve([2, *PROMPT, 1]).num_saved_tokens < 96
    s.check()


def test_what_is_demoted_and_not_stored_yet_is_the_first_to_be_stored():
    s = Setup(pages=200, watermark=199)
    for i in (1, 2, 3):
        s.serve([i, *PROMPT])
    s.tiers.hint(match_of(s, 3), "demote")
    (job, *_) = s.tiers.stores(1)
    assert job.parts.keys[:32] == match_of(s, 3).prompt.keys[:32]
    s.tiers.cancel(job)
    s.e.kv.evict(1)
    assert match_of(s, 3).device.num_tokens < 96 == match_of(s, 1).device.num_tokens


def test_a_release_ends_a_demotion(stored):
    s = stored
    for i in (1, 2):
        s.load([i, *PROMPT, 1])
    s.tiers.hint(match_of(s, 2), "demote")
    s.tiers.hint(match_of(s, 2), "release")
    s.e.kv.evict(1)
    assert match_of(s, 2).device.num_tokens == 96 > match_of(s, 1).device.num_tokens


def test_what_runs_is_not_touched(stored):
    s = stored
    s.load([1, *PROMPT, 1])
    s.e.admit("a", [1, *PROMPT, 1, 2])
    answer = s.tiers.hint(match_of(s, 1), "demote")
    assert answer.outcome == "deferred" and "running requests" in answer.reason
    s.e.finish_prompt("a")
    s.check()
    s.tiers.hint(match_of(s, 1), "retain", now=0.0, ttl=1.0)
    assert s.tiers.hint(match_of(s, 1), "demote").outcome in ("deferred", "refused")


def test_a_tenant_keeps_to_its_budget():
    size = (13 + 3) * 4096
    s = Setup(pages=300, retention=32, max_hint_bytes=2 * size)
    for salt in (b"one", b"two"):
        for i in range(3):
            s.serve([i, *PROMPT], salt=salt)

    def retain(i, salt):
        match = s.tiers.match([i, *PROMPT, 1], salt=salt)
        return s.tiers.hint(match, "retain", now=0.0, ttl=5.0)

    answers = [retain(i, b"one") for i in range(3)]
    assert [a.outcome for a in answers[:2]] == ["accepted", "accepted"]
    assert answers[2].outcome in ("clipped", "refused")
    assert sum(a.num_bytes for a in answers) <= 2 * size
    assert retain(0, b"two").outcome == "accepted"
    s.e.kv.expire_pins(6.0)
    assert retain(2, b"one").outcome == "accepted"
    s.check()


def test_a_lower_priority_goes_first(stored):
    """Though it was retained later; among equals the oldest."""
    s, host = stored, stored.tiers.tiers[0].index
    for i, priority in ((1, 1), (2, 0)):
        s.tiers.hint(match_of(s, i), "retain", now=0.0, ttl=10.0, priority=priority)
    while match_of(s, 1).num_tokens == match_of(s, 2).num_tokens == 96:
        host.evict(1)
    assert match_of(s, 1).num_tokens == 96
    s.tiers.hint(match_of(s, 1), "release")
    assert not host._priorities
    s.check()


def test_a_tenant_gives_up_a_lower_priority_for_a_higher_one():
    size = (13 + 3) * 4096
    s = Setup(pages=300, retention=32, max_hint_bytes=2 * size)
    for salt in (b"one", b"two"):
        for i in range(4):
            s.serve([i, *PROMPT], salt=salt)

    def retain(i, priority, salt=b"one"):
        match = s.tiers.match([i, *PROMPT, 1], salt=salt)
        return s.tiers.hint(match, "retain", now=0.0, ttl=5.0, priority=priority).outcome

    assert [retain(0, 1), retain(1, 0), retain(0, -1, b"two")] == ["accepted"] * 3
    assert retain(2, 0) in ("clipped", "refused")
    s.e.kv.expire_pins(6.0)
    assert [retain(0, 1), retain(1, 0), retain(0, -1, b"two")] == ["accepted"] * 3
    assert retain(2, 2) == "accepted"  # in the place of 1
    assert sorted(s.e.kv.index._priorities.get(e, 0) for e in s.e.kv.index.pins) == [-1, 1, 2]
    assert retain(3, 0) in ("clipped", "refused")
    assert len(s.e.kv.index.pins) == 3
    s.check()


def test_policies_hear_of_hints():
    """That of the place where the entry is; a policy that does not listen is not told."""

    class Hears(LRU):
        def __init__(self):
            super().__init__()
            self.told = []

        def hinted(self, entry, intent):
            self.told.append((entry.depth, intent))

    device, host = Hears(), Hears()
    s = Setup(policy=device, policy_of_host=host)
    s.serve(PROMPT)
    s.store()
    match = s.tiers.match([*PROMPT, 1])
    for intent in ("demote", "release", "retain", "release"):
        assert s.tiers.hint(match, intent, now=0.0, ttl=9.0).outcome == "accepted"
    # The host has an entry for a release to be told of as well.
    assert device.told == [(12, intent) for intent in ("demote", "release", "retain", "release")]
    assert host.told == [(12, "release")] * 2
    s.forget()
    job = s.tiers.hint(s.tiers.match([*PROMPT, 1]), "prefetch").job
    s.memory.copy(job)
    s.tiers.done(job)
    assert host.told[2:] == [(12, "prefetch")] and len(device.told) == 4


def test_what_hints_refuse(stored):
    s = stored
    match = match_of(s, 1)
    with pytest.raises(ValueError, match="intent: expected 'retain'"):
        s.tiers.hint(match, "love")
    with pytest.raises(ValueError, match="now, ttl: expected seconds"):
        s.tiers.hint(match, "retain")
    with pytest.raises(ValueError, match="ttl: expected seconds > 0"):
        s.tiers.hint(match, "retain", now=0.0, ttl=0)
    with pytest.raises(ValueError, match="priority: expected"):
        s.tiers.hint(match, "retain", now=0.0, ttl=1.0, priority=0.5)
    with pytest.raises(ValueError, match="match: expected what"):
        s.tiers.hint(3, "prefetch")
    with pytest.raises(ValueError, match="max_bytes: expected an int >= 0"):
        s.tiers.hint(match, "prefetch", max_bytes=-1)
    gone = s.tiers.match([50, 51, *PROMPT])
    assert s.tiers.hint(gone, "retain", now=0.0, ttl=1.0).outcome == "refused"
    assert s.tiers.hint(gone, "demote").outcome == "refused"
