"""Random traffic with a shadow of every row (see `shadow`)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kvcore import shadow


@pytest.mark.slow
@pytest.mark.parametrize("budget", [12])
def test_lives(budget):
    """Caches of all kinds, for a hundred steps each; `python -m tests.kvcore.shadow` goes on for as long as one likes."""
    calls, checked, evicted = Counter(), 0, 0
    for seed in range(budget):
        life = shadow.run(seed, shadow.names_of(seed, 100), calls)
        checked += life.device.rows_checked
        evicted += life.kv.stats()["evicted_segments"]
    assert checked > 2500 * budget and evicted > 2 * budget
    for name in (
        "admit",
        "commit",
        "rollback",
        "release",
        "pin",
        "evict",
        "restore",
        "refused",
        "out of pages",
        "with drafts",
        "fork",
        "evict_pages",
        "add",
        "drop",
        "advance",
        "cancel",
    ):
        assert calls[name] > budget // 8, name
    assert calls["commit"] > 25 * budget and calls["with drafts"] > 2 * budget
