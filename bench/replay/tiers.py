"""Host memory (`kvcore.tier`) behind the pool of a replay, and the link to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from quire.kvcore import KVCache, Prompt
from quire.kvcore.policies.base import EvictionPolicy
from quire.kvcore.prefix.index import PrefixIndex
from quire.kvcore.tier import Job, Tiers

STORE, LOAD = "device>host", "host>device"


class Link:
    """One direction of a link: transfers go over it one after another, in the order of their start.

    Attributes:
        bytes_per_second: rate.
        free_at: end of the last transfer so far, in seconds.
        num_bytes: sum over all transfers so far.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.free_at = 0.0
        self.num_bytes = 0

    def send(self, now: float, num_bytes: int) -> float:
        """Queue `num_bytes` at time `now`; returns the time of their arrival."""
        self.free_at = max(now, self.free_at) + num_bytes / self.bytes_per_second
        self.num_bytes += num_bytes
        return self.free_at

    def room(self, now: float, seconds: float) -> int:
        """Bytes that arrive within `seconds` when queued at time `now`."""
        return max(0, int((now + seconds - max(now, self.free_at)) * self.bytes_per_second))


@dataclass(eq=False)
class Transfer:
    """A job on its way over the link.

    Attributes:
        end: time at which all bytes are there.
        done: to be called then.
        waiting: numbers of the requests that wait for it.
    """

    end: float
    done: Callable[[], object]
    waiting: list[int] = field(default_factory=list)


class TierMemory:
    """Host memory that keeps the entries chosen by `Tiers`.

    Args:
        cache: an empty one.
        host: size, in pages of the pool.
        link: bytes a second of each direction between device and host.
        prefill_rate: prompt tokens that the engine computes in a second.
        chunk: tokens of a prefill chunk.
        policy: makes the eviction policy of the host; None: the default of `Tiers`.
        watermark: see `Tiers`.

    Attributes:
        links: by direction, `STORE` and `LOAD`.
    """

    def __init__(
        self, cache: KVCache, *, host: int, link: float, prefill_rate: float, chunk: int,
        policy: Callable[[], EvictionPolicy] | None = None, watermark: int | None = None,
    ) -> None:  # fmt: skip
        self.tiers = Tiers(
            cache, num_pages=host + 1, bytes_per_second=link,
            prefill_tokens_per_second=prefill_rate,
            policy=None if policy is None else policy(), watermark=watermark,
        )  # fmt: skip
        self.links = {STORE: Link(link), LOAD: Link(link)}
        self._chunk_seconds = chunk / prefill_rate
        self._transfers: dict[Job, Transfer] = {}

    def load(self, prompt: Prompt, now: float) -> Transfer | Literal["later"] | None:
        """The load that a waiting request needs, if any; "later": there is no room for it now."""
        match = self.tiers.match(prompt)
        pending = match.pending
        if pending is not None and pending.num_tokens > match.device.num_saved_tokens:
            return self._transfers[pending]
        if not match.num_bytes:
            return None
        job = self.tiers.load(match)
        return "later" if job is None else self._transfer(job, now)

    def stores(self, now: float) -> list[Transfer]:
        """Transfers to start now: as much as the link takes while the next chunk is computed."""
        room = self.links[STORE].room(now, self._chunk_seconds)
        return [self._transfer(job, now) for job in self.tiers.stores(room)] if room else []

    def _transfer(self, job: Job, now: float) -> Transfer:
        def done() -> None:
            del self._transfers[job]
            self.tiers.done(job)

        link = self.links[STORE if job.kind == "store" else LOAD]
        transfer = self._transfers[job] = Transfer(link.send(now, job.num_bytes), done)
        return transfer

    def report(self) -> dict[str, float | int]:
        """Figures of the whole replay, for a row."""
        moved = {f"bytes {name}": link.num_bytes for name, link in self.links.items()}
        index = self.tiers.index
        used = index.pool.num_pages - 1 - index.pool.num_free
        unused = used - serving_pages(index)
        return {**moved, **self.tiers.stats(), "waste": unused / used if used else 0.0}


def serving_pages(index: PrefixIndex) -> int:
    """Pages of an index that a hit could use.

    These are segments up to the last resume point of their chain, and the pages of resume points,
    each counted once.
    """
    pages, segments = set[int](), 0
    ends: dict[int, int] = {}  # id(run) -> segments up to which a point below needs it
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
