"""Ends of jobs, failures, other calls while jobs are open, and reports."""

import pytest

from quire.kvcore import LRU, EventLog, KVCache
from quire.kvcore.events import BlockStored
from quire.kvcore.tier import Tiers
from tests.kvcore.tier.setup import DENSE, HYBRID, LONGER, PROMPT, Setup


def test_a_store_that_fails_is_tried_again_after_the_next_use():
    s = Setup(host=100)
    s.serve(PROMPT)
    [job] = s.tiers.stores(1 << 30)
    s.tiers.done(job, failed=True)
    assert s.tiers.index.pool.num_free == 99 and not s.tiers.index.num_segments
    assert not s.store() and s.tiers.stats()["tier_store_failures/host"] == 1
    s.serve(LONGER)
    s.behind()
    assert s.load(LONGER).num_saved_tokens == s.serve(LONGER) == 96


def test_a_job_ends_once():
    s = Setup()
    s.serve(PROMPT)
    [job] = s.tiers.stores(1 << 30)
    s.end(job)
    for call in (s.tiers.done, s.tiers.cancel):
        with pytest.raises(ValueError, match="job: expected one that is open"):
            call(job)
    with pytest.raises(ValueError, match=r"match: expected what `Tiers\.match` returned, got"):
        s.tiers.load(s.e.kv.match(PROMPT))


def dense_page(s: Setup, segment: int) -> int:
    """The dense page of a segment of `PROMPT` on the device."""
    run, _ = s.e.kv.index.find(s.e.kv.match(LONGER).prompt.keys, 12)
    return int(s.e.kv.index.pages_between(run, segment, segment + 1)[0, 0])


@pytest.mark.parametrize("is_open", [False, True], ids=["stored", "under-store"])
def test_wrong_rows_are_not_kept_in_the_host(is_open):
    s = Setup(DENSE)
    s.serve(PROMPT)
    jobs = s.tiers.stores(1 << 30)
    assert jobs
    if not is_open:
        s.end(*jobs)
    s.e.kv.evict_pages([dense_page(s, 7)])
    s.end(*(jobs if is_open else ()))
    s.check()
    assert s.e.kv.match(LONGER).dense_tokens == 56
    assert s.tiers.match(LONGER).dense_tokens == 56, "none of the host"


@pytest.mark.parametrize("specs", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize(("segments", "left"), [([], 24), ([7], 0)], ids=["no-page", "wrong-page"])
def test_an_emptied_host_gets_what_the_device_still_has(specs, segments, left):
    s = Setup(specs, pages=120)
    other = range(500, 600)
    s.serve(other)
    s.serve(PROMPT)
    s.store()
    s.e.kv.evict_pages([dense_page(s, segment) for segment in segments])
    assert len(s.segments()) == left
    s.store()
    s.forget()
    assert s.load([*other, 1]).num_saved_tokens == s.serve([*other, 1]) == 96


def test_events_of_an_emptied_host_leave_the_device_its_blocks():
    log = EventLog()
    s = Setup(DENSE, events=log)
    s.serve(PROMPT)
    s.store()
    log.take()
    s.e.kv.evict_pages([dense_page(s, 7)])
    assert [(e.medium, len(e.block_hashes)) for e in log.take()[1]] == [("CPU", 12), ("GPU", 5)]


def test_events_name_salts():
    """Of what was computed, of its copy, and of what came back."""
    log = EventLog(identities=True)
    s = Setup(host=40, events=log)
    s.serve(PROMPT, salt=b"tenant")
    s.behind()
    first = log.take()[1]
    s.load(PROMPT, salt=b"tenant")
    for events, media in [(first, {"GPU", "CPU"}), (log.take()[1], {"GPU"})]:
        stored = [event for event in events if isinstance(event, BlockStored)]
        assert {event.medium for event in stored if event.kind == "dense"} == media
        assert {event.salt for event in stored} == {b"tenant"}


def test_stats():
    s = Setup()
    s.behind(PROMPT)
    stats = s.e.kv.stats()
    stored = len({*range(1, 200)} - {*s.tiers.index.pool.free_pages().tolist()})
    assert stats["tier_stored_segments/host"] == 12 == stats["tier_segments/host"]
    assert stats["tier_stored_pages/host"] == stored == 199 - stats["tier_free_pages/host"]
    assert stats["tier_loaded_pages/host"] == 0
    job = s.tiers.load(s.tiers.match(LONGER))
    s.end(job)
    stats = s.e.kv.stats()
    assert stats["tier_loaded_pages/host"] == len(job.sources)
    assert stats["tier_loaded_points/host"] == 1


def test_what_is_refused():
    good = {"num_pages": 10, "bytes_per_second": 1e9, "prefill_tokens_per_second": 1.0}
    kv = KVCache(HYBRID, num_pages=40, max_requests=1, max_model_len=100)
    for wrong, message in [
        ({"prefill_tokens_per_second": 0}, "prefill_tokens_per_second: expected a finite numb"),
        ({"bytes_per_second": float("nan")}, "bytes_per_second: expected a finite number > 0"),
        ({"num_pages": 1}, "num_pages: expected an int >= 2, got 1"),
        ({"page_bytes": 0}, "page_bytes: expected an int >= 1, got 0"),
        ({"watermark": -1}, "watermark: expected an int >= 0, got -1"),
        ({"policy": LRU}, "policy: expected an eviction policy, such as LRU\\(\\), got <class"),
    ]:
        with pytest.raises(ValueError, match=message):
            Tiers(kv, **good | wrong)
    other = object()
    with pytest.raises(ValueError, match="kv: expected a KVCache, got <"):
        Tiers(other, **good)
    off = KVCache(HYBRID, num_pages=40, max_requests=1, max_model_len=100, enable_caching=False)
    with pytest.raises(ValueError, match="kv: expected a cache with enable_caching"):
        Tiers(off, **good)

    class Plain:
        """A policy of the four methods alone."""

        def __init__(self):
            lru = LRU()
            self.add, self.discard, self.pop, self.asked = lru.add, lru.discard, lru.pop, lru.asked

    plain = KVCache(HYBRID, num_pages=40, max_requests=1, max_model_len=100, policy=Plain())
    with pytest.raises(ValueError, match=r"kv: expected a policy with coming\(n\), got <"):
        Tiers(plain, **good)
    tiers = Tiers(kv, **good)
    with pytest.raises(ValueError, match="kv: expected a cache without tiers"):
        Tiers(kv, **good)
    with pytest.raises(ValueError, match="max_bytes: expected an int >= 0, got -1"):
        tiers.stores(-1)
