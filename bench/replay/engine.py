"""A serving engine on a simulated clock, with or without a host tier behind its pool.

Prompts are computed one at a time, in chunks; answers are decoded beside them. Requests start in
the order of their arrival, when there is a slot and the next chunk finds pages. A request takes the
pages of its whole answer when its prompt is computed, so that no answer is ever interrupted.

A load from the host starts when its request is among the first that wait, and holds no slot. Its
request does not hold up those behind it. It is admitted when the load ends and a slot is free, so
that the loaded entries stay. Nothing is random.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.kvcore import KVCache, Prompt, StepPlan

from .requests import Request
from .tiers import TierMemory, Transfer

MAX_LOADS = 3  # of one request: loaded entries may be evicted before it is admitted


@dataclass(frozen=True)
class Timing:
    """Rates and limits of the engine.

    Attributes:
        prefill_rate: prompt tokens a second, of all requests together.
        decode_rate: answer tokens a second, of each request.
        chunk: tokens of a prefill chunk.
        max_requests: requests at once.
        ahead: waiting requests whose loads may start.
    """

    prefill_rate: float = 20_000.0
    decode_rate: float = 50.0
    chunk: int = 8192
    max_requests: int = 64
    ahead: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}: expected > 0, got {value}")


class Engine:
    """Serve requests; `run` does it.

    Args:
        cache: an empty one.
        timing: rates and limits.
        requests, prompts: [n], sorted by arrival.
        behind: host tier behind the pool; None: no tier.
        progress: called with 1 after each prompt.

    Attributes:
        now: seconds since the start of the trace; after `run` the end of the last answer.
        hits: [n] tokens of each prompt taken from the cache.
        from_device: [n] those of them that no load brought.
        ttft: [n] seconds to the first token; 0 for look-ups.
        stalled: seconds in which no prompt was computed because all waiting requests had loads.
    """

    def __init__(
        self, cache: KVCache, timing: Timing, requests: Sequence[Request],
        prompts: Sequence[Prompt], behind: TierMemory | None = None,
        progress: Callable[[int], object] = lambda n: None,
    ) -> None:  # fmt: skip
        self.cache, self.timing, self.behind = cache, timing, behind
        self.requests, self.prompts, self.progress = requests, prompts, progress
        self.now, self.stalled = 0.0, 0.0
        n = len(requests)
        self.hits, self.from_device = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.ttft = np.zeros(n)
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # ends of answers, transfers
        self._num_events = 0
        self._arrived = 0
        # Of requests by number:
        self._waiting: dict[int, None] = {}
        self._slots: dict[int, int] = {}  # admitted, but still waiting
        self._loading: set[int] = set()
        self._num_loads: dict[int, int] = {}
        self._storing = 0

    # Clock.

    @property
    def makespan(self) -> float:
        """Seconds since the first arrival."""
        return self.now - self.requests[0].arrival

    def run(self) -> None:
        """Serve everything."""
        while True:
            number = self._next()
            if number is not None:
                self._serve(number)
                continue
            time = min(self._next_event(), self._next_arrival())
            if time == math.inf:
                assert not self._waiting
                return
            before, stalled = self.now, bool(self._loading)
            self._advance(time)
            if stalled:
                self.stalled += self.now - before

    def _next_event(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def _next_arrival(self) -> float:
        if self._arrived == len(self.requests):
            return math.inf
        return self.requests[self._arrived].arrival

    def _advance(self, time: float) -> None:
        """Go on to `time`; on the way answers and transfers end, and requests arrive."""
        while min(event := self._next_event(), arrival := self._next_arrival()) <= time:
            self.now = max(self.now, min(event, arrival))
            if event <= arrival:
                heapq.heappop(self._events)[2]()
            else:
                self._waiting[self._arrived] = None
                self._arrived += 1
                self._start_loads()
        self.now = max(self.now, time)

    def _at(self, time: float, call: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, call))

    # Loads and stores.

    def _start_loads(self) -> None:
        """Start the loads of the first requests that wait."""
        if self.behind is not None:
            for number in [*self._waiting][: self.timing.ahead]:
                if number not in self._num_loads:
                    self._load(number)

    def _load(self, number: int) -> bool:
        """Start the load of a waiting request, if it needs one; False: there is no room for it."""
        if self.behind is None:
            return True
        loads = self._num_loads.get(number, 0)
        is_placed = number in self._slots or number in self._loading
        if is_placed or loads >= MAX_LOADS or not self.requests[number].output:
            return True
        transfer = self.behind.load(self.prompts[number], self.now)
        self._num_loads[number] = loads
        if isinstance(transfer, Transfer):
            if loads == 0:
                self.from_device[number] = self.cache.match(self.prompts[number]).num_saved_tokens
            self._num_loads[number] = loads + 1
            self._loading.add(number)
            if not transfer.waiting:  # else it is on its way
                self._at(transfer.end, partial(self._loaded, transfer))
            transfer.waiting.append(number)
        return transfer != "later"

    def _loaded(self, transfer: Transfer) -> None:
        transfer.done()
        self._loading.difference_update(transfer.waiting)
        for number in transfer.waiting:
            can_start = number not in self._slots and self.cache.num_free_slots
            if can_start and self._load(number) and number not in self._loading:
                self._admit(number)

    def _store(self) -> None:
        if self.behind is not None:
            for transfer in self.behind.stores(self.now):
                self._storing += 1
                self._at(transfer.end, partial(self._stored, transfer))

    def _stored(self, transfer: Transfer) -> None:
        transfer.done()
        self._storing -= 1
        if not self._storing:
            self._store()

    # Requests.

    def _next(self) -> int | None:
        """The first request that waits for nothing but its turn."""
        has_room = True
        for number in self._waiting:
            if number in self._loading:
                continue
            if number in self._slots:
                return number
            if has_room and (self.cache.num_free_slots or not self.requests[number].output):
                return number
            has_room = False  # only requests that have a slot go before this one
        return None

    def _serve(self, number: int) -> None:
        """Compute the prompt of a request and start its answer, unless it has to load first."""
        request = self.requests[number]
        if request.output == 0:
            self.hits[number] = self.cache.match(self.prompts[number]).num_tokens
            self.from_device[number] = self.hits[number]
            del self._waiting[number]
            self.progress(1)
            self._start_loads()
            return
        if not self._load(number) and self._events:
            self._advance(self._next_event())
            return
        if number in self._loading:
            return
        if number not in self._slots:
            self._admit(number)
        slot = self._slots.pop(number)
        del self._waiting[number]
        self._start_loads()
        start, tokens = int(self.cache.num_computed[slot]), request.tokens(number)
        while start < len(tokens):
            in_prompt = start < request.input
            count = self._commit(number, slot, tokens, request.input if in_prompt else len(tokens))
            if in_prompt:
                self._advance(self.now + count / self.timing.prefill_rate)
            self._store()
            start += count
        self.ttft[number] = self.now - request.arrival
        self.progress(1)
        end = self.now + request.output / self.timing.decode_rate
        self._at(end, partial(self._release, number))

    def _admit(self, number: int) -> None:
        """Give a waiting request its slot and the cached part of its prompt."""
        match = self.cache.match(self.prompts[number])
        slot = self._slots[number] = self.cache.admit(number, match)
        self.hits[number] = int(self.cache.num_computed[slot])
        if not self._num_loads.get(number):
            self.from_device[number] = self.hits[number]

    def _commit(self, number: int, slot: int, tokens: np.ndarray, end: int) -> int:
        """Put the next chunk, which ends at `end` at the latest, into pages; returns its tokens."""
        cache = self.cache
        start = int(cache.num_computed[slot])
        [count] = cache.cut([slot], [min(self.timing.chunk, end - start)]).tolist()
        plan = cache.plan([slot], [count])
        while not isinstance(plan, StepPlan):
            if self._events:
                self._advance(self._next_event())
            elif self._slots:  # the last ones go back to those that wait
                self._release(next(reversed(self._slots)))
            else:
                raise ValueError(
                    f"pool: expected room for request {number} of {len(tokens)} tokens: {plan}"
                )
            plan = cache.plan([slot], [count])
        cache.commit(plan, tokens[start : start + count])
        return count

    def _release(self, number: int) -> None:
        """End an answer, or send an admitted request back to those that wait."""
        self._slots.pop(number, None)
        self.cache.release(number)
        self._store()
