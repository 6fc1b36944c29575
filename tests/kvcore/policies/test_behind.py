"""The host values entries as the device does."""

from __future__ import annotations

import pytest

from quire.kvcore import LRU, Adaptive
from tests.kvcore.policies.fake import Fake, chance, key
from tests.kvcore.tier.setup import Setup


def test_a_tier_of_adaptive_learns_with_the_cache():
    """What prompts return to is known in both places, though only one of them is told."""
    device = Adaptive()
    host = device.behind(lambda entry: 1.0)
    for turn in range(60):
        for who in ("back", "gone"):
            device.asked(key(who, turn), 0, (2, 2, 0, 0))
            for policy in (device, host):
                policy.add(Fake(key(turn), last_used=turn, depth=2))
        device.asked(key("back", turn, "more"), 2)
    entries = [Fake(key(i), last_used=i, depth=2) for i in (1, 2)]
    for entry in entries:
        host.add(entry)
        device.add(entry)
    assert [chance(host, e) for e in entries] == [chance(device, e) for e in entries]


def test_an_entry_that_another_place_keeps_has_no_stand_in():
    """Who returns to it is served by the copy, not by the next shorter one."""
    found = []
    for is_there in (False, True):
        device = Adaptive()
        host = device.behind(lambda entry: 1.0)
        for i in range(50):  # ends are returned to, edited ends are not
            device.asked(key(*range(9), f"new{i}"), 0, (10, 0, 9, 0))
            device.add(Fake(key(f"new{i}"), last_used=i, depth=10))
            device.asked(key(*range(9), f"new{i}", "on"), 10)
        shorter = Fake(key("s"), last_used=99, depth=1, gain=64)
        longer = Fake(key("l"), last_used=99, depth=2, shorter=shorter)
        device.asked(key("s", "l"), 0, (2, 0, 1, 0))
        for entry in (shorter, longer):
            device.add(entry)
        before = chance(device, shorter)
        if is_there:
            copy = Fake(key("l"), last_used=1, depth=2)
            host.add(copy)
            chance(host, copy)
        while device.pop() is not longer:
            pass
        found.append(chance(device, shorter) > before)
    assert found == [True, False]


@pytest.mark.parametrize("policy", [Adaptive, LRU])
def test_a_host_without_a_policy_learns_with_the_cache_if_it_can(policy):
    s = Setup(policy=policy(), policy_of_host=None)
    host = s.tiers.index.policy
    assert type(host) is policy
    assert policy is LRU or host._returns is s.e.kv.index.policy._returns
