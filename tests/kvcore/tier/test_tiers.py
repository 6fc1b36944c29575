"""What tiers promise, sentence by sentence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from quire.kvcore import (
    LRU,
    Adaptive,
    AppendOnlyCache,
    EventLog,
    GroupSpec,
    KVCache,
    OutOfPages,
    Ranked,
    snapshot,
)
from quire.kvcore.events import BlockRemoved, BlockStored
from quire.kvcore.tier import Job, Tiers, TierSpec
from tests.support.kvcore.engine import Engine, groups
from tests.support.kvcore.tiers import Contents, DictJournal, Memory

HYBRID = groups((8, None), (4, 10))
DENSE = groups((8, None))
STATE = groups((4, None), GroupSpec("state", "state", 4, 4096))
WINDOWS = groups((4, 10), (4, 20))
PAGE = 4096


class Setup:
    """An engine of one cache, with tiers behind it and their memory."""

    def __init__(self, specs=HYBRID, pages=60, host=200, disk=None, journal=None, **options):
        cache = {"retention": "latest", "policy": LRU(), "max_requests": 4, "max_model_len": 300}
        names = {"prefill", "watermark", "rate", "policy_of_host", "max_hint_bytes", "lossy"}
        mine = {n: options.pop(n) for n in names & options.keys()}
        self.e = Engine(specs, num_pages=pages, **cache | options)
        rate, lossy = mine.get("rate", 1e9), mine.get("lossy", False)
        policy = mine.get("policy_of_host", LRU())
        self.tiers = Tiers(
            self.e.kv, host=None if host is None else TierSpec(host, rate, policy, lossy=lossy),
            disk=None if disk is None else TierSpec(disk, rate / 10, LRU(), journal, lossy),
            prefill_tokens_per_second=mine.get("prefill", 1.0), watermark=mine.get("watermark", pages),
            max_hint_bytes=mine.get("max_hint_bytes"),
        )  # fmt: skip
        self.memory = Memory(self.e, self.tiers)
        self.ids = 0

    def serve(self, tokens, answer=(), salt=b"", chunk=64):
        """A whole request; every row that it reads is checked."""
        self.ids += 1
        return self.e.run(self.ids, list(tokens), list(answer), chunk, salt)

    def store(self, max_bytes=1 << 30, everything=False) -> list[Job]:
        """Store what is due, until nothing is."""
        done = []
        while jobs := self.tiers.stores(max_bytes, everything=everything):
            for job in jobs:
                self.memory.copy(job)
                self.tiers.done(job)
            done += jobs
        self.check()
        return done

    def load(self, tokens, **options):
        """Load what a prompt needs, which is what the match said; returns the match before."""
        match = self.tiers.match(tokens, **options)
        job = self.tiers.load(match)
        assert isinstance(job, Job)
        self.memory.copy(job)
        came = [(s.place, s.num_tokens, s.num_pages) for s in self.tiers.done(job)]
        assert came == [(s.place, s.num_tokens, s.num_pages) for s in match.shares if s.num_pages]
        self.check()
        return match

    def forget(self):
        """Evict everything that no request needs from the device."""
        self.e.kv.evict(self.e.kv.num_pages)

    def check(self):
        self.e.check()
        self.memory.check()
        self.memory.poison_free_pages()

    def has(self, name) -> Contents:
        return Contents(next(t.index for t in self.tiers.tiers if t.name == name))


PROMPT = list(range(1, 101))


@pytest.mark.parametrize("specs", [HYBRID, DENSE, STATE], ids=["hybrid", "dense", "state"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_prefix_comes_back_as_it_left(specs, place):
    s = Setup(specs, **({"host": 200} if place == "host" else {"host": None, "disk": 200}))
    s.serve(PROMPT)
    before = s.e.kv.match([*PROMPT, 1]).num_tokens
    s.store()
    s.forget()
    assert s.e.kv.match([*PROMPT, 1]).num_tokens == 0
    match = s.load([*PROMPT, 1])
    assert match.num_tokens == match.num_saved_tokens == before > 0
    assert s.serve([*PROMPT, 1]).num_tokens == before  # and every row that it reads is right


def test_segments_without_pages_come_back_too():
    """Where all groups are windows a segment is its key alone; it counts as any other."""
    s = Setup(WINDOWS)
    for prompt in (PROMPT, PROMPT[::-1]):  # of the last one only its point is evicted
        s.serve(prompt)
    s.store()
    s.forget()
    match = s.load([*PROMPT, 1])
    assert match.num_tokens == match.shares[1].num_tokens == 100
    assert s.tiers.stats()["tier_loaded_segments/host"] == 25
    assert s.serve([*PROMPT, 1]).num_tokens == 100


def test_host_to_disk_and_back():
    s = Setup(host=40, disk=300)
    for i in range(6):
        s.serve([i, *PROMPT])
        s.store()
        s.forget()
    kept = s.has("disk")
    assert len(kept.points) >= 4
    first = s.tiers.match([0, *PROMPT, 1])
    assert [share.place for share in first.shares if share.num_pages] == ["disk"]
    s.load([0, *PROMPT, 1])
    assert s.serve([0, *PROMPT, 1]).num_tokens == first.num_tokens > 0


def test_what_is_clean_is_not_written_again():
    s = Setup()
    s.serve(PROMPT)
    assert s.store()
    for _ in range(3):
        s.forget()
        s.load([*PROMPT, 1])
        assert not s.tiers.stores(1 << 30), "it bounces, and is written once"
    assert s.tiers.stats()["tier_lost/host"] == 0


def test_two_points_of_a_chain_bring_their_segments_once():
    s = Setup(pages=200, retention=32)
    s.serve(PROMPT)
    s.store()
    stats = s.e.kv.stats()
    assert stats["tier_stored_points/host"] > 2
    dense = {r for r, page in enumerate(s.memory.rows["host"][0]) if (page != -1).any()}
    windows = {r for r, page in enumerate(s.memory.rows["host"][1]) if (page != -1).any()}
    assert len(dense) == 12 and stats["tier_stored_segments/host"] == 12
    assert stats["tier_stored_pages/host"] == len(dense) + len(windows)


def test_nothing_is_stored_while_there_is_room():
    s = Setup(pages=400, watermark=50)
    s.serve(PROMPT)
    assert s.tiers.stores(1 << 30) == []


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_stores_under_way_count(specs):
    """What will be had without a loss once they are done needs no other store meanwhile."""
    s = Setup(specs, pages=200, watermark=5)
    for i in range(4):
        s.serve([i, *PROMPT])
    left = s.e.kv.num_free_pages
    s.tiers._stores._watermark = left + 5  # the first chain is enough for that
    (job,) = s.tiers.stores(1 << 30)
    for _ in range(3):
        assert s.tiers.stores(1 << 30) == []
    s.tiers.cancel(job)
    (job,) = s.tiers.stores(1 << 30)
    s.memory.copy(job)
    s.tiers.done(job)
    assert s.tiers.stores(1 << 30) == []
    s.tiers._stores._watermark = left + 30
    assert s.tiers.stores(1 << 30)
    s.check()


def test_what_is_evicted_before_it_is_stored_is_lost_and_counted():
    s = Setup()
    s.serve(PROMPT)
    s.forget()
    assert s.tiers.stats()["tier_lost/host"] > 0
    assert s.tiers.match([*PROMPT, 1]).num_tokens == 0


def test_an_entry_under_store_stays_readable_and_is_not_evicted():
    s = Setup(pages=40)
    s.serve(PROMPT)
    hit = s.e.kv.match([*PROMPT, 1]).num_tokens
    jobs = s.tiers.stores(1 << 30)
    assert jobs
    s.serve(PROMPT[:40:-1])
    s.forget()  # the newer one goes
    assert s.e.kv.match([*PROMPT, 1]).num_tokens == hit
    assert s.serve([*PROMPT, 1]).num_tokens == hit
    for job in jobs:
        s.memory.copy(job)
        s.tiers.done(job)
    s.forget()
    assert s.e.kv.match([*PROMPT, 1]).num_tokens == 0
    s.load([*PROMPT, 1])
    assert s.serve([*PROMPT, 1]).num_tokens == hit


def test_a_copy_under_store_is_spare_once_that_is_done():
    """A load brings to the device what the host is writing to the disk: it goes first, but not now."""
    s = Setup(pages=100, host=80, disk=200)
    s.serve(range(300, 400))
    s.serve(PROMPT)
    for job in s.tiers.stores(1 << 30):
        s.memory.copy(job)
        s.tiers.done(job)
    s.forget()
    jobs = s.tiers.stores(1 << 30, everything=True)
    keys = s.e.kv.match([*PROMPT, 1]).prompt.keys
    storing = next(job for job in jobs if job.parts.keys == keys[: len(job.parts.keys)])
    (point,) = storing.parts.entries
    for job in jobs:
        if job is not storing:
            s.tiers.cancel(job)
    s.load([*PROMPT, 1])
    host = s.tiers.tiers[0].index
    (other,) = {p for run in host.runs() for p in run.points.values()} - {point}
    host.evict(1)
    assert point.run is not None, "it went while it was read"
    assert other.run is None
    s.memory.copy(storing)
    s.tiers.done(storing)
    s.check()
    assert host.policy.is_spare(point)


def test_parents_come_first_and_a_point_with_the_last_of_its_chain():
    s = Setup()
    s.serve(PROMPT)
    seen: set[bytes] = set()
    while jobs := s.tiers.stores(2 * PAGE):  # a segment has a page
        for job in jobs:
            s.memory.copy(job)
            s.tiers.done(job)
            now = s.has("host")
            for key, chain in now.points.items():
                assert set(chain) <= now.segments, key
            assert seen <= now.segments
            seen = now.segments
    assert len(seen) == len(PROMPT) // 8 and s.has("host").points


def test_deep_dense_on_the_device_and_the_resume_point_on_the_host():
    s = Setup(pages=100)
    s.serve(PROMPT)
    s.store()
    lock = s.e.kv.match([*PROMPT, 1])
    index = s.e.kv.index
    run, depth = index.find(lock.prompt.keys, 99)
    run = index.end_at(run, depth)
    index.lock(run)  # as a request does that goes on from here
    s.forget()
    match = s.tiers.match([*PROMPT, 1])
    assert match.device.num_tokens == 0 < match.device.dense_tokens
    pages = sum(share.num_pages for share in match.shares)
    assert 0 < pages <= s.e.kv.layout.pages_per_point
    job = s.tiers.load(match)
    s.memory.copy(job)
    s.tiers.done(job)
    assert s.e.kv.match([*PROMPT, 1]).num_tokens == match.num_tokens > 0
    index.unlock(run)
    assert s.serve([*PROMPT, 1]).num_tokens == match.num_tokens


def test_windows_that_the_device_has_are_not_loaded():
    """A point at 104 reads tokens 94 to 103; the device has the block from 92 on, for its own at 96."""
    s = Setup(pages=100)
    longer = [*PROMPT, *range(9)]
    s.serve(longer)
    s.store()
    s.forget()
    s.serve(PROMPT)
    match = s.tiers.match(longer)
    assert (match.device.num_tokens, match.num_tokens) == (96, 104)
    assert match.shares[1].num_pages == 1 + 2  # a dense block, the windows' blocks from 96 on
    job = s.tiers.load(match)
    s.memory.copy(job)
    s.forget()  # the block that the load builds on stays
    s.check()
    s.tiers.done(job)
    assert s.serve(longer).num_tokens == 104


def test_dense_on_the_host_and_the_resume_point_on_the_disk():
    s = Setup(host=60, disk=300)
    s.serve(PROMPT)
    s.store()
    s.forget()
    host = s.tiers.tiers[0].index
    for run in list(host.runs()):
        for point in list(run.points.values()):
            host.drop_point(point)
    match = s.load([*PROMPT, 1])
    given = {share.place: (share.num_tokens, share.num_pages > 0) for share in match.shares}
    assert given["host"] == (96, True) and given["disk"] == (0, True)
    assert "96 from host" in match.explain() and "from disk" in match.explain()
    assert s.serve([*PROMPT, 1]).num_tokens == 96


def test_a_part_of_a_chain_that_goes_on_past_a_fork_comes_alone():
    s = Setup(pages=200, retention=32)
    s.serve(PROMPT)
    s.serve([*PROMPT[:40], *range(300, 340)])
    s.store()
    s.forget()
    match = s.load([*PROMPT, 1], max_tokens=34)
    assert match.num_tokens == 32 and s.e.kv.index.num_segments == 4
    assert s.serve([*PROMPT[:34], 1]).num_tokens == 32


def test_two_points_in_two_places_hold_what_is_between_them():
    """Windows of 33 tokens, segments of 8: points at 48 and 80 hold between them the tail of 64."""
    specs = groups((8, None), (8, 33))
    s = Setup(specs, pages=200, host=300, disk=None)
    s.serve(PROMPT[:48])
    s.serve(PROMPT[:80])
    s.store()
    s.forget()
    probe = [*PROMPT[:64], 999]
    match = s.load(probe)
    assert match.num_tokens == 64
    assert s.serve(probe).num_tokens == 64


def test_the_quickest_way_wins():
    slow = Setup(prefill=1e9, rate=1.0)
    slow.serve(PROMPT)
    assert not slow.store(), "what is computed sooner than loaded is not kept"
    s = Setup(prefill=1.0, rate=1e9)
    s.serve(PROMPT)
    s.store()
    s.forget()
    assert s.tiers.match([*PROMPT, 1]).num_bytes
    s.tiers._planner.prefill.value = 1e12
    match = s.tiers.match([*PROMPT, 1])
    assert match.num_bytes == 0 and match.limited_by == "slower"
    assert "longer than computing" in match.explain()
    assert s.tiers.load(match) is None


def test_a_prompt_is_loaded_without_a_match():
    """By one look-up in all places; a prompt that is nobody's is refused."""
    s = Setup()
    s.serve(PROMPT)
    s.store()
    s.forget()
    found = []
    look, s.tiers._planner.ways = s.tiers._planner.ways, lambda *a: found.append(a) or look(*a)
    job = s.tiers.load(s.e.kv.match([*PROMPT, 1]).prompt)
    assert len(found) == 1 and job.num_tokens == 96
    s.memory.copy(job)
    s.tiers.done(job)
    assert s.serve([*PROMPT, 1]).num_tokens == 96
    assert s.tiers.load(s.e.kv.match([*PROMPT, 1]).prompt) is None
    for wrong in ([*PROMPT, 1], None):
        with pytest.raises(ValueError, match=r"match: expected what `Tiers.match` returned, got"):
            s.tiers.load(wrong)


