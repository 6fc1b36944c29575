"""What `Adaptive` remembers: entries, the prompts that left them, and who returned."""

from __future__ import annotations

from .base import Entry

DOUBT = 10.0  # imagined entries of a kind, of the mean share: it has to show that it differs


class Kind:
    """How many entries of one kind were made and returned to; late ones count more.

    Attributes:
        made, returned: how many.
        waited: prompts until these returns, in all.
    """

    __slots__ = ("made", "returned", "waited")

    def __init__(self) -> None:
        self.made = self.returned = self.waited = 0.0

    def count(self) -> None:
        """One more was made."""
        self.made += 1
        if self.made > 1024:
            self.made /= 2
            self.returned /= 2
            self.waited /= 2

    def share(self, prior: float) -> float:
        """How many were returned to; `prior` while there is little to tell."""
        return (self.returned + DOUBT * prior) / (self.made + DOUBT)

    def wait(self, prior: float) -> float:
        """Mean time to a return; `prior` while there is little to tell."""
        return (self.waited + DOUBT * prior) / (self.returned + DOUBT)


class Visit:
    """A prompt that was admitted."""

    __slots__ = ("at", "end", "later", "moved_on", "records")

    def __init__(self, at: int, end: int, later: bool) -> None:
        self.at = at  # prompts before and with it
        self.end = end  # segments
        self.later = later  # it goes on with an earlier one
        self.moved_on = False  # a later one goes on with it
        self.records: list[Record] = []


class Record:
    """What `Adaptive` remembers of an entry, cached or evicted."""

    __slots__ = ("entry", "kind", "last_used", "open", "since", "stand", "visit")

    def __init__(self) -> None:
        self.entry: Entry | None = None  # while it is filed
        self.visit: Visit | None = None
        self.kind = ""
        self.since = 0  # prompt since which it has this kind, or was used
        self.last_used = -1
        self.open = False  # no prompt returned to it since
        self.stand: Record | None = None  # an evicted longer entry whose returns it serves

    @property
    def later(self) -> bool:
        """Its prompt goes on with an earlier one."""
        return self.visit is not None and self.visit.later


def hazard(share: float, half: float, age: float) -> float:
    """Returns per prompt to an entry that none returned to so far.

    A `share` of its kind is returned to at all, half of these within `half` prompts, with a long
    tail (log-logistic, shape 1): an old entry is less and less likely to be one of them.
    """
    left = share * half / (half + age)
    return left / ((half + age) * (1 - share + left))


GONE = (0, Record())
NOTHING = Kind()
