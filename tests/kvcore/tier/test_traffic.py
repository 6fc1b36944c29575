"""Random traffic through caches with a host tier (see `traffic`), a few hundred steps of it."""

from __future__ import annotations

from collections import Counter

from tests.kvcore.tier.traffic import live


def test_lives():
    """`python -m tests.kvcore.tier.traffic` goes on for as long as one likes."""
    checked = Counter()
    for seed in range(20):
        checked += live(seed, 80).checked
    for name in (
        "stores",
        "loads",
        "done",
        "failed",
        "kept promises",
        "store of a point",
        "load of a point",
        "several points",
        "used",
        "copies of wrong rows",
    ):
        assert checked[name] > 0, (name, checked)
