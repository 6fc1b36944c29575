"""What a full tier takes in, and that it values entries as the device does."""

from __future__ import annotations

import random

import pytest

from quire.kvcore import LRU, Adaptive
from quire.kvcore.policies.base import Ranked
from quire.kvcore.prefix.tree import ResumePoint
from quire.kvcore.tier.admission import AGAIN, beside, left_over
from quire.kvcore.tier.places import Found
from quire.kvcore.tier.stores import RECOUNT
from quire.kvcore.tier.watched import Watched, coming
from tests.kvcore.tier.test_tiers import DENSE, HYBRID, Setup
from tests.support.kvcore.entries import Fake, key


class Told(LRU):
    """LRU that takes each entry's chance from the first token of its prompt."""

    def __init__(self, index_of):
        super().__init__()
        self._index_of = index_of

    def chance(self, entry) -> float:
        return self._index_of(entry)


def _setup(host: int, chances: dict[int, float]) -> Setup:
    """Prompts are known by their first token, of which `chances` says how likely a return is."""
    by_key: dict[bytes, int] = {}

    def chance(entry) -> float:
        run = entry.run
        while run.start:
            run = run.parent
        return chances[by_key[run.segment_key(0)]]

    s = Setup(
        pages=200, host=host, policy=Told(chance), policy_of_host=Told(chance), prefill=1000.0
    )
    for first in chances:
        by_key[s.e.kv.match([first, *PROMPT]).prompt.keys[:32]] = first
    return s


PROMPT = list(range(100, 200))


def _kept(s: Setup, firsts) -> list[int]:
    """Whose prompts the host has."""
    return [i for i in firsts if s.tiers.tiers[0].index.find(
        s.e.kv.match([i, *PROMPT, 1]).prompt.keys, 12)[1] == 12]  # fmt: skip


def test_a_full_tier_takes_in_what_is_worth_more_than_what_has_to_go():
    chances = {1: 0.5, 2: 0.4, 3: 0.1, 4: 0.9}
    s = _setup(34, chances)  # room for two
    for first in (1, 2):
        s.serve([first, *PROMPT])
    s.store()
    assert _kept(s, chances) == [1, 2]
    s.serve([3, *PROMPT])
    assert s.store() == [] and _kept(s, chances) == [1, 2]
    s.serve([4, *PROMPT])
    s.store()
    assert 4 in _kept(s, chances) and 3 not in _kept(s, chances)


class Strict(LRU):
    """LRU that tells the chance of what it has, and of nothing else."""

    def __init__(self):
        super().__init__()
        self.has = set()

    def add(self, entry):
        self.has.add(entry)
        super().add(entry)

    def discard(self, entry):
        self.has.discard(entry)
        super().discard(entry)

    def pop(self):
        entry = super().pop()
        self.has.discard(entry)
        return entry

    def chance(self, entry) -> float:
        assert entry in self.has
        return 0.1


def test_what_a_job_builds_on_has_not_to_go():
    """One call stores two prompts for whose room a tier looks around, and between them one that goes on from a chain seen then."""
    policy = Told(lambda entry: 0.9)
    s = Setup(DENSE, pages=200, host=14, policy=policy, policy_of_host=Strict(), prefill=1000.0)
    s.serve([2, *PROMPT[:60]])
    s.serve([1, *PROMPT[:40]])
    s.store()
    s.forget()
    assert len(s.has("host").segments) == 7 + 5
    s.serve([5, *PROMPT[:20]])
    s.serve([1, *PROMPT[:70]])
    s.serve([3, *PROMPT[:40]])
    s.store()
    longer = s.e.kv.match([1, *PROMPT]).prompt.keys
    assert s.tiers.tiers[0].index.find(longer, 8)[1] == 8


def test_what_was_refused_is_looked_at_again():
    chances = {1: 0.5, 2: 0.4, 3: 0.1}
    s = _setup(34, chances)
    for first in chances:
        s.serve([first, *PROMPT])
        s.store()
    assert _kept(s, chances) == [1, 2]
    chances[3] = 0.9
    assert s.tiers.stores(1 << 30) == []
    for _ in range(40):
        if s.store():
            break
    assert 3 in _kept(s, chances)


