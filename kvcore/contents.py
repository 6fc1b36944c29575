"""What is cached, for those who manage it: pins, eviction and announcements."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from .announcer import Announcer
from .arrays import Int64, as_ints
from .pages import PagePool
from .plan import Steps
from .prefix.index import PrefixIndex
from .prefix.lookup import Lookup, Match
from .prefix.pins import Pins, expiry_of
from .prefix.requests import Sequences
from .spec import as_int, as_seconds

if TYPE_CHECKING:
    from .tier.tiers import Tiers


class CacheContents:
    """The part of `KVCache` that no step needs.

    Attributes:
        alignment: tokens of a segment: hits are multiples of it.
        pool: the pages.
        index: what is cached.
        sequences: the running requests.
        tiers: what is behind the pool (`tier.Tiers` puts itself here).
    """

    alignment: int
    pool: PagePool
    index: PrefixIndex
    sequences: Sequences
    tiers: Tiers | None = None
    _steps: Steps
    _lookup: Lookup
    _pins: Pins
    _announcer: Announcer | None

    def pin(self, match: Match, *, now: float, ttl: float) -> int:
        """Keep a cached prefix until everything unpinned is gone, or `ttl` seconds have passed.

        Pins never block an admission: under pressure the oldest are demoted and evicted. When the
        budget max_pinned_pages is exceeded, the oldest pins are demoted at once.

        Args:
            match: from `match`; its hit is looked up again.
            now: seconds on the caller's clock.
            ttl: seconds from now; inf for ever.

        Returns:
            Tokens of the pinned prefix; 0 if nothing is cached or it alone exceeds the budget.

        Raises:
            ValueError: `ttl` is not positive, or `now` not a finite number.
        """
        expiry = expiry_of(now, ttl)
        match, run = self._lookup.again(match)
        self.index.tick += 1
        depth = match.num_tokens // self.alignment
        return self._pins.pin(run, depth, expiry) * self.alignment

    def pin_request(self, request_id: Hashable, *, now: float, ttl: float) -> None:
        """Pin what is cached of a running request when it is released.

        Raises:
            ValueError: the id is unknown, `ttl` is not positive, or `now` not a finite number.
        """
        self._pins.at_release[self.sequences.slot_of(request_id)] = expiry_of(now, ttl)

    def unpin(self, match: Match) -> bool:
        """End the pin of the prefix that `match` finds; False if it is not pinned."""
        match, run = self._lookup.again(match)
        if not match.num_tokens:
            return False
        self.index.tick += 1
        return self._pins.unpin(run, match.num_tokens // self.alignment)

    def expire_pins(self, now: float) -> int:
        """End the pins whose time has passed; returns how many.

        Raises:
            ValueError: `now` is not a finite number.
        """
        return self._pins.expire(as_seconds("now", now))

    def clear(self) -> None:
        """Forget everything cached that no running request needs, pinned or not, in tiers too."""
        self._steps.changed()
        if self.tiers is not None:
            self.tiers.clear()
        self.index.clear()

    def evict(self, num_pages: int) -> int:
        """Free cached pages now, as pressure would.

        Args:
            num_pages: pages wanted.

        Returns:
            Pages freed: at least `num_pages`, or all that running requests do not need.
        """
        num_pages = as_int("num_pages", num_pages, 0)
        before = self.pool.num_free
        self._steps.planned = None
        self.index.evict(min(num_pages, self.index.num_evictable))
        return self.pool.num_free - before

    def evict_pages(self, pages: Any) -> Int64:
        """Free certain pages, with what cannot be found without them: to give them back, or because
        their rows turned out wrong, for which reason copies of them in tiers go too. Looks at all
        that is cached.

        Args:
            pages: [n] ints in 1..num_pages - 1, in any order; repeats and free pages allowed.

        Returns:
            [m] int64, ascending: those of them that running requests need. They are not free, and
            what is cached of them stays findable.

        Raises:
            ValueError: not integers, or out of range. Nothing changed.
        """
        ids = self._page_ids(pages)
        self._steps.planned = None
        is_wanted = np.zeros(self.pool.num_pages, dtype=np.bool_)
        is_wanted[ids] = True
        if self.tiers is not None:
            self.tiers.forget_copies(is_wanted)
        self.index.drop_pages(is_wanted)
        is_wanted[self.pool.free_pages()] = False
        needed: Int64 = is_wanted.nonzero()[0]
        return needed

    def _page_ids(self, pages: Any) -> Int64:
        ids = as_ints("pages", pages)
        if ids.ndim != 1 or (ids < 1).any() or (ids >= self.pool.num_pages).any():
            raise ValueError(
                f"pages: expected a vector of 1..{self.pool.num_pages - 1}, got {ids.tolist()}"
            )
        return ids

    def announce(self) -> None:
        """Write events that tell everything cached now to a reader that is late or lost track.

        They replace those that nobody took yet, and may be more than the log holds: each is made
        when it is taken (`EventLog.take(most=)` takes some).

        Raises:
            ValueError: the cache was made without events.
        """
        if self._announcer is None:
            raise ValueError(
                "events: expected an EventLog at construction to announce to, got None"
            )
        others = [] if self.tiers is None else self.tiers.noted()
        self._announcer.everything(self.index.runs(), others)
