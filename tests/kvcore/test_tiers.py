"""A host tier behind a cache: look-ups in both places, the choice of stores, and ends of jobs.

`shadow` compares the rows that jobs copy; these tests have none.
"""

from collections import Counter

import pytest

from quire.kvcore import LRU, Adaptive, EventLog, Ranked
from quire.kvcore.events import BlockStored
from quire.kvcore.invariants import check_index
from quire.kvcore.tier import Job, TierMatch, Tiers
from tests.kvcore.engine import Runner

HYBRID = (8, None), (4, 10)
DENSE = ((8, None),)
PAGE = 4096  # bytes
ALL = 1 << 30  # bytes
PROMPT = list(range(1, 101))
LONGER = [*PROMPT, 1]  # 96 tokens of it are whole segments of 8


class Setup:
    """A cache whose every entry is due for the host, and to which every load is worth its time.

    Args:
        options: of the `Runner`; policy_of_host, rate, prefill and watermark of the tier.
    """

    def __init__(self, specs=HYBRID, pages=60, host=200, **options):
        policy = options.pop("policy_of_host", LRU())
        rate, prefill = options.pop("rate", 1e9), options.pop("prefill", 1.0)
        cache = {"retention": "latest", "policy": LRU(), "max_model_len": 300}
        self.e = Runner(*specs, num_pages=pages, **cache | options)
        self.kv = self.e.kv
        self.tiers = Tiers(
            self.kv, num_pages=host, bytes_per_second=rate, policy=policy,
            prefill_tokens_per_second=prefill, watermark=pages,
        )  # fmt: skip

    def serve(self, tokens, **keys) -> int:
        """Run a whole request; returns the tokens of its hit."""
        return self.e.run("r", tokens, **keys).num_tokens

    def end(self, *jobs: Job) -> None:
        for job in jobs:
            self.tiers.done(job)
            self.check()

    def store(self) -> list[Job]:
        """Store what is due, until nothing is."""
        done = []
        while jobs := self.tiers.stores(ALL):
            self.end(*jobs)
            done += jobs
        return done

    def load(self, tokens, **keys) -> TierMatch:
        """Load what a prompt needs; returns the match before."""
        match = self.tiers.match(tokens, **keys)
        self.end(self.tiers.load(match))
        return match

    def behind(self, *prompts) -> None:
        """Have prompts in the host alone."""
        for prompt in prompts:
            self.serve(prompt)
        self.store()
        self.kv.evict(self.kv.num_pages)

    def check(self) -> None:
        self.kv.check_invariants()
        check_index(self.tiers.index, [], [], [], Counter())


# Look-ups.


def test_what_comes_from_where_and_why_it_is_not_more():
    s, dense = Setup(), Setup(DENSE)
    s.behind(PROMPT)
    dense.behind(PROMPT)
    match = s.tiers.match(LONGER)
    pages = 12 + s.kv.layout.pages_per_point
    assert match.num_bytes == pages * PAGE and match.seconds == pytest.approx(pages * PAGE / 1e9)
    assert (match.num_saved_tokens, match.dense_tokens, match.limited_by) == (96, 96, "prompt-end")
    for tiers, prompt, said in (
        (
            s.tiers,
            LONGER,
            "96 of 101 tokens, 0 of them on the device, 0.0586 MiB to load (0.0614 ms)",
        ),
        (s.tiers, [7, *PROMPT], ": nothing of this prompt is in the cache or the host"),
        (s.tiers, [*PROMPT[:50], *PROMPT], ": dense blocks reach 48, but no resume point does"),
        (dense.tiers, [*PROMPT[:50], *PROMPT], "chain in cache and host ends, or differs from the"),
    ):
        assert said in tiers.match(prompt).explain()
    s.tiers.prefill_tokens_per_second = 1e12
    slower = s.tiers.match(LONGER)
    assert slower.num_bytes == 0 and slower.limited_by == "slower"
    assert "longer than computing" in slower.explain() and s.tiers.load(slower) is None
    s.tiers.prefill_tokens_per_second = 1.0
    s.load(LONGER)
    assert "96 of them on the device: every segment before" in s.tiers.match(LONGER).explain()
    slow = Setup(prefill=1e9, rate=1.0)
    slow.serve(PROMPT)
    assert not slow.store(), "nor is it kept"


