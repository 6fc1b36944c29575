"""Requests through a `KVCache` on a simulated clock.

One engine serves requests in the order of their arrival. Prompts are computed one at a time, in chunks, at `prefill_rate`; answers are
decoded beside them, each at `decode_rate`. A request is admitted when the engine is free for its prompt, there is a slot, and
its next chunk finds pages; else it waits for the first answer to end. It takes the pages of its whole answer when its prompt is computed (so that no
answer is ever interrupted), and gives back what is not cached when the answer ends. Nothing is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.kvcore import GroupSpec, KVCache, Prompt, StepPlan

from .requests import Request


@dataclass(frozen=True)
class Timing:
    """How fast the engine is.

    prefill_rate: prompt tokens a second, of all requests together. decode_rate: answer tokens a second, of each request.
    chunk: tokens of a prefill chunk. max_requests: requests at once.
    """

    prefill_rate: float = 20_000.0
    decode_rate: float = 50.0
    chunk: int = 8192
    max_requests: int = 64

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "decode_rate", "chunk", "max_requests"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected > 0, got {getattr(self, name)}")


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
    """What a replay saw, one entry a request: hits [n] tokens, ttft [n] seconds (look-ups: 0); and the cache's counters at the end."""

    hits: np.ndarray
    ttft: np.ndarray
    makespan: float
    stats: dict[str, int]


def replay(
    workload: Workload,
    groups: Sequence[GroupSpec],
    *,
    num_pages: int,
    timing: Timing,
    progress: Callable[[int], object] = lambda n: None,
    **options: object,
) -> Outcome:
    """Serve `workload` from a pool of `num_pages` pages.

    options: of `KVCache` (retention, policy). progress: called with 1 after each request.

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
    engine = _Engine(cache, timing)
    prompts = workload.prompts(cache)
    hits, ttft = np.zeros(len(prompts), np.int64), np.zeros(len(prompts))
    for i, (request, prompt) in enumerate(zip(workload.requests, prompts, strict=True)):
        engine.wait_until(request.arrival)
        if request.output == 0:
            hits[i] = cache.match(prompt).num_tokens
        else:
            hits[i] = engine.serve(i, request, prompt)
            ttft[i] = engine.now - request.arrival
        progress(1)
    makespan = engine.drain() - workload.requests[0].arrival
    return Outcome(hits, ttft, makespan, cache.stats())


class _Engine:
    def __init__(self, cache: KVCache, timing: Timing) -> None:
        self.cache = cache
        self.timing = timing
        self.now = 0.0
        self._running: list[tuple[float, int]] = []  # (end of the answer, request id)

    def serve(self, number: int, request: Request, prompt: Prompt) -> int:
        """Admit a request, compute its prompt, start its answer; returns its hit."""
        cache = self.cache
        while not cache.num_free_slots:
            self._finish_one()
        slot = cache.admit(number, cache.match(prompt))
        hit = int(cache.num_computed[slot])
        tokens = request.tokens(number)
        for start, end, rate in (
            (hit, request.input, self.timing.prefill_rate),
            (request.input, len(tokens), None),
        ):
            while start < end:
                count = min(self.timing.chunk, end - start)
                [count] = cache.cut([slot], [count]).tolist()
                plan = cache.plan([slot], [count])
                while not isinstance(plan, StepPlan):
                    if not self._running:
                        raise ValueError(
                            f"pool: expected room for request {number} of {len(tokens)} tokens: {plan}"
                        )
                    self._finish_one()
                    plan = cache.plan([slot], [count])
                cache.commit(plan, tokens[start : start + count])
                start += count
                if rate:
                    self.wait_until(self.now + count / rate)
        heapq.heappush(self._running, (self.now + request.output / self.timing.decode_rate, number))
        return hit

    def wait_until(self, time: float) -> None:
        """Advance the clock; answers end on the way."""
        while self._running and self._running[0][0] <= time:
            self._finish_one()
        self.now = max(self.now, time)

    def drain(self) -> float:
        """End all answers; returns the time."""
        while self._running:
            self._finish_one()
        return self.now

    def _finish_one(self) -> None:
        end, number = heapq.heappop(self._running)
        self.now = max(self.now, end)
        self.cache.release(number)