def test_one_budget_for_all_tiers():
    """Of what `stores` may copy, the device's entries come first and the host's get what is left."""
    s = Setup(pages=100, host=60, disk=200)
    s.serve([2, *PROMPT])
    for job in s.tiers.stores(1 << 30):  # to the host alone: nothing is there yet
        s.memory.copy(job)
        s.tiers.done(job)
    s.serve([3, *PROMPT])
    wanted = s.tiers.stores(1 << 30)
    pages = {name: sum(j.num_pages for j in wanted if j.copies[0].source == name) for name in ("device", "host")}  # fmt: skip
    assert pages["device"] > 4 and pages["host"] > 4
    for job in wanted:
        s.tiers.cancel(job)
    for budget in range(1, sum(pages.values()) + 2):
        made = s.tiers.stores(budget * PAGE)
        moved = [(j.copies[0].source, j.num_pages) for j in made]
        total = sum(n for _, n in moved)
        assert total <= max(budget, s.tiers._transfers.least_pages), (budget, moved)
        assert [source for source, _ in moved] == sorted(
            source for source, _ in moved
        )  # device, host
        if budget < pages["device"]:
            assert moved[0][0] == "device"
        for job in made:
            s.tiers.cancel(job)
    assert total == sum(pages.values())


def test_a_budget_for_each_tier():
    """What one tier takes leaves the other's budget alone; 0, or no name, is nothing."""
    s = Setup(pages=100, host=60, disk=200)
    s.serve([2, *PROMPT])
    for job in s.tiers.stores({"host": 1 << 30}):
        s.memory.copy(job)
        s.tiers.done(job)
    s.serve([3, *PROMPT])
    for budget in itertools.product([None, 0, 1, 4 * PAGE, 9 * PAGE, 1 << 30], repeat=2):
        room = dict(zip(("host", "disk"), budget, strict=True))
        made = s.tiers.stores({name: n for name, n in room.items() if n is not None})
        least = s.tiers._transfers.least_pages
        for name, n in room.items():
            pages = sum(job.num_pages for job in made if job.copies[0].target == name)
            assert pages <= max(n // PAGE, least) if n else not pages, (room, name)
            assert pages or not n, (room, name)
        for job in made:
            s.tiers.cancel(job)
    for wrong in ({"tape": 1}, {"device": 1}, {"host": -1}, {"host": 1.5}):
        with pytest.raises(ValueError, match=r"^max_bytes"):
            s.tiers.stores(wrong)
    assert not s.tiers.jobs


@pytest.mark.parametrize("host", [None, 20, 40, 80, 200])
@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_everything_goes_to_the_last_tier_whatever_room_the_one_before_has(specs, host):
    """What the host has goes from there, all else from the device, and nothing has to leave the host for it."""
    prompts = [range(100 * i, 100 * i + 100) for i in range(1, 11)]
    s = Setup(specs, pages=200, host=host, disk=400, policy=Adaptive(), watermark=0)
    for prompt in prompts:
        s.serve(prompt)
    for _ in range(40):  # the host's share of them, and refusals
        for job in s.tiers.stores(1 << 30):
            s.memory.copy(job)
            s.tiers.done(job)
    in_host = s.has("host").segments if host else set()
    for _ in range(60):
        for job in s.tiers.stores(16 * PAGE, everything=True):
            s.memory.copy(job)
            s.tiers.done(job)
    s.check()
    assert [
        s.tiers._planner.behind(s.e.kv.match([*p, 1]).prompt, 12)[-1].depth for p in prompts
    ] == [12] * 10
    if s.e.kv.hybrid:
        assert len(s.has("disk").points) == 10
    assert not host or s.has("host").segments == in_host


def test_what_found_no_room_is_tried_again_where_everything_is_asked_for():
    """A full tier whose entries are all needed refuses a store, for some calls; then there is room."""
    s = Setup(DENSE, pages=100, host=26, policy=LRU())
    s.serve(PROMPT)
    s.serve(range(300, 400))
    s.store()
    s.forget()
    held = [s.tiers.load(s.tiers.match([*p, 1])) for p in (PROMPT, range(300, 400))]
    s.serve(range(500, 600))
    for _ in range(100):
        assert s.tiers.stores(1 << 30) == []
    assert 0 < s.tiers.stats()["tier_refused_stores/host"] < 10
    for job in held:
        s.tiers.cancel(job)
    (job,) = s.tiers.stores(1 << 30, everything=True)
    s.tiers.cancel(job)


def test_what_is_queued_on_the_link_counts():
    s = Setup(rate=1e6, prefill=100.0)
    for i in (1, 2):
        s.serve([i, *PROMPT])
    s.store()
    s.forget()
    alone = s.tiers.match([1, *PROMPT, 1])
    job = s.tiers.load(s.tiers.match([2, *PROMPT, 1]))
    later = s.tiers.match([1, *PROMPT, 1])
    wait = job.num_bytes / 1e6
    assert later.seconds == pytest.approx(alone.seconds + wait)
    s.tiers.done(job, seconds=2 * wait)  # the link is slower than it was told to be
    assert s.tiers.tiers[0].bytes_per_second == pytest.approx(0.5**0.2 * 1e6)
    assert s.tiers.match([1, *PROMPT, 1]).seconds < later.seconds


def test_what_nobody_copied_stays_where_it_is():
    """Of a load and of a store that end early; what was copied counts, and no failure does."""
    s = Setup()
    s.serve(PROMPT)
    [store] = s.tiers.stores(1 << 30, everything=True)
    target = store.copies[0].targets[-1:]
    s.memory.copy(store)
    s.tiers.done(store, missing=target)
    stats = s.tiers.stats()
    assert (stats["tier_store_failures/host"], stats["tier_stored_pages/host"]) == (0, store.num_pages - 1)  # fmt: skip
    s.store()
    s.forget()
    whole = s.tiers.match([*PROMPT, 1])
    job = s.tiers.load(whole)
    s.memory.copy(job)
    missing = np.concatenate([c.targets for c in job.copies])[1:]
    s.tiers.done(job, missing=missing, seconds=5.0)
    stats = s.tiers.stats()
    assert (stats["tier_load_failures/host"], stats["tier_loaded_pages/host"]) == (0, 1)
    assert s.tiers.tiers[0].bytes_per_second == Setup().tiers.tiers[0].bytes_per_second
    again = s.tiers.match([*PROMPT, 1])
    assert (again.num_tokens, again.pending) == (whole.num_tokens, None)
    with pytest.raises(ValueError, match=r"^missing: expected pages that are targets of the job"):
        s.tiers.done(s.tiers.load(again), missing=[0])


def test_a_load_is_found_by_those_who_want_the_same():
    s = Setup()
    s.serve(PROMPT)
    s.store()
    s.forget()
    assert s.tiers.match([*PROMPT, 1]).pending is None
    job = s.tiers.load(s.tiers.match([*PROMPT, 1]))
    same = s.e.kv.match([*PROMPT, 2]).prompt
    assert s.tiers.match([*PROMPT, 2]).pending is s.tiers.pending(same) is job
    assert s.tiers.pending(s.e.kv.match([2, *PROMPT]).prompt) is None
    again = s.tiers.load(s.tiers.match([*PROMPT, 2]))  # twice is right, too
    for j in (job, again):
        s.memory.copy(j)
        s.tiers.done(j)
    s.check()
    assert s.tiers.match([*PROMPT, 2]).pending is None
    assert s.serve([*PROMPT, 1]).num_tokens > 0


def test_out_of_pages_changes_nothing():
    s = Setup(pages=32)
    s.serve(PROMPT)
    s.store()
    s.forget()
    s.e.admit("long", list(range(200, 350)))
    s.e.step({"long": 130})
    match = s.tiers.match([*PROMPT, 1])
    before = s.e.kv.stats()
    short = s.tiers.load(match)
    assert isinstance(short, OutOfPages) and short.needed > short.free + short.evictable
    assert sum(short.per_group.values()) == short.needed
    assert before == s.e.kv.stats() and not s.tiers.jobs
    s.check()


def test_copies_come_group_after_group_and_in_portions():
    s = Setup()
    s.serve(PROMPT)
    s.store()
    s.forget()
    job = s.tiers.load(s.tiers.match([*PROMPT, 1]))
    order = [c.group for c in job.copies]
    assert order == sorted(order) and len(set(order)) == 2
    assert all(c.sources.dtype == c.targets.dtype == np.int32 for c in job.copies)
    assert sum(map(len, job.copies)) == job.num_pages == job.num_bytes // PAGE
    portions = list(job.cut(3))
    assert [sum(map(len, p)) for p in portions[:-1]] == [3] * (len(portions) - 1)
    rows = [pair for p in portions for c in p for pair in zip(c.sources, c.targets, strict=True)]
    assert rows == [p for c in job.copies for p in zip(c.sources, c.targets, strict=True)]
    with pytest.raises(ValueError, match="max_pages: expected at least 1, got 0"):
        list(job.cut(0))
    s.tiers.cancel(job)
    s.check()


# Failure.


def test_a_load_that_fails_falls_back_to_the_next_shorter_point():
    s = Setup(retention=32, pages=200)
    s.serve(PROMPT)
    s.store()
    s.forget()
    match = s.tiers.match([*PROMPT, 1])
    job = s.tiers.load(match)
    s.memory.copy(job)
    bad = job.parts.segments[7, 0]  # tokens 56 to 63
    s.tiers.done(job, [bad])
    s.check()
    assert s.e.kv.match([*PROMPT, 1]).dense_tokens == 56
    assert s.tiers.stats()["tier_loaded_segments/host"] == 7
    shorter = s.load([*PROMPT, 1])
    assert shorter.num_tokens == 32
    assert s.serve([*PROMPT, 1]).num_tokens == 32
    assert s.tiers.stats()["tier_load_failures/host"] == 1


def test_a_window_page_that_fails_takes_its_point_alone():
    s = Setup()
    s.serve(PROMPT)
    s.store()
    s.forget()
    kept = s.has("host")
    job = s.tiers.load(s.tiers.match([*PROMPT, 1]))
    window = next(c for c in job.copies if c.group == 1)
    s.memory.copy(job)
    s.tiers.done(job, window.targets[:1])
    s.check()
    now = s.has("host")
    assert now.segments == kept.segments and len(now.points) < len(kept.points)
    assert s.e.kv.match([*PROMPT, 1]).dense_tokens == 96


def test_a_store_that_fails_is_tried_again_but_not_at_once():
    s = Setup(host=100)
    s.serve(PROMPT)
    (job, *_) = s.tiers.stores(1 << 30)
    s.tiers.done(job, job.copies[0].targets)
    for other in list(s.tiers.jobs):
        s.tiers.cancel(other)
    host = s.tiers.tiers[0]
    assert host.index.pool.num_free == 99 and not host.index.num_segments
    tries = [len(s.tiers.stores(1 << 30)) for _ in range(4)]
    for other in list(s.tiers.jobs):
        s.memory.copy(other)
        s.tiers.done(other)
    assert sum(tries) and not tries[0]
    s.store()
    s.forget()
    s.load([*PROMPT, 1])
    assert s.serve([*PROMPT, 1]).num_tokens == 96


def several_points(**options) -> tuple[Setup, Job]:
    """A store of one chain with the resume points at 4, 8 and 12 segments."""
    s = Setup(pages=200, retention=32, **options)
    s.serve(PROMPT)
    (job,) = s.tiers.stores(1 << 30)
    assert job.parts.depths == [4, 8, 12] and len(job.parts.segments) == 12
    return s, job


@pytest.mark.parametrize(
    ("segment", "point", "segments", "points"),
    [(8, None, 8, {4, 8}), (3, None, 3, set()), (None, 1, 12, {4, 12}), (9, 0, 9, {8})],
)
def test_a_store_of_several_points_fails_in_part(segment, point, segments, points):
    """A segment takes all that comes after it; a window page takes the points that hold it."""
    s, job = several_points()
    parts = job.parts
    failed = [] if segment is None else [parts.segments[segment, 0]]
    if point is not None:
        pages = parts.points[point][parts.points[point] != 0]
        others = np.delete(parts.points, point, axis=0)
        assert not np.isin(pages, others).any()  # 32 tokens are farther than windows reach
        failed.append(pages[0])
    s.memory.copy(job)
    s.tiers.done(job, failed)
    s.check()
    host, stats = s.tiers.tiers[0], s.tiers.stats()
    assert host.index.num_segments == segments == stats["tier_stored_segments/host"]
    assert {d for r in host.index.runs() for d in r.points} == points
    assert stats["tier_stored_points/host"] == len(points)
    for _ in range(4):
        s.store()  # what failed is tried again, though not at once
    assert {d for r in host.index.runs() for d in r.points} == {4, 8, 12}


def test_a_budget_ends_within_a_chain():
    """As many entries as it allows go, parents first; the rest goes another time."""
    s, job = several_points()
    total = job.num_pages
    s.tiers.cancel(job)
    seen = set()
    for pages in range(1, total + 1):
        (job, *_) = s.tiers.stores(pages * PAGE)
        parts = job.parts
        assert job.num_pages <= max(pages, s.tiers._transfers.least_pages)
        depths = [d for d in parts.depths if d <= len(parts.segments)]
        assert depths == parts.depths == [4, 8, 12][: len(depths)]
        seen.add((len(parts.segments), len(depths)))
        s.tiers.cancel(job)
    assert {(12, 3), (4, 1)} <= seen and len(seen) > 8
    s.check()


def test_windows_that_points_share_are_copied_once():
    """Several points of one job hold the same window pages."""
    s = Setup(specs=[HYBRID[0], GroupSpec("local", "window", 4, PAGE, 36)], pages=200, retention=32)
    s.serve(PROMPT)
    (job,) = s.tiers.stores(1 << 30)
    points = job.parts.points
    assert len(points) == 3 and set(points[0]) & set(points[1]) - {0}
    assert job.num_pages == 12 + len(set(points.ravel().tolist()) - {0})
    shared = sorted(set(points[0].tolist()) & set(points[1].tolist()) - {0})[0]
    s.memory.copy(job)
    s.tiers.done(job, [shared])  # takes both
    s.check()
    host = s.tiers.tiers[0]
    assert {d for r in host.index.runs() for d in r.points} == {12}


def test_a_job_ends_once_and_with_pages_of_its_own():
    s = Setup()
    s.serve(PROMPT)
    job = s.tiers.stores(1 << 30)[0]
    with pytest.raises(ValueError, match="failed: expected pages that are targets"):
        s.tiers.done(job, [10**6])
    assert job.is_open
    s.tiers.cancel(job)
    for call in (s.tiers.done, s.tiers.cancel):
        with pytest.raises(ValueError, match="job: expected one that is open"):
            call(job)
    with pytest.raises(ValueError, match="match: expected what"):
        s.tiers.load(s.e.kv.match(PROMPT))


def test_a_policy_that_raises_leaves_everything_as_it_was():
    class Moody(Ranked):
        fails = False

        def rank(self, entry):
            return entry.last_used

        def pop(self):
            if self.fails:
                raise KeyError("mood")
            return super().pop()

    policy = Moody()
    s = Setup(policy_of_host=policy, host=30)
    for i in range(4):
        s.serve([i, *PROMPT[:60]])
        policy.fails = i == 3
        if policy.fails:
            with pytest.raises(KeyError):
                s.store()
        else:
            s.store()
    s.check()
    policy.fails = False
    s.store()


# Other calls while jobs are open.


@pytest.mark.parametrize("end", ["done", "cancel"])
@pytest.mark.parametrize("kind", ["store", "load"])
def test_clear_while_a_job_is_open(kind, end):
    s = Setup()
    s.serve(PROMPT)
    if kind == "load":
        s.store()
        s.forget()
        jobs = [s.tiers.load(s.tiers.match([*PROMPT, 1]))]
    else:
        jobs = s.tiers.stores(1 << 30)
    s.e.kv.clear()
    s.check()
    with pytest.raises(ValueError, match="reset: expected no open jobs of tiers, got"):
        s.e.kv.reset()
    for job in jobs:
        s.memory.copy(job)
        getattr(s.tiers, end)(job)
    s.check()
    assert s.tiers.match([*PROMPT, 1]).dense_tokens == 0, "what was cached before comes back"
    s.serve(PROMPT)
    assert s.store()
    s.e.kv.reset()
    assert s.e.kv.num_free_pages == s.e.kv.num_pages - 1


def test_wrong_rows_are_not_kept_elsewhere():
    s = Setup()
    s.serve(PROMPT)
    s.store()
    keys = s.e.kv.match([*PROMPT, 1]).prompt.keys
    run, _ = s.e.kv.index.find(keys, 12)
    page = int(s.e.kv.index.pages_between(run, 5, 6)[0, 0])
    s.e.kv.evict_pages([page])
    assert s.tiers.match([*PROMPT, 1]).dense_tokens == 40
    s.check()


def test_wrong_rows_under_store_do_not_get_there():
    s = Setup()
    s.serve(PROMPT)
    jobs = s.tiers.stores(1 << 30)
    page = int(jobs[0].copies[0].sources[0])
    s.e.kv.evict_pages([page])
    for job in jobs:
        s.memory.copy(job)
        s.tiers.done(job)
    s.check()
    assert not s.has("host").segments


def _wrong_page(s: Setup, segment: int) -> int:
    """The dense page of a segment of `PROMPT` on the device."""
    run, _ = s.e.kv.index.find(s.e.kv.match([*PROMPT, 1]).prompt.keys, 12)
    return int(s.e.kv.index.pages_between(run, segment, segment + 1)[0, 0])


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_wrong_rows_on_their_way_to_the_disk_do_not_get_there(specs):
    """The host's copy is locked while it is written: that store ends too, and the copy goes."""
    s = Setup(specs, pages=100, host=200, disk=200)
    s.serve(PROMPT)
    for job in s.tiers.stores(1 << 30):
        s.memory.copy(job)
        s.tiers.done(job)
    jobs = s.tiers.stores(1 << 30, everything=True)
    assert [job.copies[0].target for job in jobs] == ["disk"]
    assert not len(s.e.kv.evict_pages([_wrong_page(s, 5)]))
    assert all(job.parts.is_void for job in jobs)
    assert s.tiers.match([*PROMPT, 1]).dense_tokens == 40
    for job in jobs:
        s.memory.copy(job)
        s.tiers.done(job)
    s.check()
    assert s.tiers.match([*PROMPT, 1]).dense_tokens == 40 and not s.has("disk").segments


def test_wrong_rows_on_their_way_to_the_device_do_not_get_there():
    """A load that builds on a wrong segment brings nothing; one of another prompt does."""
    s = Setup(DENSE, pages=100)
    s.serve(PROMPT)
    s.serve(range(300, 400))
    s.store()
    s.forget()
    s.serve(PROMPT[:56])
    jobs = [s.tiers.load(s.tiers.match([*p, 1])) for p in (PROMPT, range(300, 400))]
    s.e.kv.evict_pages([_wrong_page(s, 5)])
    assert [job.parts.is_void for job in jobs] == [True, False]
    for job in jobs:
        s.memory.copy(job)
        s.tiers.done(job)
    s.check()
    assert s.tiers.match([*PROMPT, 1]).dense_tokens == 40
    assert s.e.kv.match([*range(300, 400), 1]).num_tokens == 96


@pytest.mark.parametrize("is_open", [False, True], ids=["stored", "under-store"])
def test_a_wrong_window_block_leaves_points_that_the_device_has_not(is_open):
    """The host has a point before that of the device, which shares its last block."""
    s = Setup(pages=100, host=200, disk=200)
    s.serve(PROMPT[:96])
    for job in s.tiers.stores(1 << 30):
        s.memory.copy(job)
        s.tiers.done(job)
    s.serve([*PROMPT[:96], *range(500, 508)])
    index = s.e.kv.index
    points = {p.depth: p for run in index.runs() for p in run.points.values()}
    page = int(points[12].pages[-1])
    assert page in points[13].pages
    jobs = s.tiers.stores(1 << 30, everything=True) if is_open else []
    jobs = [job for job in jobs if job.copies[0].target == "disk"]
    assert len(jobs) == is_open
    for point in list(points.values()):
        if point.depth != 13:
            index.drop_point(point)
    s.e.kv.evict_pages([page])
    for job in jobs:
        s.memory.copy(job)
        s.tiers.done(job)
    s.check()
    keys = s.e.kv.match([*PROMPT[:96], 1]).prompt.keys
    for name in ("host", "disk"):
        assert keys[11 * 32 : 12 * 32] not in s.has(name).points
    assert keys[11 * 32 : 12 * 32] in s.has("host").segments, "dense blocks are right"


def test_forks_share_a_wrong_window_block():
    """They part within the segment after it, and so have other keys: the points of both go."""
    s = Setup(pages=100)
    s.e.admit("a", PROMPT[:20])
    s.e.finish_prompt("a")
    fork = s.e.kv.fork(s.e.slots["a"], "b")
    s.e._copy(fork.copies)
    s.e.slots["b"], s.e.tokens["b"] = fork.slot, list(s.e.tokens["a"])
    s.e.salts["b"], s.e.replays["b"] = b"", (0, 0)
    for name in "ab":
        s.e.decode(name, [ord(name)] * 4)
    page = int(s.e.kv.table(1)[s.e.slots["a"]][20 // 4 - 1])
    assert page == s.e.kv.table(1)[s.e.slots["b"]][20 // 4 - 1]
    s.e.release("b")
    s.store()
    s.forget()
    assert {len(chain) for chain in s.has("host").points.values()} == {2, 3}
    s.e.release("a")
    s.e.kv.evict_pages([page])
    assert {len(chain) for chain in s.has("host").points.values()} == {2}
    s.check()


def test_a_snapshot_is_not_restored_among_open_jobs():
    s = Setup()
    s.serve(PROMPT)
    data = snapshot.dumps(s.e.kv)
    s.store()
    s.forget()
    job = s.tiers.load(s.tiers.match([*PROMPT, 1]))
    with pytest.raises(ValueError, match="kv: expected no open jobs of tiers"):
        snapshot.loads(s.e.kv, data)
    s.tiers.cancel(job)


def test_tenants_do_not_meet():
    s = Setup()
    s.serve(PROMPT, salt=b"one")
    s.store()
    s.forget()
    assert s.tiers.match([*PROMPT, 1], salt=b"two").dense_tokens == 0
    assert s.tiers.match([*PROMPT, 1], salt=b"one").num_tokens == 96


# What else there is.


def test_spare_copies_go_first():
    s = Setup(pages=200)
    for i in (1, 2):
        s.serve([i, *PROMPT])
    s.store()
    s.forget()
    s.load([2, *PROMPT, 1])  # the newest in the host, and on the device now
    host = s.tiers.tiers[0].index
    host.evict(1)
    s.forget()
    assert s.tiers.match([1, *PROMPT, 1]).num_tokens == 96
    assert s.tiers.match([2, *PROMPT, 1]).num_tokens == 0


def test_a_copy_is_spare_no_more_once_the_device_evicts():
    s = Setup(pages=200)
    for i in (1, 2):
        s.serve([i, *PROMPT])
    s.store()
    s.forget()
    s.load([2, *PROMPT, 1])
    s.forget()
    s.tiers.tiers[0].index.evict(1)
    assert s.tiers.match([2, *PROMPT, 1]).num_tokens == 96
    assert s.tiers.match([1, *PROMPT, 1]).num_tokens == 0


def test_a_restart_finds_what_the_journal_kept():
    journal = DictJournal()
    s = Setup(host=None, disk=100, journal=journal)
    for i in range(3):
        s.serve([i, *PROMPT], salt=b"x")
        s.store()
    kept, rows = s.has("disk"), s.memory.rows["disk"]
    new = Setup(host=None, disk=100, journal=journal)
    new.memory.rows["disk"] = rows
    found = new.has("disk")
    assert found.segments == kept.segments and found.points == kept.points and kept.points
    new.check()
    new.load([2, *PROMPT, 1], salt=b"x")
    assert new.serve([2, *PROMPT, 1], salt=b"x").num_tokens == 96
    for i in range(5, 12):  # and it evicts what it found
        new.serve([i, *PROMPT])
        new.store()
    new.check()
    # A journal raises at a record whose pages another one has still.
    assert new.tiers.stats()["tier_journal_errors/disk"] == 0
    assert not kept.segments <= new.has("disk").segments


@pytest.mark.parametrize("specs", [HYBRID, DENSE, STATE], ids=["hybrid", "dense", "state"])
@pytest.mark.parametrize("lossy", [False, True], ids=["exact", "lossy"])
def test_a_disk_and_a_snapshot_survive_a_restart_together(specs, lossy):
    """The device has one prompt, the disk two; every row that the new process reads is checked."""
    journal = DictJournal()
    s = Setup(specs, host=None, disk=300, journal=journal, lossy=lossy)
    for i in range(2):
        s.serve([i, *PROMPT])
        s.store()
        s.forget()
    s.load([1, *PROMPT, 1])
    s.serve([2, *PROMPT[:60]])
    data = snapshot.dumps(s.e.kv)
    known = [s.e.kv.match([i, *PROMPT, 1]) for i in range(3)]
    assert known[0].num_tokens == 0 < known[2].num_tokens < known[1].num_tokens
    new = Setup(specs, host=None, disk=300, journal=journal, lossy=lossy)
    snapshot.loads(new.e.kv, data)
    new.memory.rows["disk"] = s.memory.rows["disk"]
    pages = snapshot.page_ids(new.e.kv)
    for rows, old in zip(new.e.rows, s.e.rows, strict=True):
        rows[pages] = old[pages]
    new.e._poisoned[pages] = False
    new.check()
    assert [new.e.kv.match(match.prompt) for match in known] == known
    assert (known[1].lossy_tokens > 0) == lossy
    assert new.tiers.match([1, *PROMPT, 1]).num_bytes == 0
    new.load([0, *PROMPT, 1])
    for i in (0, 2, 1, *range(5, 9)):
        new.serve([i, *PROMPT, 1])
        new.store()
    assert new.tiers.match([2, *PROMPT, 1]).num_tokens == known[1].num_tokens
    new.check()


def test_records_that_fit_nowhere_are_removed():
    journal = DictJournal()
    s = Setup(host=None, disk=100, journal=journal)
    s.serve(PROMPT)
    s.store()
    segments = [r for r in journal.records() if r.kind == "segment"]
    del journal.kept["segment", segments[6].key]
    new = Setup(host=None, disk=100, journal=journal)
    assert len(new.has("disk").segments) == 6
    assert len(journal.kept) == 6 + len(new.has("disk").points)
    new.check()


def test_a_journal_that_fails_ends_the_stores_and_nothing_else():
    journal = DictJournal()
    s = Setup(host=None, disk=100, journal=journal)
    s.serve(PROMPT)
    s.store()
    journal.fails = True
    s.serve([7, *PROMPT])
    s.store()
    assert s.tiers.stats()["tier_journal_errors/disk"] == 1
    s.serve([8, *PROMPT])
    assert not s.store()
    s.forget()
    s.load([*PROMPT, 1])
    assert s.serve([*PROMPT, 1]).num_tokens == 96


def test_events_of_tiers_name_salts():
    """Of what was computed, of its copy, and of what came back."""
    log = EventLog(identities=True)
    s = Setup(host=40, events=log)
    s.serve(PROMPT, salt=b"tenant")
    s.store()
    s.forget()
    first = log.take()[1]
    s.load(PROMPT, salt=b"tenant")
    for events, media in [(first, {"GPU", "CPU"}), (log.take()[1], {"GPU"})]:
        stored = [event for event in events if isinstance(event, BlockStored)]
        assert {event.medium for event in stored if event.kind == "dense"} == media
        assert {event.salt for event in stored} == {b"tenant"}


def test_events_say_where():
    log = EventLog()
    s = Setup(host=40, disk=100, events=log)
    stored: dict[str, set] = {"GPU": set(), "CPU": set(), "DISK": set()}
    points: dict[str, set] = {"GPU": set(), "CPU": set(), "DISK": set()}

    def read():
        for event in log.take()[1]:
            if isinstance(event, BlockStored | BlockRemoved):
                where = stored if event.kind == "dense" else points
                hashes = event.block_hashes if event.kind == "dense" else event.block_hashes[-1:]
                if isinstance(event, BlockStored):
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    where[event.medium].update(hashes)
                else:
                    where[event.medium] -= set(hashes)
            else:
                for places in (stored, points):
                    for found in places.values():
                        found.clear()

    def same():
        read()
        for medium, index in [
            ("GPU", s.e.kv.index),
            *zip(("CPU", "DISK"), (t.index for t in s.tiers.tiers), strict=True),
        ]:
            contents = Contents(index)
            assert stored[medium] == contents.segments
            assert points[medium] == contents.points.keys()

    for i in range(4):
        s.serve([i, *PROMPT])
        s.store()
        s.forget()
        same()
    s.load([1, *PROMPT, 1])
    same()
    assert stored["GPU"] and stored["CPU"] and stored["DISK"]
    s.e.kv.announce()
    for places in (stored, points):
        for found in places.values():
            found.clear()
    same()
    s.e.kv.clear()
    same()
    assert not (stored["CPU"] or points["DISK"])


def test_stats_by_tier():
    s = Setup(disk=100)
    s.serve(PROMPT)
    s.store()
    stats = s.e.kv.stats()
    assert stats["tier_stored_segments/host"] == 12 and stats["tier_stored_points/host"] >= 1
    assert stats["tier_stored_pages/host"] == sum(
        1 for r in s.memory.rows["host"][0] if (r != -1).any()
    ) + sum(1 for r in s.memory.rows["host"][1] if (r != -1).any())
    assert stats["tier_loaded_pages/disk"] == 0
    s.forget()
    job = s.tiers.load(s.tiers.match([*PROMPT, 1]))
    assert s.tiers.stats()["tier_queued_bytes/host"] == job.num_bytes
    s.memory.copy(job)
    s.tiers.done(job)
    stats = s.e.kv.stats()
    assert (
        stats["tier_loaded_pages/host"] == job.num_pages and stats["tier_loaded_points/host"] == 1
    )


def test_what_tiers_refuse():
    kv = KVCache(HYBRID, num_pages=40, max_requests=1, max_model_len=100)
    spec = TierSpec(10, 1e9)
    with pytest.raises(ValueError, match="host, disk: expected at least one TierSpec"):
        Tiers(kv, prefill_tokens_per_second=1.0)
    with pytest.raises(ValueError, match="host: expected a TierSpec, got 3"):
        Tiers(kv, host=3, prefill_tokens_per_second=1.0)
    with pytest.raises(ValueError, match="prefill_tokens_per_second: expected a finite number > 0"):
        Tiers(kv, host=spec, prefill_tokens_per_second=0)
    with pytest.raises(ValueError, match="bytes_per_second: expected a finite number > 0, got nan"):
        TierSpec(10, float("nan"))
    with pytest.raises(ValueError, match="num_pages: expected an int >= 2"):
        TierSpec(1, 1.0)
    other = AppendOnlyCache(HYBRID, num_pages=40, max_model_len=100)
    with pytest.raises(ValueError, match="kv: expected a KVCache, got <"):
        Tiers(other, host=TierSpec(10, 1e9), prefill_tokens_per_second=1.0)
    off = KVCache(HYBRID, num_pages=40, max_requests=1, max_model_len=100, enable_caching=False)
    with pytest.raises(ValueError, match="kv: expected a cache with enable_caching"):
        Tiers(off, host=spec, prefill_tokens_per_second=1.0)
    tiers = Tiers(kv, host=spec, prefill_tokens_per_second=1.0)
    with pytest.raises(ValueError, match="kv: expected a cache without tiers"):
        Tiers(kv, host=TierSpec(10, 1.0), prefill_tokens_per_second=1.0)
    with pytest.raises(ValueError, match="max_bytes: expected an int >= 0, got -1"):
        tiers.stores(-1)