@pytest.mark.parametrize("how", ["pinned", "running"])
@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_what_no_policy_ranks_is_let_in(specs, how):
    """Nobody evicts a pinned entry, or one that a request needs, so no policy says how likely a hit on it is."""
    s = Setup(specs, pages=200, host=34, policy=Adaptive(), policy_of_host=None, watermark=0)
    for first in range(3):
        s.serve([first, *PROMPT])
        s.store(everything=True)
    prompt = [9, *PROMPT]
    s.serve(prompt)
    if how == "pinned":
        s.e.kv.pin(s.e.kv.match([*prompt, 1]), now=0.0, ttl=9.0)
    else:
        s.e.admit("running", [*prompt, 1])
    assert s.tiers.tiers[0].num_free < 12, "something has to go for it"
    s.store(everything=True)
    assert s.tiers.stats()["tier_stored_segments/host"] > 0
    assert 9 in _kept(s, [9])


def test_what_goes_next_may_be_needed_by_a_store_of_the_same_call():
    """The second store builds on what the tier would have evicted for the third."""
    s = Setup(DENSE, pages=200, host=20, policy=Adaptive(), policy_of_host=None)
    s.serve(range(300, 372))
    s.serve(PROMPT[:80])
    assert len(s.store()) == 2 and s.tiers.tiers[0].num_free == 0
    s.serve(range(500, 560))
    s.serve(PROMPT)
    s.serve(range(700, 760))
    jobs = s.tiers.stores(1 << 30)
    assert [job.num_tokens for job in jobs] == [56, 96]
    for job in jobs:
        s.memory.copy(job)
        s.tiers.done(job)
    s.check()


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
    assert [host.chance(e) for e in entries] == [device.chance(e) for e in entries]


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
        before = device.chance(shorter)
        if is_there:
            copy = Fake(key("l"), last_used=1, depth=2)
            host.add(copy)
            host.chance(copy)
        while device.pop() is not longer:
            pass
        found.append(device.chance(shorter) > before)
    assert found == [True, False]


@pytest.mark.parametrize("policy", [Adaptive, LRU])
def test_what_comes_next_is_known_before_it_was_looked_at(policy):
    """`Adaptive` looks at entries late; what eviction takes was to be had by `coming`."""
    s = Setup(pages=200, policy=policy())
    for i in range(4):
        s.serve([i, *PROMPT])
    index = s.e.kv.index
    assert isinstance(index.policy, Watched)
    points = {p for run in index.runs() for p in run.points.values()}
    found = coming(index, 100)
    assert {e for e in found if isinstance(e, ResumePoint)} == points


def test_a_spare_entry_is_still_filed():
    """What is spare goes first, but once; what is spare no more is where it was."""
    policy = Adaptive()
    watched = Watched(policy, lambda entry: None)
    entries = [Fake(key(i), last_used=i) for i in range(4)]
    for entry in entries:
        watched.add(entry)
    for entry in entries[2:]:
        watched.spare(entry)
    assert watched.coming(9)[:2] == entries[2:] and len(watched.coming(9)) == 4
    watched.needed(entries[2])
    order = []
    while (entry := watched.pop()) is not None:
        order.append(entry)
    assert order[0] is entries[3] and sorted(e.last_used for e in order) == [0, 1, 2, 3]


def test_what_the_next_place_has_is_counted_and_goes_first():
    """Kept entries first, then those that somebody wants to leave; pages are counted of the kept
    ones alone, until they are needed, used, withdrawn or gone."""
    watched = Watched(LRU(), lambda entry: None)
    entries = [Fake(key(i), last_used=i) for i in range(6)]
    for entry in entries:
        entry.freed = 10 + entry.last_used
        watched.add(entry)
    watched.spare(entries[5])
    for i in (4, 3, 2):
        watched.spare(entries[i], kept=True)
    assert watched.kept_pages == 12 + 13 + 14
    assert watched.coming(9) == [entries[i] for i in (4, 3, 2, 5, 0, 1)]
    assert watched.coming(9, kept=False) == [entries[i] for i in (5, 0, 1)]
    assert watched.coming(2, kept=False) == [entries[i] for i in (5, 0)]
    watched.add(entries[2])  # used
    assert watched.kept_pages == 13 + 14 and not watched.is_spare(entries[2])
    entries[3].freed = 100
    assert watched.count() == watched.kept_pages == 114
    watched.spare(entries[3], kept=True)  # once more
    assert watched.kept_pages == 114
    watched.discard(entries[3])
    assert watched.kept_pages == 14
    gone = [watched.pop() for _ in range(5)]
    assert gone == [entries[i] for i in (4, 5, 0, 1, 2)] and watched.kept_pages == 0
    assert watched.pop() is None


