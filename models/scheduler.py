"""Which requests run in a step, and with how many tokens. Integers only: no torch, no model, and the same choices every time.

Running requests are kept in order of admission. A step takes one token of every decoding request, then prefill chunks of running
requests, then admits waiting ones, all within a budget of tokens. When pages run out, the request admitted last gives its pages
back and waits at the head of the queue; nobody is admitted until some request has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.kvcore import KVCache, StepPlan
from quire.models.request import Request


@dataclass(frozen=True)
class ScheduledStep:
    """A step that fits: requests in batch order (those with one new token first), their new tokens, and the plan.

    num_preempted: running requests that gave up their pages for it.
    """

    requests: list[Request]
    num_new_tokens: list[int]
    plan: StepPlan
    num_preempted: int


class Scheduler:
    """Continuous batching over one `KVCache`.

    max_num_batched_tokens: new tokens in a step. max_num_seqs: requests running at once.

    Attributes:
        waiting, running: requests, first come first.
        allocator_seconds: time spent in calls of kv since the engine last reset it.

    Raises: ValueError unless 1 <= max_num_seqs <= max_num_batched_tokens, which lets every running request go on.
    """

    def __init__(self, kv: KVCache, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs: expected 1..max_num_batched_tokens={max_num_batched_tokens}, got {max_num_seqs}"
            )
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.allocator_seconds = 0.0
        self._starved = False  # pages ran out and no request has ended since

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Counts the time of the block as the allocator's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.allocator_seconds += time.perf_counter() - start

    def schedule(self) -> ScheduledStep | None:
        """Chooses and plans the next step; admits and preempts as needed. None when there is nothing to do.

        Raises: RuntimeError when the only running request does not fit; that request is dropped.
        """
        chosen, admitted = self._choose()
        num_preempted = 0
        while chosen:
            requests = sorted(chosen, key=lambda r: chosen[r] != 1)  # stable: decodes first
            counts = [chosen[r] for r in requests]
            with self.allocating():
                plan = self.kv.plan([r.slot for r in requests], counts)
            if isinstance(plan, StepPlan):
                return ScheduledStep(requests, counts, plan, num_preempted)
            self._starved = True
            victim = self.running[-1]
            if len(self.running) == 1:
                self.finish(victim)
                raise RuntimeError(
                    f"request {victim.request_id!r} with {victim.num_tokens} tokens does not fit even alone: {plan}; "
                    f"the pool has {self.kv.num_pages - 1} pages (num_pages)"
                )
            if victim not in admitted:
                num_preempted += 1
                victim.num_preemptions += 1
            self._preempt(victim)
            chosen.pop(victim, None)
        return None

    def finish(self, request: Request) -> None:
        """Takes a request out, running or waiting; its pages stay findable until they are needed."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        self._release(request)
        self._starved = False

    def _choose(self) -> tuple[dict[Request, int], set[Request]]:
        """New tokens of each request in the next step, and which requests were admitted just now."""
        budget = self.max_num_batched_tokens
        pending = {r: r.num_tokens - int(self.kv.num_computed[r.slot]) for r in self.running}
        chosen = {r: 1 for r, count in pending.items() if count == 1}
        budget -= len(chosen)
        for request, count in pending.items():
            if count > 1 and budget:
                chosen[request] = min(count, budget)
                budget -= chosen[request]
        admitted = set()
        while self._may_admit(budget):
            request = self.waiting.popleft()
            with self.allocating():
                # What is cached has changed since the request came: look up again, without hashing.
                request.match = self.kv.match(request.match.prompt)
                request.slot = self.kv.admit(request.request_id, request.match)
            computed = int(self.kv.num_computed[request.slot])
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = computed
                request.limited_by = request.match.limited_by
            self.running.append(request)
            admitted.add(request)
            chosen[request] = min(request.num_tokens - computed, budget)
            budget -= chosen[request]
        return chosen, admitted

    def _may_admit(self, budget: int) -> bool:
        room = budget > 0 and len(self.running) < self.max_num_seqs
        return bool(self.waiting) and room and not self._starved

    def _preempt(self, request: Request) -> None:
        self._release(request)
        with self.allocating():
            # Prompt and output so far are the new prompt: what was cached of them is found again.
            request.match = self.kv.match(request.tokens, salt=request.salt)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        with self.allocating():
            self.kv.release(request.request_id)
        request.slot = -1
        self.running.remove(request)
