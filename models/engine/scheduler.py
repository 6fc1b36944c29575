"""Which requests run in a step, and with how many tokens.

Integers only: no torch, no model, and the same choices every time.

Running requests are kept in order of admission. A step takes prefill chunks of running requests,
admits waiting ones, and takes one token (and its drafts) of every decoding request, all within a
budget of tokens that `SchedulerPolicy` divides. A request decodes while one of its known tokens,
the newest, is not computed yet. As long as nobody comes or goes, each step plans the same slots in
the same order, and `KVCache` goes on from the plan before it. When pages run out, the request
admitted last gives its pages back and waits at the head of the queue; nobody is admitted until some
request has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.kvcore import KVCache, StepPlan
from quire.kvcore.spec import as_int

from .report import ALLOCATOR, StepClock
from .request import Request

if TYPE_CHECKING:
    from .tiering import EngineTiers


@dataclass(frozen=True)
class SchedulerPolicy:
    """Divides the token budget of a step between prefill and decode.

    For another policy, override `prefill_tokens`.

    Attributes:
        prefill_first: prompts take what they can, and decoding requests what is left; by default
            decoding requests go first.
        max_prefill_tokens: at most so many prompt tokens in a step that somebody's next token waits
            for; None = no bound. It bounds the time between tokens, as a step of its own size
            would.

    Raises:
        ValueError: max_prefill_tokens below 1.
    """

    prefill_first: bool = False
    max_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_prefill_tokens is not None:
            as_int("max_prefill_tokens", self.max_prefill_tokens, 1)

    def prefill_tokens(self, budget: int, num_decodes: int) -> int:
        """Prompt tokens that the next step may hold.

        Args:
            budget: tokens of the step.
            num_decodes: running requests that wait for their next token, at most budget.
        """
        if num_decodes == 0:
            return budget
        tokens = budget if self.prefill_first else budget - num_decodes
        return tokens if self.max_prefill_tokens is None else min(tokens, self.max_prefill_tokens)


@dataclass(frozen=True)
class ScheduledStep:
    """A step that fits.

    Requests in batch order (those with one new token first), their new tokens, and the plan.

    Attributes:
        num_drafts: how many of a request's new tokens are drafts.
        num_preempted: running requests that gave up their pages for it.
        admitted: those of the requests that were admitted for it.
    """

    requests: list[Request]
    num_new_tokens: list[int]
    num_drafts: list[int]
    plan: StepPlan
    num_preempted: int
    admitted: frozenset[Request]

    def inputs(self) -> tuple[np.ndarray, list[int]]:
        """What the model is given: of a request that decodes the token that the last step sampled.

        Returns:
            (input ids [num_tokens] int32, with placeholders for those that the device alone knows
            (`quire.kvcore.device.BatchBuilder`), indices of the requests whose next token the
            step gives: all but those with more of their prompt to come).
        """
        ids, ready = [], []
        for i, (request, end) in enumerate(
            zip(self.requests, self.plan.seq_lens.tolist(), strict=True)
        ):
            ids.append(request.inputs(end - self.num_new_tokens[i], end))
            if end >= request.num_tokens:
                ready.append(i)
        return np.concatenate(ids), ready

    def last_rows(self, ready: list[int]) -> np.ndarray:
        """[num_ready] int64: the row of the last token of each of the requests ``ready``."""
        return self.plan.cu_seqlens_q[1:][ready].astype(np.int64) - 1

    def numbers(self) -> dict[str, Any]:
        """What `quire.models.engine.report.StepReport` says of it before anything is computed."""
        num_decodes = self.num_new_tokens.count(1)
        return {
            "q_lens": self.plan.num_new_tokens,
            "seq_lens": self.plan.seq_lens,
            "num_tokens": sum(self.num_new_tokens),
            "num_decodes": num_decodes,
            "num_prefills": len(self.requests) - num_decodes,
            "num_preempted": self.num_preempted,
            "num_drafts": sum(self.num_drafts),
        }


class _Allocating:
    """Counts the time of a block as the allocator's. Not to be nested."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._before = self._clock.switch(ALLOCATOR)

    def __exit__(self, *_: object) -> None:
        self._clock.switch(self._before)


