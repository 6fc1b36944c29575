"""`kvcore.tier` behind the pool of a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from quire.kvcore import KVCache
from quire.kvcore.policies.base import EvictionPolicy
from quire.kvcore.prefix.index import PrefixIndex
from quire.kvcore.tier import Job, Tiers

from .links import Link, Transfer

if TYPE_CHECKING:
    from .engine import Engine, Timing

STORE, LOAD = "device>host", "host>device"


class TierMemory:
    """Host memory that keeps what `Tiers` chooses.

    Args:
        cache: an empty one.
        host: pages of the pool that it has the bytes of.
        link: bytes a second of each direction between device and host.
        policy: makes the eviction policy of the host; None: its own default.
        timing: of the engine.
        watermark: of `Tiers`.

    Attributes:
        links: by direction, `STORE` and `LOAD`.
    """

    def __init__(
        self, cache: KVCache, *, host: int, link: float, timing: Timing,
        policy: Callable[[], EvictionPolicy] | None = None, watermark: int | None = None,
    ) -> None:  # fmt: skip
        self._timing = timing
        self.tiers = Tiers(
            cache, num_pages=host + 1, bytes_per_second=link,
            prefill_tokens_per_second=timing.prefill_rate,
            policy=None if policy is None else policy(), watermark=watermark,
        )  # fmt: skip
        self.links = {STORE: Link(link), LOAD: Link(link)}
        self._transfers: dict[Job, Transfer] = {}

    def look(self, engine: Engine, number: int) -> Transfer | Literal["later"] | None:
        """The load that a waiting request should wait for; None: there is none; "later": there is
        no room for it now."""
        match = self.tiers.match(engine.prompts[number])
        pending = match.pending
        if pending is not None and pending.num_tokens > match.device.num_saved_tokens:
            return self._transfers[pending]
        if not match.num_bytes:
            return None
        job = self.tiers.load(match)
        return "later" if job is None else self._transfer(job)

    def _transfer(self, job: Job) -> Transfer:
        def done() -> None:
            del self._transfers[job]
            self.tiers.done(job)

        link = self.links[STORE if job.kind == "store" else LOAD]
        transfer = self._transfers[job] = Transfer(link, job.num_bytes, done)
        return transfer

    def stores(self, engine: Engine) -> list[Transfer]:
        """Transfers to the host to start now: as much as the link takes while the next chunk is
        computed."""
        seconds = self._timing.chunk / self._timing.prefill_rate
        room = self.links[STORE].room(engine.now, seconds)
        return [self._transfer(job) for job in self.tiers.stores(room)] if room else []

    def report(self) -> dict[str, float | int]:
        """Figures of the whole replay, for a row."""
        moved = {f"bytes {name}": link.num_bytes for name, link in self.links.items()}
        index = self.tiers.index
        used = index.pool.num_pages - 1 - index.pool.num_free
        unused = used - serving_pages(index)
        return {**moved, **self.tiers.stats(), "waste": unused / used if used else 0.0}


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
