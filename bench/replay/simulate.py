"""Requests through a `KVCache` on a simulated clock.

One engine serves requests in the order of their arrival. Prompts are computed one at a time, in chunks, at `prefill_rate`; answers are
decoded beside them, each at `decode_rate`. A request is admitted when the engine is free for its prompt, there is a slot, and
its next chunk finds pages; else it waits for the first answer to end. It takes the pages of its whole answer when its prompt is computed (so that no
answer is ever interrupted), and gives back what is not cached when the answer ends. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.kvcore import GroupSpec, KVCache, Prompt

from .engine import Engine, Timing
from .requests import Request
from .tiers import TierMemory

__all__ = ["Outcome", "Timing", "Workload", "replay"]


@dataclass
class Workload:
    """A trace in the order of arrival, with the keys of its prompts, which are computed once for each alignment.

    name: for tables. requests: sorted by arrival.
    """

    name: str
    requests: list[Request]
    _prompts: dict[int, list[Prompt]] = field(default_factory=dict, repr=False)
    _chains: dict[int, list[bytes]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"requests: expected at least one in workload {self.name!r}")
        self.requests.sort(key=lambda r: r.arrival)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(r.input + r.output for r in self.requests)

    def prompts(self, cache: KVCache) -> list[Prompt]:
        """Hashed prompts, for any cache of this alignment."""
        if cache.alignment not in self._prompts:
            self._prompts[cache.alignment] = [
                cache.match(r.tokens(i)[: r.input], salt=r.scope.encode()).prompt
                for i, r in enumerate(self.requests)
            ]
        return self._prompts[cache.alignment]

    def chains(self, cache: KVCache) -> list[bytes]:
        """Keys of each prompt and, where it is known, of its answer; 32 bytes a segment."""
        if cache.alignment not in self._chains:
            self._chains[cache.alignment] = [
                cache.match(r.tokens(i), salt=r.scope.encode()).prompt.keys if r.output else p.keys
                for i, (r, p) in enumerate(zip(self.requests, self.prompts(cache), strict=True))
            ]
        return self._chains[cache.alignment]


@dataclass
class Outcome:
    """What a replay saw, one entry a request: hits [n] tokens, from_device [n] those of them that no load brought, ttft [n] seconds
    (look-ups: 0); stalled: seconds in which all that waited had loads to wait for; stats: the cache's counters at the end;
    behind: what the host tier behind its pool reports."""

    hits: np.ndarray
    ttft: np.ndarray
    makespan: float
    stats: dict[str, int]
    from_device: np.ndarray
    stalled: float
    behind: dict[str, float | int]


def replay(
    workload: Workload,
    groups: Sequence[GroupSpec],
    *,
    num_pages: int,
    timing: Timing,
    progress: Callable[[int], object] = lambda n: None,
    behind: Callable[[KVCache], TierMemory] | None = None,
    **options: object,
) -> Outcome:
    """Serve `workload` from a pool of `num_pages` pages.

    options: of `KVCache` (retention, policy). progress: called with 1 after each request. behind: makes the host tier behind the pool.

    Raises: ValueError when a request alone does not fit the pool.
    """
    longest = workload.longest
    cache = KVCache(
        groups,
        num_pages=num_pages,
        max_requests=timing.max_requests,
        max_model_len=longest,
        **options,
    )  # type: ignore[arg-type]
    host = None if behind is None else behind(cache)
    engine = Engine(cache, timing, workload.requests, workload.prompts(cache), host, progress)
    makespan = engine.run() - workload.requests[0].arrival
    return Outcome(
        engine.hits, engine.ttft, makespan, cache.stats(), engine.from_device, engine.stalled,
        {} if host is None else host.report(),
    )  # fmt: skip
