"""Whether an entry is worth what a full tier would evict for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from ..policies.base import Entry
from ..prefix.tree import ResumePoint, Run, run_of
from .match import Planner
from .places import Found, Place, Tier
from .watched import coming, is_there

LOOKED_AT = 64  # entries of a tier that would go next, in one call
PATIENCE = 32  # calls until what was refused is looked at again
REMEMBERED = 2048
MARGIN = 1.05  # what comes is worth so many times what goes for it: equals stay
AGAIN = 4  # times that an entry may come which nobody uses meanwhile, until more is asked of it


class Admission:
    """Lets an entry into a tier where a hit on it is expected to save more, for each page that it
    takes, than hits on what has to go: what the tier would evict next is not worth a copy.

    Both sides are seen as the tier would have them, since what leaves the device in the end is
    there alone. What comes takes all pages that would serve nothing without it, those that are left
    of its chain too; what goes frees, and gains, only what it does beside what comes. Else each of
    two entries could be worth more than the other, and they would be copied in turn. Pages that
    neighbouring points share are not seen, so what keeps coming without a use has to be worth more
    each time. Where the policies cannot tell how likely a hit is, everything is let in, but not for
    ever without a use.

    Source: TinyLFU (arXiv 1512.00727) for admission against the victim.

    Args:
        planner: knows what a prefill costs.
        num_bytes: that an entry of any place takes in a tier, with so many segments.
    """

    def __init__(self, planner: Planner, num_bytes: Callable[[Entry, int], int]) -> None:
        self._planner, self._num_bytes = planner, num_bytes
        self._calls = 0
        self._victims: dict[Tier, list[Run | ResumePoint]] = {}  # of this call
        # Entries that were refused, and the call from which on they are looked at again.
        self._refused: dict[Run | ResumePoint, int] = {}
        # By the key of an entry that others were to go for: its last use, and how often it came
        # since.
        self._came: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._crowding: dict[Run | ResumePoint, int] = {}  # the same, of this call

    def begin(self) -> None:
        """A call that stores begins."""
        self._calls += 1
        self._victims.clear()
        self._crowding.clear()
        if len(self._refused) > REMEMBERED:
            self._refused = {e: call for e, call in self._refused.items() if call > self._calls}

    def is_refused(self, entry: Run | ResumePoint) -> bool:
        """Whether `entry` was refused lately."""
        return self._calls < self._refused.get(entry, 0)

    def admits(
        self, source: Place, there: Found, entry: Run | ResumePoint, num_pages: int, after: int,
        taken: int,
    ) -> bool:  # fmt: skip
        """Whether a target is to have `entry` of `source`.

        Args:
            there: what the target has of its chain, or will have by then.
            num_pages: that it would take there. after: boundary of the next shorter entry there.
            taken: pages that other entries of its job take.
        """
        target = there.place
        assert isinstance(target, Tier)
        gain = entry.depth - after
        saved = self._saved(target, entry, gain)
        if not saved:  # to compute it is as quick
            return self._refuse(entry)
        # What is left of its chain would be free without it.
        num_pages += left_over(there, after) * target.index.pages_per_segment
        lacks = num_pages + taken - target.num_free
        if lacks <= 0:
            return True
        used, times = self._came.get(entry.key, (0, 0))
        times = times if used == entry.last_used else 0
        chance = source.policy.chance(entry)
        if chance is None:
            if times > AGAIN:
                return self._refuse(entry)
        elif not self._is_worth(target, there, entry, lacks, chance * saved / num_pages, times):
            return self._refuse(entry)
        self._crowding[entry] = times + 1
        return True

    def came(self, entries: Iterable[Run | ResumePoint]) -> None:
        """A job stores `entries`."""
        for entry in entries:
            if entry in self._crowding:
                self._came[entry.key] = entry.last_used, self._crowding[entry]
                self._came.move_to_end(entry.key)
        while len(self._came) > REMEMBERED:
            self._came.popitem(last=False)

    def _is_worth(
        self, target: Tier, there: Found, entry: Run | ResumePoint, lacks: int, density: float,
        times: int,
    ) -> bool:  # fmt: skip
        """Whether `entry`, of so many seconds for each page, saves more than what has to go for the
        pages that it lacks."""
        margin = MARGIN * 2.0 ** max(0, times - AGAIN)
        for victim in self._next(target):
            if lacks <= 0:
                break
            freed, gain = beside(victim, there, entry.depth)
            lacks -= freed
            if density * freed < margin * self._worth(target, victim, gain):
                return False
        return True

    def _refuse(self, entry: Run | ResumePoint) -> bool:
        self._refused[entry] = self._calls + PATIENCE
        return False

    def _next(self, tier: Tier) -> list[Run | ResumePoint]:
        """What `tier` would evict next, without what went since this call began, or what its jobs
        build on."""
        victims = self._victims.get(tier)
        if victims is None:
            victims = coming(tier.index, LOOKED_AT)
        else:
            victims = [v for v in victims if is_there(v) and not (isinstance(v, Run) and v.locks)]
        self._victims[tier] = victims
        return victims

    def _worth(self, tier: Tier, entry: Run | ResumePoint, gain: int) -> float:
        """Seconds that `entry` is expected to save at the next prompt, by `gain` segments."""
        if tier.policy.is_spare(entry):
            return 0.0
        chance = tier.policy.chance(entry)
        return 0.0 if chance is None else chance * self._saved(tier, entry, gain)

    def _saved(self, tier: Tier, entry: Entry, gain: int) -> float:
        """Seconds that a hit on `entry` saves which brings it from `tier`."""
        load = self._num_bytes(entry, gain) / tier.bytes_per_second  # no queue of now
        return max(0.0, self._planner.compute_seconds(gain) - load)


def left_over(there: Found, after: int) -> int:
    """Segments past boundary `after` of the chain in a place that serve nothing."""
    run = there.run
    if run.locks or run.children or not there.place.index.hybrid:
        return 0
    used = max(run.start, run.depths[-1] if run.depths else 0, after)
    return max(0, there.depth - used)


def beside(victim: Run | ResumePoint, there: Found, depth: int) -> tuple[int, int]:
    """Pages that the eviction of `victim` frees, and segments that a hit on it gains, once the
    chain `there` up to boundary `depth` is needed, and ends in an entry."""
    freed, gain = victim.freed, victim.gain
    run = victim.run if isinstance(victim, ResumePoint) else victim
    assert run is not None
    if run is there.run:
        own = len(victim.pages) if isinstance(victim, ResumePoint) else 0
        left = max(0, victim.depth - there.depth) * run.pages_per_segment
        freed = min(freed, own + left)
    if there.depth == depth < victim.depth and run_of(run, depth) is there.run:
        gain = min(gain, victim.depth - depth)
    return freed, gain
