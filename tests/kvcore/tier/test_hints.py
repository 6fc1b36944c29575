"""Hints: what callers intend changes where entries are, and nothing that a request reads."""

from __future__ import annotations

import pytest

from quire.kvcore import LRU, AppendOnlyCache, StepPlan
from quire.kvcore.tier import Tiers, TierSpec
from tests.kvcore.tier.test_tiers import DENSE, HYBRID, PROMPT, Setup
from tests.support.kvcore.engine import groups


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


def retain(s, tokens, priority=0, ttl=5.0, salt=b""):
    return s.tiers.hint(
        s.tiers.match(tokens, salt=salt), "retain", now=0.0, ttl=ttl, priority=priority
    )


def test_a_prefetch_is_of_what_is_there_now(stored):
    """Not of what was when the caller looked."""
    s, old = stored, match_of(stored, 1)
    job = s.tiers.hint(old, "prefetch").job
    waits = match_of(s, 1)
    assert waits.pending is job
    s.tiers.cancel(job)
    answer = s.tiers.hint(waits, "prefetch")
    assert answer.job is not job and answer.job.is_open and answer.num_bytes > 0
    s.memory.copy(answer.job)
    s.tiers.done(answer.job)
    assert s.tiers.hint(old, "prefetch").reason == "it is on the device"
    s.e.kv.clear()
    for max_bytes in (None, 1, 1 << 30):
        assert s.tiers.hint(old, "prefetch", max_bytes=max_bytes).outcome == "refused"
    s.check()


def test_a_prefetch_behind_a_shorter_load_says_so():
    s = Setup(pages=200)
    s.serve(PROMPT)
    s.serve([*PROMPT, *PROMPT])
    s.store()
    s.forget()
    job = s.tiers.load(s.tiers.match([*PROMPT, 7]))
    longer = s.tiers.match([*PROMPT, *PROMPT, 7])
    answer = s.tiers.hint(longer, "prefetch")
    assert (answer.outcome, answer.num_tokens, answer.job) == ("clipped", 96, job)
    assert "shorter" in answer.reason
    s.memory.copy(job)
    s.tiers.done(job)
    answer = s.tiers.hint(longer, "prefetch")
    assert answer.outcome == "accepted" and answer.num_tokens == longer.num_tokens == 200


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_a_release_ends_the_pin_of_its_prefix_alone(specs):
    """Also once something longer was computed behind it."""
    s = Setup(specs, pages=200)
    chat = [*PROMPT, *range(200, 240)]
    s.serve(PROMPT)
    assert retain(s, [*PROMPT, 1], ttl=float("inf")).num_tokens == 96
    s.serve(chat)
    assert retain(s, [*chat, 1]).num_tokens == 136
    pins = s.e.kv.index.pins
    assert [entry.depth for entry in pins] == [12, 17]
    assert s.tiers.hint(s.tiers.match([*chat, 1]), "release").reason.startswith("1 pins")
    assert [entry.depth for entry in pins] == [12]
    assert s.tiers.hint(s.tiers.match([*chat, 1]), "release").reason.startswith("0 pins")
    retain(s, [*chat, 1])
    assert s.tiers.hint(s.tiers.match([*PROMPT, 1]), "release").reason.startswith("1 pins")
    assert [entry.depth for entry in pins] == [17]
    s.check()


def test_a_release_ends_what_was_kept_of_a_longer_prefix():
    """That was asked for, though only a part was there then."""
    s = Setup(DENSE, pages=200)
    chat = [*PROMPT, *range(200, 240)]
    s.serve(PROMPT)
    assert retain(s, chat).num_tokens == 96
    s.serve(chat)
    s.tiers.hint(s.tiers.match([*chat[:-8], 1]), "release")  # of another
    assert len(s.e.kv.index.pins) == 1
    s.tiers.hint(s.tiers.match(chat), "release")
    assert not s.e.kv.index.pins


def test_pins_that_no_hint_made_are_not_released(stored):
    s, kv = stored, stored.e.kv
    tokens = [1, *PROMPT, 1]
    s.load(tokens)

    def released():
        s.tiers.hint(match_of(s, 1), "release")
        return not kv.index.pins

    kv.pin(kv.match(tokens), now=0.0, ttl=10.0)
    assert not released()
    assert retain(s, tokens, ttl=5.0).outcome == "accepted" and not released()
    assert kv.expire_pins(6.0) == 0
    kv.unpin(kv.match(tokens))
    retain(s, tokens)
    kv.pin(kv.match(tokens), now=0.0, ttl=10.0)  # which is the caller's from now on
    assert not released()
    retain(s, tokens, ttl=20.0)
    assert released()


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_to_retain_again_renews_within_the_budget(specs):
    size = (12 + 3 * (specs is HYBRID)) * 4096
    s = Setup(specs, pages=200, max_hint_bytes=size)
    for i in (1, 2):
        s.serve([i, *PROMPT[1:]])
    tokens, other = [1, *PROMPT[1:], 1], [2, *PROMPT[1:], 1]
    for priority in (0, 0, 1, -1, 0):
        answer = retain(s, tokens, priority, ttl=5.0 + priority)
        assert (answer.outcome, answer.num_tokens) == ("accepted", 96)
    assert retain(s, other).reason == "the tenant's budget is spent"
    assert s.e.kv.expire_pins(5.0) == 1
    assert retain(s, other).outcome == "accepted"


