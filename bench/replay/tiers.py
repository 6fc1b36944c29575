"""`kvcore.tier` behind the pool of a replay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

from quire.kvcore import KVCache
from quire.kvcore.plan import OutOfPages
from quire.kvcore.policies.base import EvictionPolicy
from quire.kvcore.prefix.index import PrefixIndex
from quire.kvcore.tier import Job, Tiers, TierSpec

from .engine import Engine, Timing
from .links import Link, Transfer


class TierMemory:
    """Host memory and disk that keep what `Tiers` chooses.

    Args:
        cache: an empty one.
        host, disk: pages of the pool that each has the bytes of; 0: there is none.
        link, disk_link: bytes a second of each direction between device and host, and of whatever
            the disk is an end of.
        policy: makes the eviction policy of a tier; None: its own default.
        timing: of the engine.
        watermark: of `Tiers`.
        parts: (bytes of a part, parts of a page of each group), as of `Tiers`; None: whole pages.
    """

    def __init__(
        self, cache: KVCache, *, host: int, disk: int, link: float, disk_link: float,
        policy: Callable[[], EvictionPolicy] | None, timing: Timing, watermark: int | None = None,
        parts: tuple[int, tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        self._cache, self._timing = cache, timing
        sizes = {"host": (host, link), "disk": (disk, disk_link)}
        pool_bytes = cache.layout.page_bytes
        size, counts = parts or (pool_bytes, None)
        specs = {
            name: TierSpec(
                pages * pool_bytes // size + 1, rate, None if policy is None else policy()
            )
            for name, (pages, rate) in sizes.items()
            if pages
        }
        self.tiers = Tiers(
            cache, **specs, prefill_tokens_per_second=timing.prefill_rate, watermark=watermark,
            page_bytes=size, parts=counts,
        )  # fmt: skip
        places = ("device", *specs)
        self.links = {
            f"{a}>{b}": Link(disk_link if "disk" in (a, b) else link)
            for a in places
            for b in places
            if a != b
        }
        self._transfers: dict[Job, Transfer] = {}

    def look(self, engine: Engine, number: int) -> Transfer | Literal["later"] | None:
        """As of `engine.Behind`."""
        match = self.tiers.match(engine.prompts[number])
        pending = match.pending
        if pending is not None and pending.num_tokens > match.device.num_saved_tokens:
            return self._transfers[pending]
        if not match.num_bytes:
            return None
        job = self.tiers.load(match)
        if isinstance(job, OutOfPages):
            return "later"
        return None if job is None else self._transfer(job)

    def prefetch(self, engine: Engine, number: int) -> Transfer | None:
        """As of `engine.Behind`: the hint of that name."""
        job = self.tiers.hint(self.tiers.match(engine.prompts[number]), "prefetch").job
        if job is None:
            return None
        return self._transfers[job] if job in self._transfers else self._transfer(job)

    def _transfer(self, job: Job) -> Transfer:
        sizes: dict[str, int] = {}
        for c in job.copies:
            name = f"{c.source}>{c.target}"
            sizes[name] = sizes.get(name, 0) + len(c) * self.tiers.page_bytes

        def done(seconds: float) -> None:
            del self._transfers[job]
            self.tiers.done(job, seconds=seconds or None)

        transfer = self._transfers[job] = Transfer(sizes, done)
        return transfer

    def computed(self, number: int, start: int, end: int, seconds: float) -> None:
        """As of `engine.Behind`."""
        if seconds:
            self.tiers.computed(end - start, seconds)

    def stores(self, engine: Engine) -> list[Transfer]:
        """As of `engine.Behind`: as much as each link takes while the next chunk is computed."""
        seconds = self._timing.chunk / self._timing.prefill_rate
        places = ["device", *(tier.name for tier in self.tiers.tiers)]
        room = {b: self.links[f"{a}>{b}"].room(engine.now, seconds) for a, b in pairwise(places)}
        return (
            [self._transfer(job) for job in self.tiers.stores(room)] if any(room.values()) else []
        )

    def released(self, number: int) -> None:
        """As of `engine.Behind`: tiers know of no requests."""

    def report(self) -> dict[str, float | int]:
        """As of `engine.Behind`."""
        moved = {f"bytes {name}": link.num_bytes for name, link in self.links.items()}
        used = unused = 0
        for tier in self.tiers.tiers:
            pool = tier.index.pool
            taken = pool.num_pages - 1 - pool.num_free
            used += taken
            unused += taken - serving_pages(tier.index)
        stats = {k: v for k, v in self.tiers.stats().items() if "/" in k}
        return {**moved, **stats, "waste": unused / used if used else 0.0}


def serving_pages(index: PrefixIndex) -> int:
    """Pages of an index that a hit could have: segments up to the last resume point of their chain,
    and the pages of resume points, each once."""
    pages, segments = set[int](), 0
    ends: dict[int, int] = {}  # by the run: segments up to which a point below needs it
    for run in reversed(list(index.runs())):  # children first
        last = run.depth if not index.hybrid else max(run.points, default=0)
        end = max(ends.pop(id(run), 0), last)
        if end > run.start:
            segments += min(end, run.depth) - run.start
            if run.parent is not None:
                ends[id(run.parent)] = max(ends.get(id(run.parent), 0), run.start)
        for point in run.points.values():
            pages.update(point.pages.tolist())
    return segments * index.pages_per_segment + len(pages - {0})