def test_what_is_queued_on_the_link_counts():
    s = Setup(rate=1e6, prefill=100.0)
    s.behind([1, *PROMPT], [2, *PROMPT])
    alone = s.tiers.match([1, *PROMPT, 1])
    job = s.tiers.load(s.tiers.match([2, *PROMPT, 1]))
    later = s.tiers.match([1, *PROMPT, 1])
    assert later.seconds == pytest.approx(alone.seconds + job.num_bytes / 1e6)
    s.end(job)
    assert s.tiers.match([1, *PROMPT, 1]).seconds == alone.seconds


def test_a_load_is_found_by_those_who_want_the_same():
    s = Setup()
    s.behind(PROMPT)
    assert s.tiers.match(LONGER).pending is None
    job = s.tiers.load(s.tiers.match(LONGER))
    assert s.tiers.match([*PROMPT, 2]).pending is job
    assert s.tiers.match([2, *PROMPT]).pending is None
    s.end(job)
    assert s.tiers.match([*PROMPT, 2]).pending is None


# Stores.


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_stores_under_way_count(specs):
    """Pages that open stores will free need no other store."""
    s = Setup(specs, pages=200)
    for i in range(4):
        s.serve([i, *PROMPT])
    stores = s.tiers._stores
    stores._watermark = s.kv.num_free_pages + 5  # the first chain is enough for that
    [job] = s.tiers.stores(ALL)
    for _ in range(3):
        assert s.tiers.stores(ALL) == []
    s.end(job)
    assert s.tiers.stores(ALL) == []
    stores._watermark += 25
    assert s.tiers.stores(ALL)


def test_what_is_clean_is_not_written_again():
    s = Setup()
    s.serve(PROMPT)
    assert s.store()
    for _ in range(3):
        s.kv.evict(60)
        s.load(LONGER)
        assert not s.tiers.stores(ALL), "it bounces, and is written once"


@pytest.mark.parametrize(("specs", "host"), [(HYBRID, 32), (DENSE, 25)], ids=["hybrid", "dense"])
def test_a_copy_counts_as_used_when_its_entry_would_be_stored_again(specs, host):
    """Use on the device counts: of two copies the host evicts that of the entry used earlier."""
    s = Setup(specs, pages=200, host=host)
    for i in (1, 2):
        s.serve([i, *PROMPT])
        s.store()
    s.serve([1, *PROMPT])
    assert not s.store()
    s.serve([3, *PROMPT])
    s.store()
    s.kv.evict(60)
    found = [s.tiers.match([i, *PROMPT, 1]).num_saved_tokens for i in (1, 2, 3)]
    assert found == [96, 0, 96]


def test_a_host_that_is_too_small_is_not_written_over_and_over():
    s = Setup(pages=200, host=20)
    for i in range(4):
        s.serve([i, *PROMPT])
    assert len(s.store()) == 4
    for _ in range(20):
        assert not s.tiers.stores(ALL)


