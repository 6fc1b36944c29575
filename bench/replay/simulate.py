"""Requests through a `KVCache` on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.kvcore import GroupSpec, KVCache, Prompt

from .engine import Engine, Timing
from .requests import Request
from .tiers import TierMemory

__all__ = ["Timing", "Workload", "replay"]


@dataclass
class Workload:
    """A trace in the order of arrival; its keys are computed once for each alignment.

    Attributes:
        name: title of tables and pictures.
        requests: sorted by arrival.
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
        """Keys of each prompt and its answer, 32 bytes a segment."""
        if cache.alignment not in self._chains:
            self._chains[cache.alignment] = [
                cache.match(r.tokens(i), salt=r.scope.encode()).prompt.keys
                for i, r in enumerate(self.requests)
            ]
        return self._chains[cache.alignment]


def replay(
    workload: Workload, groups: Sequence[GroupSpec], *, num_pages: int, timing: Timing,
    progress: Callable[[int], object] = lambda n: None,
    behind: Callable[[KVCache], TierMemory] | None = None, **options: object,
) -> Engine:  # fmt: skip
    """Serve `workload` from a pool of `num_pages` pages.

    Args:
        progress: called with 1 after each request.
        behind: makes the host tier behind the pool; None: no tier.
        options: of `KVCache` (retention, policy).

    Returns:
        The engine, which has the figures.

    Raises:
        ValueError: a request alone does not fit the pool.
    """
    cache = KVCache(
        groups, num_pages=num_pages, max_requests=timing.max_requests,
        max_model_len=workload.longest, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    host = None if behind is None else behind(cache)
    engine = Engine(cache, timing, workload.requests, workload.prompts(cache), host, progress)
    engine.run()
    return engine
