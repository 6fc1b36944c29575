"""Jobs: pages to copy, locks while they are open, entries afterwards."""

from __future__ import annotations

import pytest

from quire.kvcore import GroupSpec, Ranked
from quire.kvcore.tier.ends import TransferEnd
from tests.kvcore.tier.setup import DENSE, HYBRID, LONGER, PAGE, PROMPT, STATE, WINDOWS, Setup
from tests.support.kvcore.engine import groups


@pytest.mark.parametrize("specs", [HYBRID, DENSE, STATE], ids=["hybrid", "dense", "state"])
def test_a_prefix_comes_back_as_it_left(specs):
    s = Setup(specs)
    s.serve(PROMPT)
    before = s.e.kv.match(LONGER).num_tokens
    s.behind()
    assert s.e.kv.match(LONGER).num_tokens == 0
    assert s.load(LONGER).num_saved_tokens == before > 0
    assert s.serve(LONGER) == before  # and every row that it reads is right


def test_segments_without_pages_come_back_too():
    """Where all groups are windows a segment is its key alone; it counts as any other."""
    s = Setup(WINDOWS)
    s.behind(PROMPT, PROMPT[::-1])  # of the last one only its point is evicted
    assert s.load(LONGER).num_saved_tokens == 100
    assert s.tiers.stats()["tier_loaded_segments/host"] == 25
    assert s.serve(LONGER) == 100


def test_a_point_whose_segments_are_there_comes_alone():
    s = Setup(pages=100)
    s.serve(PROMPT)
    s.store()
    index = s.e.kv.index
    run, _ = index.find(s.e.kv.match(LONGER).prompt.keys, 12)
    there = TransferEnd(index, run)  # as a request has it that goes on from here
    s.forget()
    match = s.tiers.match(LONGER)
    assert match.device.num_tokens == 0 < match.device.dense_tokens
    job = s.tiers.load(match)
    assert 0 < len(job.sources) <= s.e.kv.layout.pages_per_point
    s.end(job)
    there.end()
    assert s.serve(LONGER) == match.num_saved_tokens == 96


def test_blocks_that_points_of_a_job_share_are_copied_once():
    """Windows of 36 tokens; points every 32."""
    specs = [HYBRID[0], GroupSpec("local", "window", 4, PAGE, 36)]
    s = Setup(specs, pages=200, retention=32)
    s.serve(PROMPT)
    [job] = s.tiers.stores(1 << 30)
    points = job.transfer.point_pages
    assert job.transfer.depths == [4, 8, 12] and set(points[0]) & set(points[1]) - {0}
    assert len(job.sources) == 12 + len(set(points.ravel().tolist()) - {0})
    s.end(job)
    s.forget()
    assert s.load([*PROMPT[:70], 1]).num_saved_tokens == s.serve([*PROMPT[:70], 1]) == 64


def test_two_points_hold_what_is_between_them():
    """Windows of 33 tokens, segments of 8: points at 48 and 80 hold between them the tail of 64."""
    s = Setup(groups((8, None), (8, 33)), pages=200, host=300)
    s.behind(PROMPT[:48], PROMPT[:80])
    probe = [*PROMPT[:64], 999]
    assert s.load(probe).num_saved_tokens == s.serve(probe) == 64


def test_a_part_of_a_chain_that_goes_on_past_a_fork_comes_alone():
    s = Setup(pages=200, retention=32)
    s.behind(PROMPT, [*PROMPT[:40], *range(300, 340)])
    assert s.load(LONGER, max_tokens=34).num_saved_tokens == 32
    assert s.e.kv.index.num_segments == 4
    assert s.serve([*PROMPT[:34], 1]) == 32


def test_an_entry_under_store_stays_readable_and_is_not_evicted():
    s = Setup(pages=40)
    s.serve(PROMPT)
    jobs = s.tiers.stores(1 << 30)
    s.serve(PROMPT[:40:-1])
    s.forget()  # the newer one goes
    assert s.serve(LONGER) == 96
    for job in jobs:
        s.end(job)
    s.forget()
    assert s.e.kv.match(LONGER).num_tokens == 0
    assert s.load(LONGER).num_saved_tokens == s.serve(LONGER) == 96


def test_a_segment_that_came_twice_is_kept_once():
    s = Setup(pages=200)
    s.behind(PROMPT)
    jobs = [s.tiers.load(s.tiers.match(LONGER)) for _ in range(2)]
    for job in jobs:
        s.end(job)
    assert s.e.kv.index.num_segments == 12
    assert s.tiers.stats()["tier_loaded_segments/host"] == 12


def test_no_room_changes_nothing():
    s = Setup(pages=32)
    s.behind(PROMPT)
    s.e.admit("long", list(range(200, 350)))
    s.e.step({"long": 130})
    match, before = s.tiers.match(LONGER), s.e.kv.stats()
    assert match.num_bytes and s.tiers.load(match) is None
    assert before == s.e.kv.stats() and not s.tiers.jobs
    s.check()


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
    s.e.kv.match([3, *PROMPT[:60], 1])
    s.serve([3, *PROMPT[:60], 1])  # what was looked at is due again once it is used
    assert s.store()


def test_rows_of_a_job():
    """Segments first, then what is new of a resume point; the bytes of all."""
    s = Setup(specs=[HYBRID[0], GroupSpec("local", "window", 4, PAGE, 36)], pages=200)
    s.serve(PROMPT)
    [job] = s.tiers.stores(1 << 30)
    assert len(job.sources) == len(job.targets) == 12 + 9
    assert job.num_bytes == 21 * PAGE and job.num_tokens == 96
    assert job.transfer.segments.ravel().tolist() == job.targets[:12].tolist()
