"""Recency and saved compute in one rank; regretted evictions move the weight between them."""

from __future__ import annotations

from .base import Entry, Ghosts, Ranked


class CostAware(Ranked):
    """Recency plus `weight` times the compute that an entry saves for the pages it keeps.

    GreedyDual: an entry is filed at ``floor + value``, where floor is the rank of the last victim,
        so that value
    buys time and no entry stays forever. The value mixes two parts, recency (the same for all) and
    segments saved per page, scaled by their running mean. When an entry comes back that was evicted
    lately, the part that spoke against it loses weight.

    Source: Marconi (arXiv 2411.19379) 4.2 for the mix; GreedyDual-Size for the aging; LeCaR for
        learning from ghosts.

    Args:
        weight: initial weight of saved compute, 0 to 1.
        num_ghosts: evictions remembered.
        step: factor by which a regretted eviction moves the weight.
    """

    def __init__(self, weight: float = 0.3, num_ghosts: int = 4096, step: float = 0.05) -> None:
        super().__init__()
        for name, share in (("weight", weight), ("step", step)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: expected 0..1, got {share}")
        self.weight = weight
        self._step = step
        self._ghosts = Ghosts(num_ghosts)
        self._mean = 0.0
        self._filed = 0
        self._last_tick = 0

    def rank(self, entry: Entry) -> float:
        """Tick of the last use, plus the time that the entry's value buys."""
        regret = self._ghosts.pop(entry.key)
        if regret is not None:
            # It was evicted as less valuable than the mean (trust value less), or as merely old
            # (trust it more).
            self.weight += self._step * (-self.weight if regret < 1 else 1 - self.weight)
        value = entry.gain / max(1, entry.num_pages)
        self._filed += 1
        self._mean += (value - self._mean) / min(self._filed, 1024)
        self._last_tick = max(self._last_tick, entry.last_used)
        relative = min(8.0, value / self._mean) if self._mean else 1.0
        horizon = len(self._tickets)  # entries cached: about the ticks that one stays
        return entry.last_used + self.weight * horizon * relative

    def evicted(self, entry: Entry, rank: float) -> None:
        """Remember the victim and how its value compared with the mean."""
        value = entry.gain / max(1, entry.num_pages)
        self._ghosts.add(entry.key, value / self._mean if self._mean else 1.0)
