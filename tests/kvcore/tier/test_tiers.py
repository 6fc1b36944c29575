"""What the host tier promises, sentence by sentence."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import (
    LRU,
    EventLog,
    GroupSpec,
    KVCache,
    OutOfPages,
    Ranked,
)
from quire.kvcore.events import BlockRemoved, BlockStored
from quire.kvcore.tier import Job, Tiers, TierSpec
from tests.support.kvcore.engine import Engine, groups
from tests.support.kvcore.tiers import Contents, Memory

HYBRID = groups((8, None), (4, 10))
DENSE = groups((8, None))
STATE = groups((4, None), GroupSpec("state", "state", 4, 4096))
WINDOWS = groups((4, 10), (4, 20))
PAGE = 4096


class Setup:
    """An engine of one cache, with a host tier behind it and its memory."""

    def __init__(self, specs=HYBRID, pages=60, host=200, **options):
        cache = {"retention": "latest", "policy": LRU(), "max_requests": 4, "max_model_len": 300}
        names = {"prefill", "watermark", "rate", "policy_of_host", "lossy"}
        mine = {n: options.pop(n) for n in names & options.keys()}
        self.e = Engine(specs, num_pages=pages, **cache | options)
        rate, lossy = mine.get("rate", 1e9), mine.get("lossy", False)
        policy = mine.get("policy_of_host", LRU())
        self.tiers = Tiers(
            self.e.kv, host=TierSpec(host, rate, policy, lossy=lossy),
            prefill_tokens_per_second=mine.get("prefill", 1.0), watermark=mine.get("watermark", pages),
        )  # fmt: skip
        self.memory = Memory(self.e, self.tiers)
        self.ids = 0

    def serve(self, tokens, answer=(), salt=b"", chunk=64):
        """A whole request; every row that it reads is checked."""
        self.ids += 1
        return self.e.run(self.ids, list(tokens), list(answer), chunk, salt)

    def store(self, max_bytes=1 << 30) -> list[Job]:
        """Store what is due, until nothing is."""
        done = []
        while jobs := self.tiers.stores(max_bytes):
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
        came, share = self.tiers.done(job), match.shares[1]
        assert came.place == share.place == "host"
        assert (came.num_tokens, came.num_pages) == (share.num_tokens, share.num_pages)
        self.check()
        return match

    def forget(self):
        """Evict everything that no request needs from the device."""
        self.e.kv.evict(self.e.kv.num_pages)

    def check(self):
        self.e.check()
        self.memory.check()
        self.memory.poison_free_pages()

    def has(self) -> Contents:
        """What the host holds."""
        return Contents(self.tiers.host.index)


PROMPT = list(range(1, 101))


@pytest.mark.parametrize("specs", [HYBRID, DENSE, STATE], ids=["hybrid", "dense", "state"])
def test_a_prefix_comes_back_as_it_left(specs):
    s = Setup(specs)
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


def test_what_is_clean_is_not_written_again():
    s = Setup()
    s.serve(PROMPT)
    assert s.store()
    for _ in range(3):
        s.forget()
        s.load([*PROMPT, 1])
        assert not s.tiers.stores(1 << 30), "it bounces, and is written once"


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


def test_parents_come_first_and_a_point_with_the_last_of_its_chain():
    s = Setup()
    s.serve(PROMPT)
    seen: set[bytes] = set()
    while jobs := s.tiers.stores(2 * PAGE):  # a segment has a page
        for job in jobs:
            s.memory.copy(job)
            s.tiers.done(job)
            now = s.has()
            for key, chain in now.points.items():
                assert set(chain) <= now.segments, key
            assert seen <= now.segments
            seen = now.segments
    assert len(seen) == len(PROMPT) // 8 and s.has().points


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
    s = Setup(specs, pages=200, host=300)
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


def test_what_found_no_room_is_tried_again():
    """A full host whose entries are all needed refuses a store, for some calls; then there is room."""
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
    assert any(s.tiers.stores(1 << 30) for _ in range(200))


def test_what_is_lost_again_and_again_is_stored_less_and_less_often():
    """A host with room for one prompt of four, all of which are to have a copy."""
    s = Setup(pages=200, host=20)
    for i in range(4):
        s.serve([i, *PROMPT])
    stored = []
    for _ in range(1000):
        jobs = s.tiers.stores(1 << 30)
        stored.append(len(jobs))
        for job in jobs:
            s.memory.copy(job)
            s.tiers.done(job)
    s.check()
    assert 4 < sum(stored) < 4 * 11 and sum(stored[500:]) <= 4 * 2


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
    assert s.tiers.host.bytes_per_second == pytest.approx(0.5**0.2 * 1e6)
    assert s.tiers.match([1, *PROMPT, 1]).seconds < later.seconds


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
    kept = s.has()
    job = s.tiers.load(s.tiers.match([*PROMPT, 1]))
    window = next(c for c in job.copies if c.group == 1)
    s.memory.copy(job)
    s.tiers.done(job, window.targets[:1])
    s.check()
    now = s.has()
    assert now.segments == kept.segments and len(now.points) < len(kept.points)
    assert s.e.kv.match([*PROMPT, 1]).dense_tokens == 96


def test_a_store_that_fails_is_tried_again_but_not_at_once():
    s = Setup(host=100)
    s.serve(PROMPT)
    (job, *_) = s.tiers.stores(1 << 30)
    s.tiers.done(job, job.copies[0].targets)
    for other in list(s.tiers.jobs):
        s.tiers.cancel(other)
    host = s.tiers.host
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
    host, stats = s.tiers.host, s.tiers.stats()
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
    host = s.tiers.host
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
    assert not s.has().segments


def _wrong_page(s: Setup, segment: int) -> int:
    """The dense page of a segment of `PROMPT` on the device."""
    run, _ = s.e.kv.index.find(s.e.kv.match([*PROMPT, 1]).prompt.keys, 12)
    return int(s.e.kv.index.pages_between(run, segment, segment + 1)[0, 0])


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
    s = Setup(pages=100, host=200)
    s.serve(PROMPT[:96])
    jobs = s.tiers.stores(1 << 30)
    if not is_open:
        for job in jobs:
            s.memory.copy(job)
            s.tiers.done(job)
    s.serve([*PROMPT[:96], *range(500, 508)])
    index = s.e.kv.index
    points = {p.depth: p for run in index.runs() for p in run.points.values()}
    page = int(points[12].pages[-1])
    assert page in points[13].pages
    for point in list(points.values()):
        if point.depth != 13:
            index.drop_point(point)
    s.e.kv.evict_pages([page])
    for job in jobs if is_open else ():
        s.memory.copy(job)
        s.tiers.done(job)
    s.check()
    keys = s.e.kv.match([*PROMPT[:96], 1]).prompt.keys
    assert keys[11 * 32 : 12 * 32] not in s.has().points
    assert is_open or keys[11 * 32 : 12 * 32] in s.has().segments, "dense blocks are right"


def test_tenants_do_not_meet():
    s = Setup()
    s.serve(PROMPT, salt=b"one")
    s.store()
    s.forget()
    assert s.tiers.match([*PROMPT, 1], salt=b"two").dense_tokens == 0
    assert s.tiers.match([*PROMPT, 1], salt=b"one").num_tokens == 96


# What else there is.


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
    s = Setup(host=40, events=log)
    stored: dict[str, set] = {"GPU": set(), "CPU": set()}
    points: dict[str, set] = {"GPU": set(), "CPU": set()}

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
        for medium, index in [("GPU", s.e.kv.index), ("CPU", s.tiers.host.index)]:
            contents = Contents(index)
            assert stored[medium] == contents.segments
            assert points[medium] == contents.points.keys()

    for i in range(4):
        s.serve([i, *PROMPT])
        s.store()
        s.forget()
        same()
    s.load([3, *PROMPT, 1])
    same()
    assert stored["GPU"] and stored["CPU"]
    s.e.kv.announce()
    for places in (stored, points):
        for found in places.values():
            found.clear()
    same()
    s.e.kv.clear()
    same()
    assert not (stored["CPU"] or points["CPU"])


def test_stats_by_tier():
    s = Setup()
    s.serve(PROMPT)
    s.store()
    stats = s.e.kv.stats()
    assert stats["tier_stored_segments/host"] == 12 and stats["tier_stored_points/host"] >= 1
    assert stats["tier_stored_pages/host"] == sum(
        1 for r in s.memory.rows["host"][0] if (r != -1).any()
    ) + sum(1 for r in s.memory.rows["host"][1] if (r != -1).any())
    assert stats["tier_loaded_pages/host"] == 0
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
    with pytest.raises(ValueError, match="host: expected a TierSpec, got 3"):
        Tiers(kv, host=3, prefill_tokens_per_second=1.0)
    with pytest.raises(ValueError, match="prefill_tokens_per_second: expected a finite number > 0"):
        Tiers(kv, host=spec, prefill_tokens_per_second=0)
    with pytest.raises(ValueError, match="bytes_per_second: expected a finite number > 0, got nan"):
        TierSpec(10, float("nan"))
    with pytest.raises(ValueError, match="num_pages: expected an int >= 2"):
        TierSpec(1, 1.0)
    other = object()
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