class Scheduler:
    """Continuous batching over one `KVCache`.

    Args:
        clock: is told when kv works.
        max_num_batched_tokens: new tokens in a step.
        max_num_seqs: requests running at once, at most as many.
        policy: who goes first.
        tiers: what is behind the pool; None = nothing.

    Attributes:
        waiting, running: requests, first come first.
        failed: requests taken out because something failed in them alone, and what; for whoever
            reports it.
        allocating: a context in which time counts as the allocator's.
    """

    def __init__(
        self,
        kv: KVCache,
        clock: StepClock,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        policy: SchedulerPolicy | None = None,
        tiers: EngineTiers | None = None,
    ) -> None:
        self.kv, self.tiers = kv, tiers
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.policy = policy or SchedulerPolicy()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.failed: list[tuple[Request, Exception]] = []
        self.allocating = _Allocating(clock)
        self._starved = False  # pages ran out and no request has ended since

    def pending(self) -> list[int]:
        """Tokens of each running request that are not computed yet.

        1 for those that decode; 0 for one whose last token is sampled and not known yet.
        """
        computed = self.kv.num_computed[[r.slot for r in self.running]].tolist()
        return [
            r.num_sampled - c if r.num_sampled < r.capacity else 0
            for r, c in zip(self.running, computed, strict=True)
        ]

    def decoding(self) -> list[Request]:
        """The running requests that wait for their next token."""
        return [r for r, count in zip(self.running, self.pending(), strict=True) if count == 1]

    def schedule(self) -> ScheduledStep | None:
        """Chooses and plans the next step; admits and preempts as needed.

        None when there is nothing to do.

        A request that cannot be admitted, or of which one token does not fit though it runs alone,
        is added to ``failed``.
        """
        self._advance_tiers()
        chosen, admitted = self._choose()
        num_preempted = 0
        while chosen:
            step = self._plan(chosen, admitted, num_preempted)
            if isinstance(step, ScheduledStep):
                return step
            if self.tiers is not None and self.tiers.settle():
                continue  # pages that copies held
            self._starved = True
            victim = self.running[-1]
            if len(self.running) == 1:
                if chosen[victim] == 1:
                    has = f"the pool has {self.kv.num_pages - 1} pages (num_pages)"
                    self.fail(victim, RuntimeError(f"does not fit even alone: {step}; {has}"))
                    chosen, admitted = self._choose()
                    continue
                chosen[victim] //= 2  # a long chunk keeps more boundaries than a short one
                continue
            if victim not in admitted:
                num_preempted += 1
                victim.num_preemptions += 1
            self._preempt(victim)
            chosen.pop(victim, None)
            if not chosen:
                chosen, _ = self._choose()  # the budget was the victims': now it is the others'
        return None

    def schedule_ahead(self) -> ScheduledStep | None:
        """The next step, before it is known which tokens the one before sampled.

        None where that must be known first: to preempt, as output becomes prompt. Requests that it
        admits may find rows that turn out to be NaN (`take_back_admitted`).
        """
        self._advance_tiers()
        chosen, admitted = self._choose()
        step = self._plan(chosen, admitted) if chosen else None
        if isinstance(step, ScheduledStep):
            return step
        for request in [r for r in reversed(self.running) if r in admitted]:
            self._preempt(request)
        return None

    def finish(self, request: Request) -> None:
        """Takes a request out, running or waiting.

        Its pages stay findable until they are needed.
        """
        if request.slot < 0:
            self._stop_waiting(request)
            return
        self._release(request)
        self._starved = False

    def fail(self, request: Request, error: Exception) -> None:
        """Takes a request out because something failed in it alone."""
        self.finish(request)
        self.failed.append((request, error))

    def take_back(self, requests: Iterable[Request]) -> None:
        """Requests of a step that failed give their pages back and wait again, in their order.

        What it wrote is unknown.
        """
        failed = set(requests)
        for request in [r for r in reversed(self.running) if r in failed]:
            request.num_preemptions += 1
            self._preempt(request)
        self._starved = False

    def take_back_admitted(self, step: ScheduledStep) -> frozenset[Request]:
        """Requests that a step admitted wait again, as if it had not; returns them.

        What they found in the cache is not to be used.
        """
        taken = [r for r in reversed(self.running) if r in step.admitted]
        for request in taken:
            if request.num_preemptions == 0:
                request.num_cached_tokens = -1
            self._preempt(request)
        return frozenset(taken)

    def clear_cache(self) -> None:
        """No row that is there is found any more."""
        with self.allocating:
            self.kv.clear()

    def _plan(
        self, chosen: dict[Request, int], admitted: set[Request], num_preempted: int = 0
    ) -> ScheduledStep | object:
        """The step with the chosen tokens, or the allocator's `OutOfPages`."""
        requests = sorted(chosen, key=lambda r: chosen[r] != 1)  # stable: decodes first
        slots, counts = [r.slot for r in requests], [chosen[r] for r in requests]
        with self.allocating:
            plan = self.kv.plan(slots, counts)
        if not isinstance(plan, StepPlan):
            return plan
        ends = plan.seq_lens.tolist()
        drafts = [max(0, end - r.num_sampled) for end, r in zip(ends, requests, strict=True)]
        return ScheduledStep(
            requests,
            counts,
            drafts,
            plan,
            num_preempted,
            frozenset(admitted.intersection(requests)),
        )

    def _choose(self) -> tuple[dict[Request, int], set[Request]]:
        """New tokens of each request in the next step, and the requests admitted just now."""
        budget = self.max_num_batched_tokens
        pending = dict(zip(self.running, self.pending(), strict=True)) if self.running else {}
        decodes = [r for r, count in pending.items() if count == 1]
        prefill = as_int("prefill_tokens", self.policy.prefill_tokens(budget, len(decodes)), 0)
        prefill = min(prefill, budget)
        chosen: dict[Request, int] = {}
        for request, count in pending.items():
            if count > 1 and prefill:
                chosen[request] = min(count, prefill)
                prefill -= chosen[request]
                budget -= chosen[request]
        admitted = set()
        while self._may_admit(prefill) and (request := self._next()) is not None:
            if not self._admit(request):
                continue
            admitted.add(request)
            count = request.num_tokens - int(self.kv.num_computed[request.slot])
            chosen[request] = min(count, prefill)
            prefill -= chosen[request]
            budget -= chosen[request]
        decodes = decodes[:budget]
        spare = budget - len(decodes)  # everybody's next token goes before anybody's drafts
        for request in decodes:
            num_drafts = min(len(request.drafts), spare)
            chosen[request] = 1 + num_drafts
            spare -= num_drafts
        return chosen, admitted

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot; False where it failed."""
        try:
            request.make_room()
            with self.allocating:
                # What is cached has changed since the request came: look up again, without hashing.
                request.match = self.kv.match(request.match.prompt, salt=request.salt)
                resumed = request.num_cached_tokens >= 0  # it was admitted before
                request.slot = self.kv.admit(request.key, request.match, resumed=resumed)
        except Exception as error:
            self.fail(request, error)
            return False
        self.running.append(request)
        self._stop_waiting(request)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = int(self.kv.num_computed[request.slot])
            request.note_limit()
        return True

    def _next(self) -> Request | None:
        """The first waiting request, but for those that wait for pages to be loaded."""
        if self.tiers is None or not self.tiers.is_loading:
            return self.waiting[0] if self.waiting else None
        return next((r for r in self.waiting if not self.tiers.waits(r)), None)

    def _stop_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        if self.tiers is not None:
            self.tiers.forget(request)

    def _advance_tiers(self) -> None:
        if self.tiers is None:
            return
        room = 0 if self._starved else self.max_num_seqs - len(self.running)
        for request, error in self.tiers.advance(self.waiting, room):
            self.fail(request, error)

    def _may_admit(self, budget: int) -> bool:
        room = budget > 0 and len(self.running) < self.max_num_seqs
        return room and not self._starved

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_output_placeholders = 0  # what is not known is sampled again
        try:
            with self.allocating:
                # Prompt and output so far are the new prompt: what was cached of them is found
                # again.
                request.match = self.kv.match(request.tokens, salt=request.salt)
        except Exception as error:
            self.failed.append((request, error))
        else:
            self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        with self.allocating:
            self.kv.release(request.key)
        request.slot = -1
        self.running.remove(request)
