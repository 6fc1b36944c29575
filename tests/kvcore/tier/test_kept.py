"""Entries that the next place has leave first, while it has them: a copy may go in many ways."""

import numpy as np
import pytest

from quire.kvcore.tier import Job
from tests.kvcore.tier.test_tiers import DENSE, HYBRID, PAGE, PROMPT, Setup


def _done(s: Setup, jobs: list[Job]) -> list[Job]:
    for job in jobs:
        s.memory.copy(job)
        s.tiers.done(job)
    return jobs


def test_a_copy_that_a_failed_load_took_is_stored_again():
    """What could not be read is dropped, and points that share its blocks with it."""
    s = Setup(HYBRID, pages=200, host=400, watermark=200, retention=8)
    s.serve(PROMPT)
    s.store()
    index, host = s.e.kv.index, s.tiers.tiers[0].index

    def points(of):
        return {p.depth: p for run in of.runs() for p in run.points.values()}

    before = set(points(index))
    s.e.kv.evict(1)
    [gone] = before - set(points(index))
    job = s.tiers.load(s.tiers.match([*PROMPT[: gone * 8], 777]))
    assert isinstance(job, Job)
    s.memory.copy(job)
    s.tiers.done(job, failed=[int(t) for c in job.copies for t in c.targets])
    alone = points(index).keys() - points(host).keys()
    assert alone
    s.store()
    assert points(index).keys() <= points(host).keys()
    s.forget()
    assert not s.tiers.stats()["tier_lost/host"]
    longest = max(alone) * 8
    assert s.tiers.match([*PROMPT[:longest], 777]).num_tokens == longest


def test_a_copy_that_became_part_of_a_longer_one_and_went_with_it_is_stored_again():
    s = Setup(DENSE, pages=60, host=12, disk=200, watermark=60)
    short = PROMPT[:40]
    s.serve(short)
    assert _done(s, s.tiers.stores({"host": 1 << 30})) and _done(
        s, s.tiers.stores({"disk": 1 << 30})
    )
    host, disk = s.tiers.tiers
    s.serve(PROMPT)
    _done(s, s.tiers.stores(1 << 30, everything=True))
    assert [(r.start, r.length) for r in disk.index.runs()] == [(0, 12)]
    disk.index.evict(disk.index.num_evictable)
    s.forget()
    assert _done(s, s.tiers.stores({"disk": 1 << 30}))
    host.index.evict(host.index.num_evictable)
    assert not s.tiers.stats()["tier_lost/disk"]
    assert s.tiers.match([*short, 1]).num_tokens == 40


def test_what_has_a_copy_and_is_to_leave_goes_before_all_else():
    s = Setup(DENSE, pages=200, host=400)
    for i in range(4):
        s.serve([i, *PROMPT])
    s.store()
    policy = s.e.kv.index.policy
    kept = policy.kept_pages
    assert s.tiers.hint(s.tiers.match([2, *PROMPT, 1]), "demote").outcome == "accepted"
    assert policy.kept_pages == kept > 0
    s.e.kv.evict(1)
    lost = [i for i in range(4) if s.e.kv.match([i, *PROMPT, 1]).num_tokens < 96]
    assert lost == [2]


@pytest.mark.parametrize("source", ["device", "host"])
def test_a_wrong_page_past_what_a_store_brings_now(source):
    """A job locks an entry whole, though it brings a part of it: what is wrong behind the part goes too."""
    behind = source == "host"
    s = Setup(DENSE, pages=60, host=14 if behind else 200, disk=200 if behind else None)
    s.serve(PROMPT)
    if behind:
        _done(s, s.tiers.stores({"host": 1 << 30}))
    [job] = s.tiers.stores({"disk": 2 * PAGE} if behind else 2 * PAGE)
    assert job.num_tokens == 16
    [run] = s.e.kv.index.runs()
    s.e.kv.evict_pages(np.array([run.look()[-1][0]]))
    assert job.parts.is_void
    assert s.e.kv.match([*PROMPT, 1]).num_tokens == 88
    assert s.tiers.match([*PROMPT, 1]).num_tokens == 88
    s.tiers.done(job)
    s.check()