def test_what_has_a_copy_is_not_looked_at_again():
    """Once all that is due has a copy nothing asks the policy what comes, until pages are taken."""
    s = Setup(pages=400, host=400)
    for i in range(12):
        s.serve([i, *PROMPT])
    assert s.store()
    policy = s.e.kv.index.policy
    assert isinstance(policy, Watched)
    kept, asked, tell = policy.kept_pages, [], policy.policy.coming
    policy.policy.coming = lambda n: asked.append(n) or tell(n)
    for _ in range(10):
        assert not s.tiers.stores(1 << 30)
    assert kept and not asked
    s.serve([99, *PROMPT])
    assert s.store() and asked and policy.kept_pages > kept


def test_pages_of_what_has_a_copy_are_counted_again():
    """A request that was admitted before a prefix was there goes on from its end: to evict it frees
    its window pages alone then."""
    s = Setup(pages=400, host=400)
    longer = [*PROMPT, *range(500, 540)]
    s.e.admit("longer", longer)
    s.serve(PROMPT)
    s.store()
    policy, [point] = (
        s.e.kv.index.policy,
        [p for r in s.e.kv.index.runs() for p in r.points.values()],
    )
    assert isinstance(policy, Watched) and policy.is_spare(point)
    before = point.freed
    assert policy.kept_pages == before
    s.tiers._stores._watermark = 0  # nothing is due, so that nothing else counts them
    s.e.step({"longer": 64})
    s.e.step({"longer": len(longer) - 64})
    assert point.freed < before and policy.is_spare(point)
    for _ in range(RECOUNT):
        s.store()
    kept = [p for r in s.e.kv.index.runs() for p in r.points.values() if policy.is_spare(p)]
    assert point in kept and policy.kept_pages == sum(p.freed for p in kept)
    s.e.release("longer")


class Valued(Ranked):
    """Ranks by what an entry saves for each page, where each has a chance of its own."""

    def __init__(self, chance):
        self.chance = chance
        super().__init__()

    def rank(self, entry) -> float:
        return self.chance(entry) * entry.gain / max(1, entry.freed)


def _stored(s: Setup, calls: int) -> list[int]:
    """Stores what is due so often: resume points that came in each call."""
    return [
        sum(len(job.parts.depths) for job in jobs)
        for jobs in (_all_done(s, s.tiers.stores(1 << 30)) for _ in range(calls))
    ]


def _all_done(s: Setup, jobs):
    for job in jobs:
        s.memory.copy(job)
        s.tiers.done(job)
    return jobs


@pytest.mark.parametrize("seed", range(16))
def test_stores_come_to_an_end(seed):
    """Prompts that share their beginnings, a host with no room for all of them, chances that stay
    as they are: once the host has the best of it, nothing is copied any more."""
    rng = random.Random(seed)
    chances: dict[bytes, float] = {}

    def chance(entry) -> float:
        return chances.setdefault(entry.key, rng.choice([0.1, 0.2, 0.2, 0.4]))

    s = Setup(
        pages=200, host=rng.randint(20, 60), policy=Valued(chance), prefill=1000.0,
        policy_of_host=Valued(chance), retention=rng.choice([16, 32, "latest"]),
    )  # fmt: skip
    starts = [[i] * rng.randint(10, 60) for i in range(3)]
    for i in range(10):
        s.serve(rng.choice(starts)[: rng.randint(8, 60)] + [100 + i] * rng.randint(10, 60))
    came = _stored(s, 1000)
    assert sum(came) >= 3
    assert not any(came[600:]), f"still {sum(came[600:])} of {sum(came)} points in the last calls"
    s.check()


