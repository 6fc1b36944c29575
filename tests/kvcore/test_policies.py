"""Eviction policies: their order, what they learn, and that a small one of one's own is enough."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.kvcore import LRU, Adaptive, GroupSpec, KVCache
from quire.kvcore.policies import returns
from quire.kvcore.policies.returns import hazard
from quire.kvcore.tier import Tiers, stores
from tests.kvcore.engine import Runner
from tests.kvcore.expected import contents

ROOT = Path(__file__).parents[2]


def policies_of_documents() -> list[type]:
    """Classes of the policies that docs/write-a-policy.md and examples/s3fifo.py show."""
    page = (ROOT / "docs" / "write-a-policy.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict = {"__name__": "documents"}
    for block in [*blocks, (ROOT / "examples" / "s3fifo.py").read_text()]:
        if "class " in block:  # the others replay traffic
            exec(block, names)
    return [names[name] for name in ("LFU", "GDSF", "S3FIFO")]


STATE = GroupSpec("state", "state", 4, 4096)
POLICIES = [LRU, Adaptive, *policies_of_documents()]


@dataclass(eq=False)
class Fake:
    """An entry as a policy sees it."""

    key: bytes
    last_used: int = 0
    num_uses: int = 0
    depth: int = 1
    gain: int = 1
    num_pages: int = 1
    freed: int = 1
    shorter: Fake | None = None


def key(*names: object) -> bytes:
    """Segment keys, 32 bytes each."""
    return b"".join(str(name).encode().rjust(32) for name in names)


def chance(policy: Adaptive, entry: Fake) -> float:
    """Chance of a hit on `entry` at the next prompt, as `policy` estimates it."""
    policy.coming(0)  # which looks at all that was added
    return policy._returns.chance(policy._filed[entry][1])


def popped(policy) -> list[bytes]:
    order = []
    while (entry := policy.pop()) is not None:
        order.append(entry.key)
    return order


@pytest.mark.parametrize("make", POLICIES)
def test_a_policy_gives_back_each_entry_once(make):
    policy = make()
    entries = [Fake(b"%d" % i, last_used=i) for i in range(50)]
    for e in (entries + entries[::3]) * 40:  # heaps are made anew meanwhile
        policy.add(e)
    for e in entries[::5]:
        policy.discard(e)
    policy.discard(Fake(b"never filed"))
    assert sorted(popped(policy)) == sorted(e.key for e in entries if entries.index(e) % 5)
    assert policy.pop() is None
    policy.add(entries[0])
    assert popped(policy) == [b"0"]


@pytest.mark.parametrize("make", [LRU, Adaptive])
def test_the_least_recently_used_goes_first_and_the_deepest_among_equals(make):
    policy = make()
    for name, tick, depth in ((b"a", 1, 1), (b"b", 1, 5), (b"c", 0, 1), (b"d", 2, 1)):
        policy.add(Fake(name, last_used=tick, depth=depth))
    policy.coming(0)  # `Adaptive` looks at all of them
    assert popped(policy) == [b"c", b"b", b"a", b"d"]


def edited_chats(policy, turns: int) -> None:
    """Ask prompts of ten segments, each resumed one segment before its end by the next.

    Each leaves entries at that segment, at its end and after the answer.
    """
    for turn in range(turns):
        said = [f"{turn}.{i}" for i in range(10)]
        policy.asked(key(*said), 0, (10, 10, 9, 0))
        edited = Fake(key(said[8]), last_used=3 * turn, depth=9)
        end = Fake(key(said[9]), last_used=3 * turn, depth=10, shorter=edited)
        answer = Fake(key(f"answer{turn}"), last_used=3 * turn + 1, depth=11, shorter=end)
        for entry in (edited, end, answer):
            policy.add(entry)
        if turn < turns - 1:
            policy.asked(key(*said[:9], f"new{turn}"), 9, (10, 10, 9, 0))


@pytest.mark.parametrize("returned", [False, True])
def test_adaptive_gives_up_first_what_lies_inside_prompts_if_none_return_to_it(returned):
    policy = Adaptive()
    for turn in range(60):
        said = [f"{turn}.{i}" for i in range(20)]
        policy.asked(key(*said), 0, (0, 0, 19, 0))
        edited = Fake(key(said[18]), last_used=turn, depth=19)
        inside = Fake(key(said[4]), last_used=turn, depth=5)
        policy.add(inside)
        policy.add(edited)
        policy.coming(1)  # as a host tier asks after each step
        if turn < 59:
            policy.asked(key(*said[: 5 if returned else 19], "new"), 0)
    order = popped(policy)
    assert (order.index(inside.key) < order.index(edited.key)) is not returned


def test_adaptive_gives_up_first_the_end_of_a_prompt_that_a_chat_has_passed():
    """Half of the prompts come again, half go on from their answer: these ends are not hit."""
    policy, ends = Adaptive(), []
    for turn in range(60):
        keys = key(f"{turn}.0", f"{turn}.1")
        policy.asked(keys, 0, (2, 2, 0, 0))
        end = Fake(keys[32:], last_used=turn, depth=2)
        ends.append(end)
        for entry in (end, Fake(key(f"{turn}.2"), last_used=turn, depth=3, shorter=end)):
            policy.add(entry)
        policy.coming(0)  # which looks at both
        if turn % 2:
            policy.asked(keys + key(f"{turn}.2", f"{turn}.3"), 3)
        elif turn < 58:
            policy.asked(keys, 2, (2, 2, 0, 0))
    open_end, passed = ends[58:]
    first = chance(policy, open_end)
    assert first > 2 * chance(policy, passed)
    policy.asked(key("other"), 0)
    assert chance(policy, open_end) < first, "an older entry is less likely to be hit"
    order = popped(policy)
    assert order.index(passed.key) < order.index(open_end.key)


def test_adaptive_is_lru_while_nothing_comes_back():
    adaptive, lru = Adaptive(), LRU()
    entries = []
    for tick in range(400):
        adaptive.asked(key(tick), 0)
        entries.append(Fake(key(tick), last_used=tick))
        if tick % 3 == 0:  # used again, as by a request that goes on from there
            entries.append(entries[tick // 2])
            entries[-1].last_used = tick
        for policy in (adaptive, lru):
            policy.add(entries[-1])
        if tick > 50:
            assert adaptive.pop() is lru.pop()


def test_adaptive_keeps_what_stands_in_for_an_evicted_entry_that_is_likely_to_be_returned_to():
    policy = Adaptive()
    edited_chats(policy, 30)
    while policy.pop():
        pass
    policy.asked(key(*(f"a{i}" for i in range(10))), 0, (10, 10, 9, 0))
    shorter = Fake(key("a3"), last_used=100, depth=4)
    longer = Fake(key("a8"), last_used=100, depth=9, freed=64, shorter=shorter)
    other = Fake(key("other"), last_used=101)
    for entry in (shorter, longer, other):
        policy.add(entry)
    order = popped(policy)
    assert order == [longer.key, other.key, shorter.key]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_hazard_is_that_of_the_distribution(share):
    """It is minus the slope of log(entries that none returned to so far)."""

    def survivors(age):
        return 1 - share + share * 50 / (50 + age)

    for age in (0.0, 10.0, 50.0, 1000.0):
        slope = (math.log(survivors(age + 1e-4)) - math.log(survivors(age))) / 1e-4
        assert hazard(share, 50, age) == pytest.approx(-slope, rel=1e-4, abs=1e-12)


def test_adaptive_looks_again_at_what_an_eviction_left_last_of_its_chain():
    policy = Adaptive()
    shorter = Fake(
        key("shorter"), gain=32, freed=1
    )  # the segments that it gains serve the longer one
    longer = Fake(key("longer"), gain=1, freed=4, shorter=shorter)
    other = Fake(key("other"), gain=8, freed=8)
    for entry in (shorter, longer, other):
        policy.add(entry)
    assert policy.pop() is longer
    shorter.freed = 33
    assert policy.pop() is shorter


def test_adaptive_knows_a_chain_that_was_shortened():
    policy, entry = Adaptive(), Fake(key("b"), depth=2)
    policy.asked(key("a", "b"), 0, (2, 2, 0, 0))
    policy.add(entry)
    policy.coming(0)  # which looks at all that was added
    record = policy._filed[entry][1]
    assert policy.pop() is entry
    entry.key, entry.depth = key("a"), 1
    policy.add(entry)
    policy.coming(0)
    assert policy._filed[entry][1] is record


def test_returns_forget_the_record_that_was_renewed_first():
    known, record = returns.Returns(), returns.Record()
    record.kind = "end"
    for i in range(1024):
        known.remember(key(i), record)
    known.renew(record, Fake(key(0)), is_used=False)
    known.remember(key(1024), record)
    assert len(known.records) == 1024 and next(iter(known.records)) == key(2)


# In a cache.


def test_no_dense_page_of_a_running_request_is_counted_as_freed():
    e = Runner((32, None), (16, 64), (16, 64), retention="latest")
    e.admit("a", range(320))
    e.finish_prompt("a")
    [point] = [p for run in e.kv.index.runs() for p in run.points.values() if p.depth == 10]
    assert (point.gain, point.num_pages, point.freed) == (1, 8 + 1, 8)
    e.kv.release("a")
    assert (point.gain, point.num_pages, point.freed) == (1, 8 + 1, 8 + 1)
    dense = Runner((8, None), (8, None))
    dense.run("a", range(41))
    [run] = dense.kv.index.runs()
    assert (run.gain, run.num_pages, run.freed) == (5, 10, 10)


@pytest.mark.parametrize(("specs", "pages"), [(((32, None), (16, 64)), 90), (((32, None),), 30)])
@pytest.mark.parametrize("make", POLICIES)
def test_what_is_used_often_outlives_what_is_used_once(make, specs, pages):
    """By the policies that count uses; all of them leave a sound cache."""
    e = Runner(*specs, num_pages=pages, policy=make())
    loved = list(range(200))
    for i in range(4):
        e.run(("loved", i), loved)
    for i in range(10):
        e.run(i, range(1000 * (i + 1), 1000 * (i + 1) + 200))
        e.kv.check_invariants()
    if make.__name__ in ("LFU", "S3FIFO"):
        assert e.kv.match(loved).num_tokens == 192
        found = [entry for run in e.kv.index.runs() for entry in (run, *run.points.values())]
        assert max(entry.num_uses for entry in found) == 3


@pytest.mark.parametrize("specs", [((32, None), (16, 64)), ((32, None),)], ids=["hybrid", "dense"])
def test_a_hit_is_a_use(specs):
    e = Runner(*specs, policy=LRU())
    first, second = range(100), range(1000, 1100)
    for i, tokens in enumerate((first, second, first)):
        e.run(i, tokens)
    e.kv.evict(1)
    assert [e.kv.match([*tokens, 1]).num_tokens < 96 for tokens in (first, second)] == [False, True]


def busy(policy, specs) -> KVCache:
    """A cache with some dozen entries, used differently often."""
    e, rng = Runner(*specs, num_pages=1500, policy=policy), random.Random(0)
    for i in range(60):
        shared = [rng.randrange(8)] * rng.randint(10, 120)
        e.run(i, shared + [i] * rng.randint(1, 60), chunk=200)
    return e.kv


@pytest.mark.parametrize("specs", [((8, None), (4, 10)), ((8, None),)], ids=["hybrid", "dense"])
@pytest.mark.parametrize("make", [LRU, Adaptive])
def test_coming(make, specs):
    policy, twin = (busy(make(), specs).index.policy for _ in range(2))
    for one in (policy, twin):
        if make is Adaptive:  # what was not looked at yet does not come
            while one._new:
                one._look(64)
    found = policy.coming(10)
    assert len(found) == len(set(found)) == 10
    assert policy.coming(3) == found[:3] and policy.coming(0) == []
    gone = []
    for entry in iter(policy.pop, None):
        other = twin.pop()
        assert (entry.key, entry.depth) == (other.key, other.depth), "to ask changed something"
        gone.append(entry)
        policy.coming(5)
    assert twin.pop() is None and len(gone) > 30
    if make is LRU:
        assert gone[:10] == found
    assert gone[0] in found


@pytest.mark.parametrize(("make", "specs"), [(LRU, ((8, None),)), (Adaptive, ((8, None), STATE))])
def test_long_traffic_keeps_memory_bounded(make, specs, monkeypatch):
    """All that a cache and its host tier remember, of prompts that come again or never do."""
    monkeypatch.setattr(stores, "REMEMBERED", 1)
    monkeypatch.setattr(returns, "MEMORY", 1)
    e, sizes = Runner(*specs, num_pages=40, policy=make()), []
    tiers = Tiers(e.kv, num_pages=40, bytes_per_second=1e9, prefill_tokens_per_second=1.0)
    e.admit("long", [9] * 30)  # its entries are taken out and filed again
    e.finish_prompt("long")
    for i in range(1900):
        e.run(i, [i] * 17 if i % 4 else [7] * 25)
        e.admit("ends early", [i] * 39)  # what it would leave is never cached
        e.kv.release("ends early")
        if i % 8 == 0:
            for job in tiers.stores(1 << 30):
                tiers.done(job)
        if i > 780 and i % 60 == 59:
            sizes.append(len(contents(e.kv)))
    assert max(sizes[12:]) < 1.1 * max(sizes[:12])


# Policies of a host tier.


def test_a_tier_of_adaptive_learns_with_the_cache():
    """Both estimate the same chances, though prompts are told to one only."""
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
    """A return to it is served by the copy, not by the next shorter entry."""
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
