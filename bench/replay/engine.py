"""One engine on a simulated clock: what it does when, with or without a host tier behind its pool.

Prompts are computed one at a time, in chunks; answers are decoded beside them. Requests start in
the order of their arrival, but one that waits for a load does not hold up those behind it: loads go
over their link while others compute. A load starts when its request is among the first that wait,
and holds no slot; when it is there, its request is admitted if a slot is free, so that what came
stays.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.kvcore import KVCache, Prompt, StepPlan

from .links import Transfer
from .requests import Request
from .tiers import TierMemory

LOADS = 3  # loads of one request, at most: what came for it may be evicted before its turn


@dataclass(frozen=True)
class Timing:
    """How fast the engine is.

    prefill_rate: prompt tokens a second, of all requests together. decode_rate: answer tokens a second, of each request.
    chunk: tokens of a prefill chunk. max_requests: requests at once. ahead: waiting requests whose loads may start.
    """

    prefill_rate: float = 20_000.0
    decode_rate: float = 50.0
    chunk: int = 8192
    max_requests: int = 64
    ahead: int = 8

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "decode_rate", "chunk", "max_requests", "ahead"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected > 0, got {getattr(self, name)}")


class Engine:
    """Serves requests.

    Args:
        cache: an empty one.
        timing: how fast it is.
        requests, prompts: sorted by arrival.
        behind: the host tier behind the pool; None: there is only the pool.
        progress: called with 1 when a prompt is computed.

    Attributes:
        now: seconds.
        hits, from_device: [n] tokens that were not computed; those of them that no load brought.
        ttft: [n] seconds, 0 of look-ups.
        stalled: seconds in which no prompt was computed because all that waited had loads to wait
            for.
    """

    def __init__(
        self, cache: KVCache, timing: Timing, requests: Sequence[Request], prompts: Sequence[Prompt],
        behind: TierMemory | None = None, progress: Callable[[int], object] = lambda n: None,
    ) -> None:  # fmt: skip
        self.cache, self.timing, self.behind = cache, timing, behind
        self.requests, self.prompts = requests, prompts
        self.now, self.stalled = 0.0, 0.0
        n = len(requests)
        self.hits, self.from_device = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.ttft = np.zeros(n)
        self._progress = progress
        self._arrived = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # ends of answers, transfers
        self._count = 0
        self._waiting: dict[int, None] = {}  # numbers of requests, by arrival
        self._slots: dict[int, int] = {}  # of those that are admitted and wait
        self._loading: dict[int, Transfer] = {}
        self._loads: dict[int, int] = {}  # so far, of those that wait
        self._storing = 0

    # The clock.

    def run(self) -> float:
        """Serve everything; returns when the last answer ends."""
        while True:
            number = self._next()
            if number is not None:
                self._serve(number)
                continue
            before, stalled = self.now, bool(self._loading)
            if self._arrived < len(self.requests):
                arrival = self.requests[self._arrived].arrival
                self._advance(min([arrival, *(e[0] for e in self._events[:1])]))
            elif self._events:
                self._advance(self._events[0][0])
            else:
                assert not self._waiting
                return self.now
            if stalled:
                self.stalled += self.now - before

    def _advance(self, time: float) -> None:
        """Go to `time`; answers and transfers end, and requests arrive, on the way."""
        while True:
            event = self._events[0][0] if self._events else np.inf
            arrival = np.inf
            if self._arrived < len(self.requests):
                arrival = self.requests[self._arrived].arrival
            if min(event, arrival) > time:
                break
            if event <= arrival:
                self._next_event()
            else:
                self.now = max(self.now, arrival)
                self._waiting[self._arrived] = None
                self._arrived += 1
                self._look_ahead()
        self.now = max(self.now, time)

    def _at(self, time: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, call))

    def _next_event(self) -> None:
        time, _, call = heapq.heappop(self._events)
        self.now = max(self.now, time)
        call()

    # Loads and stores.

    def _look_ahead(self) -> None:
        """Start the loads of the first requests that wait."""
        if self.behind is None:
            return
        for number in [*self._waiting][: self.timing.ahead]:
            if number not in self._loads:
                self._look(number)

    def _look(self, number: int) -> bool:
        """Whether there is room for what a waiting request should load now; starts the load."""
        if (
            self.behind is None or number in self._slots or number in self._loading
            or self._loads.get(number, 0) >= LOADS or not self.requests[number].output
        ):  # fmt: skip
            return True
        transfer = self.behind.look(self, number)
        self._loads.setdefault(number, 0)
        if isinstance(transfer, Transfer):
            if self._loads[number] == 0:
                self.from_device[number] = self.cache.match(self.prompts[number]).num_saved_tokens
            self._loads[number] += 1
            self._loading[number] = transfer
            transfer.waiting.append(number)
            self.start(transfer)
        return transfer != "later"

    def start(self, transfer: Transfer, then: Callable[[], None] = lambda: None) -> None:
        """Queue a transfer on its link, once."""
        if transfer.is_started:
            return
        transfer.is_started = True
        end = transfer.link.send(self.now, transfer.num_bytes)

        def ended() -> None:
            transfer.done()
            for number in transfer.waiting:
                del self._loading[number]
            for number in transfer.waiting:
                is_waiting = number not in self._slots and self.cache.num_free_slots
                if is_waiting and self._look(number) and number not in self._loading:
                    self.admit(number)
            then()

        self._at(end, ended)

    def _store(self) -> None:
        if self.behind is not None:
            for transfer in self.behind.stores(self):
                self._storing += 1
                self.start(transfer, self._stored)

    def _stored(self) -> None:
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
            has_room = False  # and nobody but those that have a slot goes before this one
        return None

    def admit(self, number: int) -> int:
        """Give a waiting request its slot and what is cached of it; returns its hit."""
        match = self.cache.match(self.prompts[number])
        slot = self._slots[number] = self.cache.admit(number, match)
        hit = self.hits[number] = int(self.cache.num_computed[slot])
        if not self._loads.get(number):
            self.from_device[number] = hit
        return hit

    def _serve(self, number: int) -> None:
        """Compute the prompt of a request and start its answer; or find that it is to load first,
        or that others are to end before."""
        request = self.requests[number]
        if request.output == 0:
            self.hits[number] = self.cache.match(self.prompts[number]).num_tokens
            self.from_device[number] = self.hits[number]
            self._leave(number)
            return
        if not self._look(number) and self._events:
            self._advance(self._events[0][0])
            return
        if number in self._loading:
            return
        if number not in self._slots:
            self.admit(number)
        slot = self._slots.pop(number)
        del self._waiting[number]
        self._look_ahead()
        start, tokens = int(self.cache.num_computed[slot]), request.tokens(number)
        for end, rate in ((request.input, self.timing.prefill_rate), (len(tokens), None)):
            while start < end:
                count = self._commit(number, slot, tokens, start, end)
                if rate:
                    self._advance(self.now + count / rate)
                if self.behind is not None:
                    self._store()
                start += count
        self.ttft[number] = self.now - request.arrival
        self._progress(1)
        self._at(self.now + request.output / self.timing.decode_rate, lambda: self._release(number))

    def _leave(self, number: int) -> None:
        del self._waiting[number]
        self._progress(1)
        self._look_ahead()

    def _commit(self, number: int, slot: int, tokens: np.ndarray, start: int, end: int) -> int:
        """Put the next chunk into pages; returns its tokens."""
        cache = self.cache
        count = min(self.timing.chunk, end - start)
        [count] = cache.cut([slot], [count]).tolist()
        plan = cache.plan([slot], [count])
        while not isinstance(plan, StepPlan):
            if self._events:
                self._advance(self._events[0][0])
            elif self._slots:  # those that came last go back
                self._release(next(reversed(self._slots)))
            else:
                raise ValueError(
                    f"pool: expected room for request {number} of {len(tokens)} tokens: {plan}"
                )
            plan = cache.plan([slot], [count])
        cache.commit(plan, tokens[start : start + count])
        return count

    def _release(self, number: int) -> None:
        """An answer ends; or an admitted request goes back to those that wait."""
        self._slots.pop(number, None)
        self.cache.release(number)
        self._store()
