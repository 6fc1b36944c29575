"""Choice of the entries to store."""

import pytest

from quire.kvcore.tier import stores
from tests.kvcore.tier.setup import DENSE, HYBRID, LONGER, PAGE, PROMPT, Setup


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_stores_under_way_count(specs):
    """Pages that open stores will free need no other store."""
    s = Setup(specs, pages=200)
    for i in range(4):
        s.serve([i, *PROMPT])
    stores = s.tiers._stores
    stores._watermark = s.e.kv.num_free_pages + 5  # the first chain is enough for that
    [job] = s.tiers.stores(1 << 30)
    for _ in range(3):
        assert s.tiers.stores(1 << 30) == []
    s.end(job)
    assert s.tiers.stores(1 << 30) == []
    stores._watermark += 25
    assert s.tiers.stores(1 << 30)


def test_what_is_clean_is_not_written_again():
    s = Setup()
    s.serve(PROMPT)
    assert s.store()
    for _ in range(3):
        s.forget()
        s.load(LONGER)
        assert not s.tiers.stores(1 << 30), "it bounces, and is written once"


def test_a_copy_counts_as_used_when_its_entry_would_be_stored_again():
    """Use on the device counts: of two copies the host evicts that of the entry used earlier."""
    s = Setup(pages=200, host=32)
    for i in (1, 2):
        s.serve([i, *PROMPT])
        s.store()
    s.serve([1, *PROMPT])
    assert not s.store()
    s.serve([3, *PROMPT])
    s.store()
    s.forget()
    found = [s.tiers.match([i, *PROMPT, 1]).num_saved_tokens for i in (1, 2, 3)]
    assert found == [96, 0, 96]


def test_a_host_that_is_too_small_is_not_written_over_and_over():
    s = Setup(pages=200, host=20)
    for i in range(4):
        s.serve([i, *PROMPT])
    assert len(s.store()) == 4
    for _ in range(20):
        assert not s.tiers.stores(1 << 30)


def test_a_budget_ends_within_a_chain():
    """The first segments go alone, at least one; the rest, and the resume point, another time."""
    s = Setup()
    s.serve(PROMPT)
    for pages, segments in ((1, 1), (0, None), (3, 4), (100, 12)):
        jobs = s.tiers.stores(pages * PAGE)
        s.end(*jobs)
        assert [len(job.keys) // 32 for job in jobs] == [segments][: len(jobs)]
        assert bool(s.points()) == (pages == 100)
    s.forget()
    assert s.load(LONGER).num_saved_tokens == 96


def test_pinned_entries_are_not_stored():
    s = Setup()
    s.serve(PROMPT)
    assert s.e.kv.pin(s.e.kv.match(LONGER), now=0.0, ttl=1.0) == 96
    assert not s.tiers.stores(1 << 30)
    s.e.kv.expire_pins(2.0)
    assert s.store()


def test_uses_are_remembered_for_a_multiple_of_what_is_cached(monkeypatch):
    monkeypatch.setattr(stores, "REMEMBERED", 1)
    s = Setup(pages=20, host=20)
    for i in range(60):
        s.serve([i, *PROMPT[:9]])
        s.store()
    assert len(s.tiers._stores._seen) <= 4 * (s.e.kv.index.num_segments + 1) < 60
