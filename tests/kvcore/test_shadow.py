"""Random traffic with a shadow of every row (see `shadow`)."""

from collections import Counter

import pytest

from tests.kvcore import shadow

LIVES = 40


@pytest.mark.slow
def test_lives():
    calls, checked, evicted = Counter(), 0, 0
    for seed in range(LIVES):
        life = shadow.run(seed, 100, calls)
        checked += life.device.rows_checked
        evicted += life.kv.stats()["evicted_segments"]
    assert checked > 2500 * LIVES and evicted > 2 * LIVES
    for name in (
        "admit", "commit", "rollback", "release", "pin", "evict", "out of pages", "with drafts",
        "reserve", "arrays", "advance", "publish", "room", "ahead", "stores", "jobs done",
    ):  # fmt: skip
        assert calls[name] > LIVES // 8, name
    assert calls["commit"] > 6 * LIVES and calls["kept loads"] and calls["jobs failed"]
    assert calls["replays"] > LIVES // 8