def test_what_prefixes_share_counts_once():
    """A chat that grows: its last prefix has as many bytes as all of them but for windows."""
    windows = 3 * 4096
    s = Setup(pages=300, retention=32, max_hint_bytes=(24 + 3 * 3) * 4096)
    chat, answers = [], []
    for turn in range(4):
        chat += [turn + 1] * 64
        s.serve(chat)
        answers.append(retain(s, [*chat, 1]))
    assert [a.num_tokens for a in answers] == [64, 128, 192, 192]
    assert [a.outcome for a in answers] == ["accepted"] * 3 + ["clipped"]
    assert answers[2].num_bytes == 24 * 4096 + windows
    assert len(s.e.kv.index.pins) == 3
    s.check()


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_a_refusal_ends_no_pin(specs):
    s = Setup(specs, pages=200, max_pinned_pages=20, max_hint_bytes=1 << 20)
    tokens, longer = [1, *PROMPT], [*range(200, 400)]
    s.serve(tokens, salt=b"one")
    s.serve(tokens, salt=b"two")
    s.serve(longer, salt=b"two")
    assert retain(s, [*tokens, 1], salt=b"one").outcome == "accepted"
    assert not s.e.kv.pin(s.e.kv.match([*longer, 1], salt=b"two"), now=0.0, ttl=9.0)
    answer = retain(s, [*longer, 1], priority=1, salt=b"two")
    assert answer.outcome == "refused" and "may be pinned" in answer.reason
    assert len(s.e.kv.index.pins) == 1 and not s.e.kv.stats()["demoted_pins"]
    assert retain(s, [*tokens, 1], priority=-1, salt=b"two").outcome == "refused"
    assert len(s.e.kv.index.pins) == 1 and not s.e.kv.stats()["demoted_pins"]
    s.check()
    assert retain(s, [*tokens, 1], salt=b"two").outcome == "accepted"  # in the place of the older
    assert len(s.e.kv.index.pins) == 1 == s.e.kv.stats()["demoted_pins"]


@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_nothing_is_remembered_of_pins_that_ended(budget):
    """By their time, by eviction, by the caller's hand or with all that is kept."""
    s = Setup(pages=200, max_hint_bytes=budget)
    prompts = [[i, *PROMPT, 1] for i in range(4)]

    def retained():
        for i, prompt in enumerate(prompts):
            s.serve(prompt[:-1], salt=b"%d" % i)
            assert retain(s, prompt, salt=b"%d" % i).outcome == "accepted"
        return len(s.tiers._hints._retained)

    for end in (
        lambda: s.e.kv.expire_pins(9.0),
        lambda: s.e.kv.evict(190),
        lambda: [s.e.kv.unpin(s.e.kv.match(p, salt=b"%d" % i)) for i, p in enumerate(prompts)],
        lambda: s.e.kv.clear(),
    ):
        assert retained() == 4
        end()
        assert not (s.tiers._hints._retained or s.e.kv.index.pins)
        assert not s.tiers._hints._kept


def test_a_hint_that_loads_nothing_voids_no_plan(stored):
    """Whether it is refused or not."""
    s = stored
    slot = s.e.kv.admit("a", s.e.kv.match([5] * 40))
    plan = s.e.kv.plan([slot], [40])
    s.tiers.hint(match_of(s, 1), "retain", now=0.0, ttl=5.0)
    for intent in ("release", "demote"):
        s.tiers.hint(match_of(s, 1), intent)
    with pytest.raises(ValueError, match="intent: expected"):
        s.tiers.hint(match_of(s, 1), "love")
    s.e.kv.commit(plan, [5] * 40)
    assert int(s.e.kv.num_computed[slot]) == 40


def test_hints_of_other_caches_are_refused(stored):
    match = Setup(groups((16, None))).tiers.match(PROMPT)
    for intent in ("retain", "prefetch", "demote", "release"):
        with pytest.raises(ValueError, match="token_ids: expected a prompt of this cache's"):
            stored.tiers.hint(match, intent, now=0.0, ttl=1.0)
    other = AppendOnlyCache(HYBRID, num_pages=20, max_model_len=100)
    with pytest.raises(ValueError, match="kv: expected a KVCache, got"):
        Tiers(other, host=TierSpec(9, 1.0), prefill_tokens_per_second=1.0)


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
    gone = s.tiers.match([50, 51, *PROMPT])
    for m in (match, gone):
        for max_bytes in (-1, 1.5, "x"):
            with pytest.raises(ValueError, match="max_bytes: expected an int >= 0"):
                s.tiers.hint(m, "prefetch", max_bytes=max_bytes)
    answer = s.tiers.hint(gone, "retain", now=0.0, ttl=1.0)
    assert (answer.outcome, answer.reason) == ("refused", "nothing of it is kept")
    assert s.tiers.hint(gone, "demote").outcome == "refused"