def test_equals_stay():
    s = _setup(34, {i: 0.5 for i in range(1, 5)})  # room for two
    for i in range(1, 5):
        s.serve([i, *PROMPT])
    s.store()
    assert len(_kept(s, range(1, 5))) == 2
    assert not any(_stored(s, 100))


def test_what_goes_is_weighed_beside_what_comes():
    """On one chain: segments that the newcomer needs are not freed, and what is past it gains over
    it; segments past the last point are free without it."""
    s = Setup(pages=200, prefill=1000.0, retention=16)
    s.serve(PROMPT)
    s.store()
    [tier] = s.tiers.tiers
    index, keys = tier.index, s.e.kv.match([*PROMPT, 1]).prompt.keys
    [run] = index.runs()
    width, seen = index.pages_per_segment, set()
    assert len(run.depths) > 3
    index.drop_point(run.points[run.depths[-1]])  # its segments stay until pages are needed
    assert run.useless
    for depth in range(1, run.depth + 1):
        there = Found(tier, *index.find(keys, depth))
        for point in run.points.values():
            others = [d for d in run.depths if d != point.depth] + [depth]
            freed = len(point.pages) + width * max(0, point.depth - max(others))
            gain = point.depth - max([0, *(d for d in others if d < point.depth)])
            assert beside(point, there, depth) == (freed, gain)
            seen.add((freed, gain))
        for after in range(depth + 1):
            assert left_over(there, after) == max(0, depth - max(run.depths[-1], after))
    assert len(seen) > 3


@pytest.mark.parametrize(
    "lengths, host, ratio, times",
    [
        ((25, 80), 14, 1.5, 2), ((56, 72), 14, 1.0, 2), ((40, 64), 13, 2.5, 2), ((40, 64), 14, 1.5, 2),
        ((56, 64), 13, 2.0, 2), ((56, 80), 16, 1.5, 2),
        # A shorter point serves those who return to a longer one, which these chances do not say: it
        # takes turns, until more is asked of what keeps coming. Twice as much each time: the chances
        # differ by a factor below 2**3.
        ((56, 72), 13, 6.0, AGAIN + 1 + 3),
    ],
)  # fmt: skip
def test_points_of_one_chain_do_not_take_turns(lengths, host, ratio, times):
    """A host with room for a chain and one or two of its points: each of these lacks its own pages
    alone, as the others keep the chain there, or left it there."""

    def chance(entry) -> float:
        return 0.1 * ratio if entry.depth == lengths[1] // 8 else 0.1

    policies = {"policy": Valued(chance), "policy_of_host": Valued(chance)}
    s = Setup(pages=200, host=host, prefill=1000.0, **policies)
    for n in lengths:
        s.serve(range(n))
    points = s.e.kv.index.num_points
    came = _stored(s, 1000)
    assert 0 < sum(came[:200]) <= times * points and not any(came[600:]), came


@pytest.mark.parametrize(
    "then, gone",
    [("nothing", 2), ("used", 1), ("evicted from the host", 1), ("failed", 1), ("cancelled", 1)],
)
def test_what_has_a_copy_leaves_the_device_first(then, gone):
    """LRU takes the first prompt; the second is stored and goes before it, while its copy is there
    and nobody used it since."""
    s = _setup(200, dict.fromkeys((1, 2, 3), 0.5))
    for first in (1, 2):
        s.serve([first, *PROMPT])
    one, two = s.tiers.stores(1 << 30)
    s.tiers.cancel(one)
    if then == "cancelled":
        s.tiers.cancel(two)
    else:
        s.memory.copy(two)
        s.tiers.done(two, [two.copies[0].targets[0]] if then == "failed" else [])
    s.serve([2 if then == "used" else 3, *PROMPT])
    if then == "evicted from the host":
        s.tiers.tiers[0].index.evict(1)
    s.e.kv.evict(1)
    there = [i for i in (1, 2, 3) if s.e.kv.match([i, *PROMPT, 1]).num_tokens]
    assert gone not in there and len(there) == (1 if then == "used" else 2)
    s.check()
