"""Whether an entry is worth what a full tier would evict for it."""

from __future__ import annotations

from collections.abc import Callable

from ..policies.base import Entry
from ..prefix.tree import ResumePoint, Run
from .match import Planner
from .places import Place, Tier
from .watched import Watched, coming, is_there

LOOKED_AT = 64  # entries of a tier that would go next, in one call
PATIENCE = 32  # calls until what was refused is looked at again
REMEMBERED = 2048


class Admission:
    """Lets an entry into a tier where a hit on it is expected to save more, for each page that it
    takes, than hits on what has to go: what the tier would evict next is not worth a copy.

    Both sides are seen as the tier would have them, since what leaves the device in the end is
    there alone. Where the policies cannot tell how likely a hit is, everything is let in.

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

    def begin(self) -> None:
        """A call that stores begins."""
        self._calls += 1
        self._victims.clear()
        if len(self._refused) > REMEMBERED:
            self._refused = {e: call for e, call in self._refused.items() if call > self._calls}

    def is_refused(self, entry: Run | ResumePoint) -> bool:
        """Whether `entry` was refused lately."""
        return self._calls < self._refused.get(entry, 0)

    def admits(
        self, source: Place, target: Tier, entry: Run | ResumePoint, num_pages: int, gain: int
    ) -> bool:
        """Whether `target` is to have `entry` of `source`.

        Args:
            num_pages: that it would take there. gain: segments that a hit on it would save over
                the next shorter entry there.
        """
        saved = self._saved(target, entry, gain)
        if not saved:  # to compute it is as quick
            return self._refuse(entry)
        lacks = num_pages - target.num_free
        chance = _chance(source, entry)
        if lacks <= 0 or chance is None:
            return True
        density = chance * saved / num_pages
        for victim in self._next(target):
            if lacks <= 0:
                break
            freed = victim.freed
            lacks -= freed
            if density * freed < self._worth(target, victim):
                return self._refuse(entry)
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

    def _worth(self, tier: Tier, entry: Run | ResumePoint) -> float:
        """Seconds that `entry` is expected to save at the next prompt."""
        policy = tier.index.policy
        if isinstance(policy, Watched) and policy.is_spare(entry):
            return 0.0
        chance = _chance(tier, entry)
        return 0.0 if chance is None else chance * self._saved(tier, entry, entry.gain)

    def _saved(self, tier: Tier, entry: Entry, gain: int) -> float:
        """Seconds that a hit on `entry` saves which brings it from `tier`."""
        load = self._num_bytes(entry, gain) / tier.bytes_per_second  # no queue of now
        return max(0.0, self._planner.compute_seconds(gain) - load)


def _chance(place: Place, entry: Run | ResumePoint) -> float | None:
    """How likely a hit on an entry is, if the policy of its place can tell."""
    policy = place.index.policy
    return policy.chance(entry) if isinstance(policy, Watched) else None
