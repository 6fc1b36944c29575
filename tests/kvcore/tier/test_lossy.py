"""Tiers whose pages do not come back bit for bit: which hits say so, of how many tokens, and until when."""

from __future__ import annotations

import pytest

from quire.kvcore import KVCache
from quire.kvcore.tier import Tiers, TierSpec
from tests.kvcore.tier.test_tiers import DENSE, HYBRID, PROMPT, STATE, Setup
from tests.support.kvcore.engine import groups

LONGER = [*PROMPT, 1]  # 96 tokens of it are whole segments of 8


def behind(specs=HYBRID, **options):
    """A prompt that is in tiers alone."""
    s = Setup(specs, lossy=True, **options)
    s.serve(PROMPT)
    s.store()
    s.forget()
    return s


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_what_came_back_is_lossy(specs):
    s = behind(specs)
    assert s.e.kv.match(LONGER).lossy_tokens == 0
    match = s.load(LONGER)
    assert ", lossy)" in match.explain()
    found = s.e.kv.match(LONGER)
    assert found.num_tokens == found.lossy_tokens == 96
    assert found.explain().endswith("; the last 96 rest on rows that were kept in a lossy form")
    assert s.e.kv.stats()["lossy_tokens"] == 0
    s.serve(LONGER)
    assert s.e.kv.stats()["lossy_tokens"] == 96


def test_what_was_on_the_device_is_not():
    """The first 40 tokens were computed again before the others came."""
    s = behind(DENSE)
    s.serve(PROMPT[:41])
    s.load(LONGER)
    assert s.e.kv.match(LONGER).lossy_tokens == 96 - 40
    assert s.e.kv.match(PROMPT[:41]).lossy_tokens == 0
    assert s.e.kv.match(PROMPT[:50]).lossy_tokens == 8


def test_windows_alone_are_lossy_for_the_tokens_that_they_have_rows_of():
    """And so is what is computed behind them."""
    s = behind()
    s.e.kv.clear()
    s.serve(PROMPT)
    s.store()
    index = s.e.kv.index
    run, _ = index.find(s.e.kv.match(LONGER).prompt.keys, 12)
    index.drop_point(run.points[12])  # its dense blocks stay
    match = s.load(LONGER)
    assert [(x.place, x.num_tokens) for x in match.shares[:2]] == [("device", 96), ("host", 0)]
    # Nine rows before 96, in blocks of 4 from 84 on, and so in the segments from 80 on.
    assert s.e.kv.match(LONGER).lossy_tokens == 16
    longer = [*PROMPT, *range(200, 240)]
    s.serve(longer)
    assert s.e.kv.match([*longer, 1]).lossy_tokens == 136 - 80


def test_a_state_has_rows_of_all_tokens():
    s = behind(STATE)
    s.e.kv.clear()
    s.serve(PROMPT)
    s.store()
    index = s.e.kv.index
    for run in list(index.runs()):
        for point in list(run.points.values()):
            index.drop_point(point)
    s.load(LONGER)
    found = s.e.kv.match(LONGER)
    assert found.num_tokens == found.lossy_tokens == 100


@pytest.mark.parametrize("specs", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_what_is_computed_again_is_not_lossy(specs):
    """In whatever pages: all of them were lossy ones."""
    s = behind(specs, pages=40)
    s.load(LONGER)
    s.forget()
    assert s.e.kv.pool.lossy.any()
    s.tiers.clear()
    s.serve(PROMPT)
    found = s.e.kv.match(LONGER)
    assert found.num_tokens == 96 and found.lossy_tokens == 0


def test_a_load_that_failed_leaves_no_mark():
    """Its pages go to somebody else."""
    s = behind(DENSE)
    match = s.tiers.match(LONGER)
    job = s.tiers.load(match)
    s.memory.copy(job)
    s.tiers.done(job, [int(job.copies[0].targets[5])])
    found = s.e.kv.match(LONGER)
    assert found.num_tokens == found.lossy_tokens == 40
    s.tiers.clear()
    s.serve([7, *PROMPT])
    assert s.e.kv.match([7, *LONGER]).lossy_tokens == 0


def test_a_cancelled_load_leaves_no_mark():
    s = behind(DENSE)
    job = s.tiers.load(s.tiers.match(LONGER))
    s.tiers.cancel(job)
    assert s.e.kv.pool.lossy is None


def test_tiers_that_are_exact_mark_nothing():
    s = Setup()
    s.serve(PROMPT)
    s.store()
    s.forget()
    match = s.load(LONGER)
    assert "lossy" not in match.explain() and s.e.kv.pool.lossy is None
    assert s.e.kv.match(LONGER).lossy_tokens == 0


def test_refused():
    with pytest.raises(ValueError, match=r"^lossy: expected True or False, got 1"):
        TierSpec(20, 1e9, lossy=1)
    windows = KVCache(groups((4, 10)), num_pages=60, max_requests=4, max_model_len=300)
    with pytest.raises(ValueError, match=r"^lossy: expected a cache with a dense group"):
        Tiers(windows, host=TierSpec(20, 1e9, lossy=True), prefill_tokens_per_second=1.0)
