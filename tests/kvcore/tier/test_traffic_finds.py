"""Random traffic notices what goes wrong in tiers: each fault is planted, and must be found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.kvcore.announcer import Announcer
from quire.kvcore.prefix.holdings import Holding
from quire.kvcore.tier import tiers, transfers
from quire.kvcore.tier.match import Planner
from quire.kvcore.tier.places import Columns, Found, Place, Tails
from quire.kvcore.tier.transfers import Transfers
from quire.kvcore.tier.wrong_rows import Held
from tests.kvcore.tier.traffic import live
from tests.support.budgets import ordinary


def all_came(original):
    """Failures are adopted."""

    def adopt(self, parts, failed):
        return original(self, parts, failed[:0])

    return adopt


def swapped(original):
    """Shared window blocks are taken for each other."""

    def shared(self, gap):
        later, earlier = original(self, gap)
        return later, earlier[::-1]

    return shared


def no_lock(original):
    """A job locks nothing."""

    def hold(self, depth, used):
        return original(self, 0, used)

    return hold


def no_use(original):
    """Pages of resume points that a job reads may be written over."""

    def end(self, *args, **kwargs):
        self.used = self.used[:0]
        return original(self, *args, **kwargs)

    return end


def other_order(original):
    """Sources do not go with their targets."""

    def copies_of(columns, sources, *others):
        return original(columns, sources[::-1, ::-1], *others)

    return copies_of


def other_parts(original):
    """Parts of pages are taken for each other."""

    def copies_of(*args):
        made = original(*args)
        return [replace(c, parts=c.parts[::-1]) for c in made]

    return copies_of


def other_columns(original):
    """Parts are those of the next page of the device."""

    def of(self, place, pages):
        own = original(self, place, pages)
        return np.roll(own, 1, axis=-1) if own is not pages else own

    return of


def never(original):
    def method(self, *args):
        return None

    return method


def always(original):
    def make_room(self, num_pages):
        original(self, num_pages)
        return num_pages <= self.index.pool.num_free + 1

    return make_room


def too_long(original):
    """A hit goes one segment past the last resume point."""

    def boundary(self, device, host, limit):
        return min(original(self, device, host, limit) + 1, limit)

    return boundary


def only_the_device(original):
    def boundary(self, device, host, limit):
        return original(self, device, device, limit)

    return boundary


FAULTS = [
    (Announcer, "point_removed", never),
    (Announcer, "segments_removed", never),
    (Transfers, "adopt", all_came),
    (Tails, "shared", swapped),
    (Found, "hold", no_lock),
    (Holding, "end", no_use),
    (transfers, "copies_of", other_order),
    (transfers, "copies_of", other_parts),
    (Columns, "of", other_columns),
    (Place, "make_room", always),
    (Held, "is_on", never),
    (tiers, "forget", never),
    (Planner, "_boundary", too_long),
    (Planner, "_boundary", only_the_device),
]


# Lives that are tried first, where the first few find nothing; another finds the fault when these no longer do.
FOUND_BY = {all_came: 2, swapped: 28, always: 5}


@ordinary("no_lock", "no_use", "other_columns")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "fault"), FAULTS, ids=lambda v: getattr(v, "__name__", v)
)
def test_a_fault_is_found(owner, name, fault, monkeypatch):
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError, StopIteration)):
        for seed in (FOUND_BY.get(fault, 0), *range(120)):
            live(seed, 100)
