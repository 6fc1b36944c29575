"""How quickly pages come over a link, and tokens are computed, as measured."""

from __future__ import annotations

MOVES = 0.2  # of the way, by what is as large as the largest so far
DOUBLING = 300.0  # seconds in which a rate that was slow and is not measured doubles


class Rate:
    """Units a second, of work that takes a fixed time besides.

    What is measured moves it part of the way, in the logarithm: a slow spell is seen as quickly as
    its end. Small work moves it less, by the square of its size, as its time is mostly the fixed
    one; so do the squares of a least-squares fit through the origin.

    Args:
        value: what is told, until something is measured.
        memory: of the largest work so far, the share that is left after each measurement. With 1.0
            small work never counts as large, however much of it follows.

    Attributes:
        value: units a second.
    """

    def __init__(self, value: float, memory: float) -> None:
        self.value, self._told, self._memory, self._most = value, value, memory, 0.0

    def measured(self, size: float, seconds: float) -> None:
        """`size` units, above 0, took `seconds`, above 0."""
        self._most = max(size, self._memory * self._most)
        self.value *= (size / seconds / self.value) ** (MOVES * (size / self._most) ** 2)

    def relax(self, seconds: float) -> None:
        """So much time has passed: where it was slower than told, it may not be any more. What seems
        too slow is not used, and what is not used is not measured; so it is tried again some
        day."""
        if self.value < self._told:
            self.value = min(self._told, self.value * 2 ** min(seconds / DOUBLING, 64.0))