def test_a_budget_ends_within_a_chain():
    """The first segments go alone, at least one; the rest, and the resume point, another time."""
    s = Setup()
    s.serve(PROMPT)
    for pages, segments in ((1, 1), (0, None), (3, 4), (100, 12)):
        jobs = s.tiers.stores(pages * PAGE)
        assert s.tiers.stores(ALL if jobs else 0) == [], "the chain is under way"
        s.end(*jobs)
        assert [len(job.keys) // 32 for job in jobs] == [segments][: len(jobs)]
        assert s.tiers.index.num_points == (pages == 100)
    s.kv.evict(60)
    assert s.load(LONGER).num_saved_tokens == 96


def test_pinned_entries_are_not_stored():
    s = Setup()
    s.serve(PROMPT)
    assert s.kv.pin(s.kv.match(LONGER), now=0.0, ttl=1.0) == 96
    assert not s.tiers.stores(ALL)
    s.kv.expire_pins(2.0)
    assert s.store()


def test_blocks_that_points_of_a_job_share_are_copied_once():
    """Windows of 36 tokens; points every 32."""
    s = Setup(((8, None), (4, 36)), pages=200, retention=32)
    s.serve(PROMPT)
    [job] = s.tiers.stores(ALL)
    points = job.point_pages
    assert job.depths == [4, 8, 12] and set(points[0]) & set(points[1]) - {0}
    assert len(job.sources) == 12 + len(set(points.ravel().tolist()) - {0})
    s.end(job)
    s.kv.evict(60)
    assert s.load([*PROMPT[:70], 1]).num_saved_tokens == s.serve([*PROMPT[:70], 1]) == 64


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
    s.kv.match([3, *PROMPT[:60], 1])
    s.serve([3, *PROMPT[:60], 1])  # what was looked at is due again once it is used
    assert s.store()


# Ends of jobs, and reports.


def test_a_store_that_fails_is_tried_again_after_the_next_use():
    s = Setup(host=100)
    s.serve(PROMPT)
    [job] = s.tiers.stores(ALL)
    s.tiers.done(job, failed=True)
    assert s.tiers.index.pool.num_free == 99 and not s.tiers.index.num_segments
    assert not s.store() and s.tiers.stats()["tier_store_failures/host"] == 1
    s.serve(LONGER)
    s.behind()
    assert s.load(LONGER).num_saved_tokens == s.serve(LONGER) == 96


def dense_page(s: Setup, segment: int) -> int:
    """The dense page of a segment of `PROMPT` on the device."""
    run, _ = s.kv.index.find(s.kv.match(LONGER).prompt.keys, 12)
    return int(s.kv.index.pages_between(run, segment, segment + 1)[0, 0])


@pytest.mark.parametrize("is_open", [False, True], ids=["stored", "under-store"])
def test_wrong_rows_are_not_kept_in_the_host(is_open):
    s = Setup(DENSE)
    s.serve(PROMPT)
    jobs = s.tiers.stores(ALL)
    assert jobs
    if not is_open:
        s.end(*jobs)
    s.kv.evict_pages([dense_page(s, 7)])
    s.end(*(jobs if is_open else ()))
    s.check()
    assert s.kv.match(LONGER).dense_tokens == 56
    assert s.tiers.match(LONGER).dense_tokens == 56, "none of the host"


@pytest.mark.parametrize("specs", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize(("segments", "left"), [([], 24), ([7], 0)], ids=["no-page", "wrong-page"])
def test_an_emptied_host_gets_what_the_device_still_has(specs, segments, left):
    s = Setup(specs, pages=120)
    other = range(500, 600)
    s.serve(other)
    s.serve(PROMPT)
    s.store()
    s.kv.evict_pages([dense_page(s, segment) for segment in segments])
    assert sum(run.length for run in s.tiers.index.runs()) == left
    s.store()
    s.kv.evict(60)
    assert s.load([*other, 1]).num_saved_tokens == s.serve([*other, 1]) == 96


def test_events_of_an_emptied_host_leave_the_device_its_blocks():
    log = EventLog()
    s = Setup(DENSE, events=log)
    s.serve(PROMPT)
    s.store()
    log.take()
    s.kv.evict_pages([dense_page(s, 7)])
    assert [(e.medium, len(e.block_hashes)) for e in log.take()[1]] == [("CPU", 12), ("GPU", 5)]


def test_events_name_salts_and_extra_keys():
    """Of what was computed, of its copy, and of what came back."""
    log = EventLog(identities=True)
    s = Setup(host=40, events=log)
    identity = {"salt": b"tenant", "extra_keys": [(5, 30, b"image")]}
    s.serve(PROMPT, **identity)
    s.behind()
    first = log.take()[1]
    s.load(PROMPT, **identity)
    parts = [((5, stop, b"image"),) for stop in (8, 16, 24, 30)]
    for events, media in [(first, ["GPU", "CPU"]), (log.take()[1], ["GPU"])]:
        stored = [event for event in events if isinstance(event, BlockStored)]
        assert {event.salt for event in stored} == {b"tenant"}
        for medium in ("GPU", "CPU"):
            dense = [e for e in stored if (e.kind, e.medium) == ("dense", medium)]
            found = [keys for event in dense for keys in event.extra_keys if keys]
            assert found == (parts if medium in media else [])


def test_stats():
    s = Setup()
    s.behind(PROMPT)
    job = s.tiers.load(s.tiers.match(LONGER))
    s.end(job)
    found = {k[5:-5]: n for k, n in s.kv.stats().items() if k.startswith("tier_") and n}
    assert found == {
        "stored_segments": 12, "stored_points": 1, "stored_pages": 12 + 3, "segments": 12, "points": 1,
        "free_pages": 199 - 15, "loaded_segments": 12, "loaded_points": 1, "loaded_pages": 12 + 3,
    }  # fmt: skip


@pytest.mark.parametrize("policy", [Adaptive, LRU])
def test_a_host_without_a_policy_learns_with_the_cache_if_it_can(policy):
    s = Setup(policy=policy(), policy_of_host=None)
    host = s.tiers.index.policy
    assert type(host) is policy
    assert policy is LRU or host._returns is s.kv.index.policy._returns
