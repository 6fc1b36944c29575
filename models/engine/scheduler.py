"""Requests: which ones run in a step, and what its tokens add to them. Deterministic.

Running requests are kept in order of admission. A step has up to ``max_num_batched_tokens`` tokens:
first one token of each request that decodes, whose newest token alone is not computed yet. Then
come prefill chunks of running requests, then of waiting requests, which are admitted, and last
drafts.

When pages run out, the scheduler waits for open copies of the host tier, which hold pages. If there
are none, the request admitted last is preempted: its pages can be evicted and it waits at the head
of the queue. A request that runs alone gets a shorter chunk. No request is admitted then until one
has ended, or the requests of a failed step have been taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.kvcore import KVCache, OutOfPages, StepPlan

from ..config.fields import shown
from .outputs import NO_TOKEN, NewTokens, OutputDelta, RequestError, RequestOutput, failure
from .report import ALLOCATOR, SCHEDULE, StepClock
from .request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kvcore.device import Batch

    from .config import EngineConfig
    from .host_tier import HostTier
    from .sampler import Sampled


@dataclass(eq=False)
class Step:
    """A step of the batch, until its tokens are delivered.

    Attributes:
        requests: in batch order, those with one new token first.
        num_new_tokens, num_drafts: of each request, drafts being the last of its new tokens.
        plan: lengths, slots and slot mappings of the step.
        input_ids: [num_tokens] int32. -1 - i stands for ``BatchBuilder.sampled[i]``, an id that the
            host does not know yet (`learn`).
        ready: indices of the requests that get their next token; the others are in prefill.
        rows: [num_rows] int64, rows of the last token and the drafts of each of ``ready``.
        prompt_rows: [n] int64, rows of ``scored``.
        scored: requests that get `Request.prompt_logprobs` from the step, and positions of their
            rows.
        has_drafts: True if the step verifies drafts.
        num_preempted: requests preempted for it.
        admitted: requests admitted for it.
        sampled: tokens of ``ready``, on the device and later on the host.
        prompt_scores: log-probabilities of ``prompt_rows``; None = there are none.
        batch, hidden: inputs and hidden states, for a `DeviceDrafter`.
        accepted: [num_seqs] computed tokens that stay; None = all.
        taken_back: requests whose tokens are dropped, as they wait again.
        num_accepted: drafts accepted so far.
        launch_seconds: [2, len(PARTS)], wall and CPU, of the call before that launched it; 0 = the
            call that delivers its tokens did.
    """

    requests: list[Request]
    num_new_tokens: list[int]
    num_drafts: list[int]
    plan: StepPlan
    input_ids: np.ndarray
    ready: list[int]
    rows: np.ndarray
    prompt_rows: np.ndarray
    scored: list[tuple[Request, range]]
    has_drafts: bool
    num_preempted: int
    admitted: frozenset[Request]
    sampled: Sampled | None = None
    prompt_scores: Sampled | None = None
    batch: Batch | None = None
    hidden: Tensor | None = None
    accepted: np.ndarray | None = None
    taken_back: frozenset[Request] = frozenset()
    num_accepted: int = 0
    launch_seconds: np.ndarray | float = 0.0

    def learn(self, ids: Sequence[int]) -> None:
        """Replace placeholders of its input and drafts by ids [num_placeholders]."""
        # The row after a NO_TOKEN is dropped.
        known = np.maximum(ids, 0)
        pairs = zip(self.requests, self.num_drafts, strict=True)
        drafts = [request.drafts[:count] for request, count in pairs if count]
        for unknown in (self.input_ids, *drafts):
            where = unknown < 0
            unknown[where] = known[-1 - unknown[where]]

    def verify(self) -> list[NewTokens]:
        """New tokens of ``ready``: accepted drafts and the token after them; sets ``accepted``.

        Drafts are accepted up to the first that differs from the token of its row.
        """
        ids, logprobs = self.sampled.ids, self.sampled.logprobs
        if self.has_drafts:
            self.accepted = np.array(self.num_new_tokens)
        new, row = [], 0
        for i in self.ready:
            request, num_drafts, stay = self.requests[i], self.num_drafts[i], 0
            if num_drafts:
                while stay < num_drafts and request.drafts[stay] == ids[row + stay]:
                    stay += 1
                self.accepted[i] -= num_drafts - stay
                request.num_drafts += num_drafts
                request.num_accepted += stay
                self.num_accepted += stay
            if request not in self.taken_back:
                end = row + stay + 1
                wants = logprobs is not None and request.params.logprobs is not None
                new.append(NewTokens(request, ids[row:end], logprobs[row:end] if wants else None))
            row += num_drafts + 1
        return new

    def keep_prompt_scores(self) -> None:
        """Append log-probabilities of prompts to those of their requests."""
        first = 0
        for request, rows in self.scored:
            if request not in self.taken_back:
                new = self.prompt_scores.logprobs[first : first + len(rows)]
                request.prompt_logprobs.extend(new)
            first += len(rows)

    def set_placeholders(self) -> None:
        """Let the next step of its requests begin with its tokens, `BatchBuilder.sampled` [row]."""
        for row, i in enumerate(self.ready):
            request = self.requests[i]
            if request.slot >= 0:
                request.num_output_placeholders = 1
                request.buffer[request.num_tokens] = -1 - row


class Scheduler:
    """Continuous batching over one `KVCache`.

    Attributes:
        unfinished: samples of each unfinished request, by its id.
        siblings: samples that wait until the prompt of the first one, the key, is computed.
        waiting: requests in order of arrival, but for preempted ones and siblings, which go first.
        running: requests in order of admission.
        finished, deltas: outputs since the last report.
    """

    def __init__(
        self,
        kv: KVCache,
        clock: StepClock,
        config: EngineConfig,
        host_tier: HostTier | None = None,
        *,
        max_prompt_rows: int,
    ) -> None:
        self.kv, self.host_tier, self._clock = kv, host_tier, clock
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self._max_prompt_rows = max_prompt_rows
        self.unfinished: dict[str, list[Request]] = {}
        self.siblings: dict[Request, list[Request]] = {}
        self.finished: list[RequestOutput] = []
        self.deltas: list[OutputDelta] = []
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._starved = False  # pages ran out and no request has ended since

    def add(self, samples: list[Request]) -> None:
        """Queue the samples of a request."""
        first = samples[0]
        self.unfinished[first.request_id] = samples
        self.waiting.append(first)
        if len(samples) > 1:
            self.siblings[first] = samples[1:]

    def abort(self, request_id: str) -> RequestOutput:
        """As `Engine.abort`."""
        if not isinstance(request_id, str) or request_id not in self.unfinished:
            raise ValueError(f"request_id: expected an unfinished request, got {shown(request_id)}")
        outputs = []
        for request in list(self.unfinished[request_id]):
            self.waiting.extend(self.siblings.pop(request, []))
            self._stop(request)
            outputs.append(self._take_out(request, "abort", None))
        return outputs[0]

    def pending(self) -> dict[Request, int]:
        """Tokens of each running request to compute; 0 where the last one is not known yet."""
        computed, counts = self.kv.num_computed.tolist(), {}
        for request in self.running:
            num_sampled = request.num_tokens + request.num_output_placeholders
            is_full = num_sampled >= request.capacity
            counts[request] = 0 if is_full else num_sampled - computed[request.slot]
        return counts

    def schedule(self, *, ahead: bool = False) -> Step | None:
        """Choose and plan the next step; admit and preempt as needed. None = nothing to do.

        A request that cannot be admitted, or whose next token does not fit though it runs alone,
        fails.

        Args:
            ahead: True = the tokens of the step before are not known. Then no request is preempted,
                because its output would become prompt. If pages run out, the requests admitted just
                now wait again, and the result is None. Requests that stay admitted may find rows
                that turn out to be NaN (`take_back_admitted`).
        """
        host_tier, num_preempted = self.host_tier, 0
        while True:
            if host_tier is not None:
                num_admissible = 0 if self._starved else self.max_num_seqs - len(self.running)
                host_tier.advance(self.waiting, num_admissible, self.fail)
            chosen, admitted = self._choose()
            if chosen or ahead or host_tier is None or not host_tier.is_loading:
                break
            self._clock.forget_device()
            host_tier.wait()  # all waiting requests wait for pages
        while chosen:
            step = self._plan(chosen, admitted, num_preempted)
            if isinstance(step, Step):
                return step
            if ahead:
                self._requeue(admitted)
                return None
            if host_tier is not None and host_tier.settle():
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
            self._requeue([victim])
            chosen.pop(victim, None)
            if not chosen:
                chosen, _ = self._choose()  # the victims had the whole budget
        return None

    def deliver(self, new: Sequence[NewTokens], now: float) -> tuple[int, bool]:
        """Append new tokens to their requests; an error ends its request alone.

        Returns:
            (number of tokens, True if the logits of a request gave no token).
        """
        num_generated, has_nan = 0, False
        for tokens in new:
            request = tokens.request
            if request.slot < 0:  # it has ended since its step was launched
                has_nan = has_nan or NO_TOKEN in tokens.ids
                continue
            request.num_output_placeholders = 0
            before, reason, error = request.num_tokens, None, None
            try:
                reason = _append(tokens, now)
                if reason is None and request.stream:
                    self.deltas.append(_delta(request, before))
            except Exception as cause:
                reason, error = "error", failure(request, cause)
            if reason == "nan":
                has_nan = True
                error = RequestError(
                    f"{request}: expected logits whose largest is a number, got NaN, +inf, "
                    f"or -inf alone for position {request.num_tokens}"
                )
            num_generated += request.num_tokens - before
            if self.siblings and error is None:
                self.waiting.extendleft(reversed(self.siblings.pop(request, [])))
            if reason is not None:
                self._stop(request)
                self._end(request, reason, error, before)
        return num_generated, has_nan

    def fail(self, request: Request, cause: Exception) -> None:
        """End a request because of an error of its own."""
        self._stop(request)
        self._end(request, "error", failure(request, cause), request.num_tokens)

    def _stop(self, request: Request) -> None:
        """Let a request neither run nor wait; its pages stay findable until they are needed."""
        if request.slot < 0:
            self._stop_waiting(request)
            return
        self._release(request)
        self._starved = False

    def _end(self, request: Request, reason: str, error: RequestError | None, before: int) -> None:
        """Report a request that was stopped, and its siblings that wait for it."""
        for one in (request, *self.siblings.pop(request, ())):
            output = self._take_out(one, reason, error)
            if one.stream:
                self.deltas.append(_delta(one, before, output.finish_reason, output.error))
            self.finished.append(output)

    def _take_out(self, request: Request, reason: str, error: RequestError | None) -> RequestOutput:
        samples = self.unfinished[request.request_id]
        samples.remove(request)
        if not samples:
            del self.unfinished[request.request_id]
        return request.output(reason, error)

    def take_back(self, requests: Collection[Request]) -> None:
        """Preempt the requests of a step that failed; which rows it wrote is unknown."""
        for request in {*requests}.intersection(self.running):
            request.num_preemptions += 1
        self._requeue(requests)
        self._starved = False

    def take_back_admitted(self, step: Step) -> None:
        """Let the requests that a step admitted wait again: their hits may be bad."""
        step.taken_back = step.admitted.intersection(self.running)
        for request in step.taken_back:
            if request.num_preemptions == 0:
                request.num_cached_tokens = -1
        self._requeue(step.taken_back)

    def clear_cache(self) -> None:
        """Drop cached prefixes; running requests keep their rows."""
        self._timed(self.kv.clear)

    def _choose(self) -> tuple[dict[Request, int], set[Request]]:
        """New tokens of each request of the next step, and the requests admitted just now."""
        budget = self.max_num_batched_tokens
        pending = self.pending()
        prefill = budget - list(pending.values()).count(1)
        chosen: dict[Request, int] = {}
        decodes, rows_left = [], self._max_prompt_rows
        for request, count in pending.items():
            if count == 1:
                decodes.append(request)
            elif count and prefill:
                count, rows_left = self._chunk(request, min(count, prefill), rows_left)
                if count:
                    chosen[request] = count
                    prefill -= count
        admitted: set[Request] = set()
        host_tier = self.host_tier
        while self.waiting and prefill and not self._starved:
            if len(self.running) >= self.max_num_seqs:
                break
            waiting = (
                r
                for r in self.waiting
                if (host_tier is None or not host_tier.waits(r))
                and (rows_left or r.max_hit is None)
            )
            request = next(waiting, None)
            if request is None:
                break
            if self._admit(request):
                admitted.add(request)
                count = request.num_tokens - int(self.kv.num_computed[request.slot])
                chosen[request], rows_left = self._chunk(request, min(count, prefill), rows_left)
                prefill -= chosen[request]
        for request in decodes:  # the next tokens of all go before the drafts of any
            num_drafts = min(len(request.drafts), prefill)
            chosen[request] = 1 + num_drafts
            prefill -= num_drafts
        return chosen, admitted

    def _chunk(self, request: Request, count: int, rows_left: int) -> tuple[int, int]:
        """(New tokens of at most ``count``, rows with prompt log-probabilities left for others)."""
        start = int(self.kv.num_computed[request.slot])
        rows = request.unscored(start, start + count)
        if len(rows) > rows_left:
            count, rows = rows[rows_left] - start, rows[:rows_left]
        return count, rows_left - len(rows)

    def _plan(
        self, chosen: dict[Request, int], admitted: set[Request], num_preempted: int
    ) -> Step | OutOfPages:
        requests = sorted(chosen, key=chosen.__getitem__)  # decodes first
        counts = list(map(chosen.__getitem__, requests))
        self._clock.switch(ALLOCATOR)
        plan = self.kv.plan(list(map(attrgetter("slot"), requests)), counts)
        self._clock.switch(SCHEDULE)
        if not isinstance(plan, StepPlan):
            return plan
        ids, ready, drafts, rows, prompt_rows, scored = [], [], [], [], [], []
        ends, row_ends = plan.seq_lens.tolist(), plan.cu_seqlens_q[1:].tolist()
        for i, (request, end, row_end) in enumerate(zip(requests, ends, row_ends, strict=True)):
            ids.append(request.buffer[end - counts[i] : end])
            num_sampled = request.num_tokens + request.num_output_placeholders
            drafts.append(max(0, end - num_sampled))
            if end >= request.num_tokens:
                ready.append(i)
                rows += range(row_end - 1 - drafts[i], row_end)
            wants = request.prompt_logprobs is not None
            if wants and (part := request.unscored(end - counts[i], end)):
                scored.append((request, part))
                prompt_rows += range(row_end - end + part.start, row_end - end + part.stop)
        return Step(
            requests=requests,
            num_new_tokens=counts,
            num_drafts=drafts,
            plan=plan,
            input_ids=np.concatenate(ids),
            ready=ready,
            rows=np.array(rows, dtype=np.int64),
            prompt_rows=np.array(prompt_rows, dtype=np.int64),
            scored=scored,
            has_drafts=len(rows) > len(ready),
            num_preempted=num_preempted,
            admitted=frozenset(admitted.intersection(requests)),
        )

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a slot; False if that failed."""
        try:
            request.reserve()
            # The cache has changed since the request came: look up again, without hashing.
            match = self._timed(
                self.kv.match, request.match.prompt, salt=request.salt, max_tokens=request.max_hit
            )
            resumed = request.num_cached_tokens >= 0
            slot = self._timed(self.kv.admit, request.key, match, resumed=resumed)
        except Exception as error:
            self.fail(request, error)
            return False
        request.match, request.slot = match, slot
        self._stop_waiting(request)
        self.running.append(request)
        if not resumed:
            request.num_cached_tokens = int(self.kv.num_computed[slot])
            host = request.host_match  # the host tier's look-up says more
            if host is not None and host.num_saved_tokens == match.num_saved_tokens:
                match = host
            request.limited_by, request.dense_tokens = match.limited_by, match.dense_tokens
        return True

    def _stop_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        if self.host_tier is not None:
            self.host_tier.forget(request)

    def _requeue(self, requests: Collection[Request]) -> None:
        """Let running requests wait at the head of the queue, in order of their admission."""
        for request in [r for r in reversed(self.running) if r in requests]:
            self._release(request)
            request.num_output_placeholders = 0  # a token not known yet is sampled again
            try:
                # Prompt and output so far are the new prompt, whose cached part is found again.
                request.match = self._timed(self.kv.match, request.tokens, salt=request.salt)
            except Exception as error:
                self._end(request, "error", failure(request, error), request.num_tokens)
            else:
                self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._timed(self.kv.release, request.key)
        request.slot = -1
        self.running.remove(request)

    def _timed(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the allocator, on the clock of its own part."""
        before = self._clock.switch(ALLOCATOR)
        try:
            return call(*arguments, **options)
        finally:
            self._clock.switch(before)


def _append(new: NewTokens, now: float) -> str | None:
    """Append a step's tokens to their request; return the finish reason, if any, or "nan"."""
    request = new.request
    for i, token in enumerate(new.ids):
        if token == NO_TOKEN:
            return "nan"
        if new.logprobs is not None:
            request.logprobs.append(new.logprobs[i])
        request.buffer[request.num_tokens] = token
        request.num_tokens += 1
        request.drafts, request.draft_probs = request.buffer[:0], None
        request.token_times.append(now)
        if token in request.stop_ids:
            request.stop_reason = token
        elif request.text is not None:
            request.stop_reason = request.text.append(token)
        if request.stop_reason is not None:
            return "stop"  # accepted drafts may go past the end
        if request.num_tokens == request.capacity:
            return "length"
    return None


def _delta(
    request: Request, before: int, reason: str | None = None, error: RequestError | None = None
) -> OutputDelta:
    """Tokens and text of a request since it had ``before`` tokens."""
    text = "" if request.text is None else request.text.take()
    ids = tuple(request.tokens[before:].tolist())
    return OutputDelta(request.request_id, request.sample, ids, text, reason, error)
