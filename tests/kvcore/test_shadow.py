"""Random traffic with a shadow of every row (see `shadow`), and proof that the shadow notices what goes wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.kvcore import pages
from quire.kvcore.prefix import index, keys, lookup
from quire.kvcore.prefix import requests as sequences
from quire.kvcore.prefix import tracker as chains
from quire.kvcore.tables import drafts
from quire.kvcore.tables import groups as tables
from quire.kvcore.tables import prefill as chunks
from quire.kvcore.tables import state as states
from tests.kvcore import shadow
from tests.support.budgets import budget, ordinary


@pytest.mark.slow
@budget(12, long=40)
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
        "refused",
        "out of pages",
        "with drafts",
        "evict_pages",
        "add",
        "drop",
        "advance",
        "cancel",
    ):
        assert calls[name] > budget // 8, name
    assert calls["commit"] > 25 * budget and calls["with drafts"] > 2 * budget


def same_pages(original):
    """Pages are given out that stay free."""

    def take(self, n):
        original(self, n)
        self.num_free += n > 2

    return take


def off_by_one(original):
    """A window's tail starts a block late."""

    def tails(self, strip, base, rows, boundaries):
        return original(self, strip, base, rows, boundaries + self.spec.block_size)

    return tails


def no_result(original):
    """The first half of the copies is forgotten."""

    def commit(self, *args):
        effects = original(self, *args)
        effects.copies = effects.copies[len(effects.copies) // 2 + 1 :]
        return effects

    return commit


def forgets_salt(original):
    def key(seed, salt):
        return original(seed, b"")

    return key


def forgets_to_free(original):
    def unhold(self, pages):
        return original(self, pages[1:])

    return unhold


def too_far(original):
    """A hit ends one segment after the resume point."""

    def resumable(self, run, depth, limit):
        found = original(self, run, depth, limit)
        return min(found + 1, depth, limit) if found else 0

    return resumable


def nothing(original):
    def change(self, *args):
        return None

    return change


def forgets_tokens(original):
    """The tokens of a step that follow the first are not hashed."""

    def feed(self, slot, start, tokens):
        return original(self, slot, start, tokens * 0)

    return feed


def all_stay(original):
    """Blocks of rejected tokens are kept."""

    def commit(self, plan, batch, taken):
        return original(self, plan, batch, taken * 0 + batch.size)

    return commit


def all_at_once(original):
    """An extra key splits the whole prompt."""

    def by_segment(marks, alignment, lookahead):
        return {0: b"".join(m.packed() for m in marks)} if marks else {}

    return by_segment


def keeps(original):
    """A request that is discarded leaves a resume point."""

    def end(self, slot, computed, keep=True):
        return original(self, slot, computed)

    return end


def one_run(original):
    """What is below a run whose pages are wanted stays."""

    def drop(self, is_wanted):
        for run in self.runs():
            for depth in run.depths[:]:
                if is_wanted[run.points[depth].pages].any():
                    self.drop_point(run.points[depth])

    return drop


def any_length(original):
    """An admission takes the longest hit."""

    def again(self, match):
        return self.find(match.prompt)

    return again


PLANTED = {
    "extra keys are forgotten": (keys, "marked_key", lambda original: lambda key, marks: key),
    "extra keys split all": (keys, "by_segment", all_at_once),
    "what is discarded is kept": (chains.Chains, "end", keeps),
    "wanted pages of segments stay": (index.PrefixIndex, "drop_pages", one_run),
    "a longer hit than asked for": (lookup.Lookup, "again", any_length),
    "a reset forgets nothing": (index.PrefixIndex, "clear", nothing),
    "blocks of rejected tokens stay": (drafts.DraftTables, "commit", all_stay),
    "a page has two owners": (pages.PagePool, "take", same_pages),
    "a tail of the wrong blocks": (chunks.BlockTables, "tails", off_by_one),
    "a snapshot is not copied": (tables.Tables, "commit", no_result),
    "tenants share keys": (lookup, "root_key", forgets_salt),
    "a page leaks": (pages.PagePool, "unhold", forgets_to_free),
    "a hit without its window": (index.PrefixIndex, "resumable", too_far),
    "a change of the tables is not told": (tables.Tables, "_delta", nothing),
    "a rollback keeps its pages": (tables.Tables, "shrink", nothing),
    "keys of other tokens": (sequences.Sequences, "feed", forgets_tokens),
    "a shared snapshot is written over": (states.StateTables, "_snapping", None),
    "junctions are forgotten": (chains, "replay_boundaries", None),
}


# Lives that are tried first, where the first few find nothing; another finds the fault when these no longer do.
FOUND_BY = {
    "what is discarded is kept": 12, "wanted pages of segments stay": 16, "a longer hit than asked for": 3,
    "a tail of the wrong blocks": 4, "a snapshot is not copied": 4, "tenants share keys": 8, "a hit without its window": 4, "junctions are forgotten": 6,
}  # fmt: skip


@ordinary("a page leaks", "keys of other tokens", "extra keys")
@pytest.mark.parametrize("what", PLANTED)
def test_the_shadow_notices(what, monkeypatch):
    """One fault planted in kvcore, and a life that must fail."""
    owner, name, change = PLANTED[what]
    if name == "_snapping":
        monkeypatch.setattr(owner, name, lambda self, rows, snapshots: rows[snapshots[rows] == 0])
    elif name == "replay_boundaries":
        monkeypatch.setattr(owner, name, lambda num_tokens, alignment: (0, 0, 0))
    else:
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    with pytest.raises(shadow.Broken):
        for seed in (FOUND_BY.get(what, 0), *range(60)):
            shadow.run(seed, shadow.names_of(seed, 60), Counter())
