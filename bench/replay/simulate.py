"""Serve requests from a `KVCache` on a simulated clock.

Prompts are computed one at a time, in chunks and in the order of arrival; answers are decoded
beside them. A request starts when there is a slot. It takes the pages of its whole answer when its
prompt is computed, so that no answer is ever interrupted. A load from host memory comes before its
prompt, and holds up those behind it. Nothing is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.kvcore import GroupSpec, KVCache, Prompt, StepPlan

from ..common.traces import TraceRequest
from .host import HostMemory


@dataclass
class TraceWorkload:
    """A trace, sorted by arrival, and its title in tables and pictures."""

    name: str
    requests: list[TraceRequest]
    _prompts: dict[int, list[Prompt]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"requests: expected at least one in workload {self.name!r}")
        self.requests.sort(key=lambda r: r.arrival)

    @property
    def longest(self) -> int:
        return max(r.input + r.output for r in self.requests)

    def prompts(self, cache: KVCache) -> list[Prompt]:
        """Hashed prompts, computed once for all caches of this alignment."""
        if cache.alignment not in self._prompts:
            self._prompts[cache.alignment] = [
                cache.match(r.tokens(i)[: r.input], salt=r.scope.encode()).prompt
                for i, r in enumerate(self.requests)
            ]
        return self._prompts[cache.alignment]

    def chains(self, cache: KVCache) -> list[bytes]:
        """Keys of each prompt with its answer, 32 bytes a segment."""
        return [
            cache.match(r.tokens(i), salt=r.scope.encode()).prompt.keys
            for i, r in enumerate(self.requests)
        ]


@dataclass(frozen=True)
class SimulatedTiming:
    """Rates and limits of the engine.

    Attributes:
        prefill_rate: prompt tokens a second, of all requests together.
        decode_rate: answer tokens a second, of each request.
        chunk: tokens of a prefill chunk.
        max_requests: requests at once.
    """

    prefill_rate: float = 20_000.0
    decode_rate: float = 50.0
    chunk: int = 8192
    max_requests: int = 64


class Replay:
    """A run of a workload, and its figures.

    Attributes:
        cache, host: the pool and the memory behind it; host None: there is none.
        requests: [n], sorted by arrival.
        hits, from_device: [n] prompt tokens taken from the cache, and those that no load brought.
        ttft: [n] seconds to the first token; 0 for look-ups.
        makespan: seconds from the first arrival to the end of the last answer.
        loading: seconds of all loads.
    """

    def __init__(
        self,
        workload: TraceWorkload,
        cache: KVCache,
        timing: SimulatedTiming,
        host: HostMemory | None,
    ) -> None:
        self.cache, self.host, self.requests = cache, host, workload.requests
        self._timing, self._prompts = timing, workload.prompts(cache)
        n = len(self.requests)
        self.hits, self.from_device = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.ttft, self.makespan, self.loading = np.zeros(n), 0.0, 0.0
        self._now = 0.0
        self._ends: list[tuple[float, int]] = []  # of answers: (time, request)

    def run(self, progress: Callable[[int], object]) -> None:
        """Serve every request; ``progress`` is called with 1 after each."""
        for number, request in enumerate(self.requests):
            self._advance(request.arrival)
            self._serve(number, request)
            progress(1)
        while self._ends:
            self._advance(self._ends[0][0])
        self.makespan = self._now - self.requests[0].arrival

    def _advance(self, time: float) -> None:
        """Go on to ``time``; answers that end on the way are released."""
        while self._ends and self._ends[0][0] <= time:
            end, number = heapq.heappop(self._ends)
            self._now = max(self._now, end)
            self._release(number)
            if self.host is not None:
                self.host.store()
        self._now = max(self._now, time)

    def _serve(self, number: int, request: TraceRequest) -> None:
        """Compute a prompt and start its answer; a look-up asks for its hit alone."""
        if request.output == 0:
            self.hits[number] = self.from_device[number] = self._look_up(number)
            return
        while len(self._ends) == self._timing.max_requests:
            self._advance(self._ends[0][0])
        start = self.hits[number] = self._admit(number)
        tokens = request.tokens(number)
        while start < len(tokens):
            end = request.input if start < request.input else len(tokens)
            count = self._compute(number, tokens[start:end])
            if start < request.input:
                self._advance(self._now + count / self._timing.prefill_rate)
            if self.host is not None:
                self.host.store()
            start += count
        self.ttft[number] = self._now - request.arrival
        answered = self._now + request.output / self._timing.decode_rate
        heapq.heappush(self._ends, (answered, number))

    def _compute(self, number: int, tokens: np.ndarray) -> int:
        """Put the next chunk of ``tokens`` into pages; returns its length."""
        count = self._take_pages(number, tokens)
        while isinstance(count, str):
            if not self._ends:
                request = self.requests[number]
                length = request.input + request.output
                raise ValueError(
                    f"pool: expected room for request {number} of {length} tokens: {count}"
                )
            self._advance(self._ends[0][0])
            count = self._take_pages(number, tokens)
        return count

    # Calls of the allocator.

    def _look_up(self, number: int) -> int:
        return self.cache.match(self._prompts[number]).num_tokens

    def _admit(self, number: int) -> int:
        """Start a request behind its hit; returns the tokens of this."""
        prompt = self._prompts[number]
        self.from_device[number] = self.cache.match(prompt).num_saved_tokens
        if self.host is not None:
            seconds = self.host.load(prompt)
            while seconds is None and self._ends:  # no room until an answer ends
                self._advance(self._ends[0][0])
                seconds = self.host.load(prompt)
            self._advance(self._now + (seconds or 0.0))
            self.loading += seconds or 0.0
        slot = self.cache.admit(number, self.cache.match(prompt))
        assert isinstance(slot, int)
        return int(self.cache.num_computed[slot])

    def _take_pages(self, number: int, tokens: np.ndarray) -> int | str:
        """Compute at most a chunk of ``tokens``; returns its length, or why there is no room."""
        slot = self.cache.slot_of(number)
        [count] = self.cache.cut([slot], [min(self._timing.chunk, len(tokens))]).tolist()
        plan = self.cache.plan([slot], [count])
        if not isinstance(plan, StepPlan):
            return str(plan)
        self.cache.commit(plan, tokens[:count])
        return int(count)

    def _release(self, number: int) -> None:
        self.cache.release(number)


def replay(
    workload: TraceWorkload, groups: Sequence[GroupSpec], *, num_pages: int,
    timing: SimulatedTiming, progress: Callable[[int], object] = lambda n: None,
    behind: Callable[[KVCache], HostMemory] | None = None, **options: object,
) -> Replay:  # fmt: skip
    """Serve ``workload`` from a pool of ``num_pages`` pages.

    Args:
        behind: makes the host memory behind the pool.
        options: arguments of `KVCache` (retention, policy, replay_tokens).

    Raises:
        ValueError: a request alone does not fit the pool.
    """
    cache = KVCache(
        groups, num_pages=num_pages, max_requests=timing.max_requests,
        max_model_len=workload.longest, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    run = Replay(workload, cache, timing, None if behind is None else behind(cache))
    run.run(progress)
    return run
