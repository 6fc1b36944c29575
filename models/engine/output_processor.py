"""What comes back of requests.

New tokens delivered, requests ended, and outputs collected for the next report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config.fields import shown
from .outputs import OutputDelta, RequestError, RequestOutput
from .request import Request, failure
from .sampler import NO_TOKEN, NewTokens
from .scheduler import Scheduler


class OutputProcessor:
    """Keeps the unfinished requests of an engine.

    Args:
        scheduler: has the requests that wait or run.

    Attributes:
        unfinished: by id, the samples of each request that have not ended.
        siblings: by the first sample, those that wait until its prompt is computed.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.unfinished: dict[str, list[Request]] = {}
        self.siblings: dict[Request, list[Request]] = {}
        # What ended and what was streamed since `take`.
        self._finished: list[RequestOutput] = []
        self._deltas: list[OutputDelta] = []

    @property
    def has_finished(self) -> bool:
        """Whether a request has ended since `take`."""
        return bool(self._finished)

    def take(self) -> tuple[list[RequestOutput], list[OutputDelta]]:
        """What ended and what was streamed since the last call."""
        self.end_failed()
        taken = self._finished, self._deltas
        self._finished, self._deltas = [], []
        return taken

    def add(self, samples: list[Request]) -> None:
        """Queues a request: its first sample, with the others behind it."""
        self.unfinished[samples[0].request_id] = samples
        self._scheduler.waiting.append(samples[0])
        if len(samples) > 1:
            self.siblings[samples[0]] = samples[1:]

    def abort(self, request_id: str) -> RequestOutput:
        """Ends all samples of a request; returns the output of the first unfinished one.

        Args:
            request_id: of an unfinished request.

        Raises:
            ValueError: an unknown id.
        """
        if not isinstance(request_id, str) or request_id not in self.unfinished:
            raise ValueError(f"request_id: expected an unfinished request, got {shown(request_id)}")
        outputs = []
        for request in list(self.unfinished[request_id]):
            # From where `finish` takes them.
            self._scheduler.waiting.extend(self.siblings.pop(request, []))
            self._scheduler.finish(request)
            outputs.append(self._take_out(request, "abort", None))
        return outputs[0]

    def deliver(self, new: Sequence[NewTokens], now: float) -> tuple[int, bool]:
        """Gives requests their new tokens, each on its own: what fails in one ends that one.

        Those of a request that has ended since its step was launched are dropped.

        A token goes behind the request's others, where the next step finds it as its input; a
        request that this ends gives its slot and pages back (`Scheduler.finish`).

        Args:
            new: of a step.
            now: seconds on the clock of `time.perf_counter`.

        Returns:
            (number of tokens, whether the logits of a request gave no token).
        """
        num_generated, bad = 0, False
        for tokens in new:
            request = tokens.request
            if request.slot < 0:
                bad = bad or NO_TOKEN in tokens.ids
                continue
            request.num_output_placeholders = 0
            before, reason, error = request.num_tokens, None, None
            try:
                reason = _append(tokens, now)
                if reason is None and request.stream:
                    self._deltas.append(_delta(request, before))
            except Exception as cause:
                reason, error = "error", failure(request, cause)
            if reason == "nan":
                bad = True
                error = RequestError(
                    f"{request}: expected logits whose largest is a number, got NaN, +inf, "
                    f"or -inf alone for position {request.num_tokens}"
                )
            num_generated += request.num_tokens - before
            if error is None:
                self._scheduler.waiting.extendleft(reversed(self.siblings.pop(request, [])))
            if reason is not None:
                self._scheduler.finish(request)
                self._end(request, reason, error, before)
        return num_generated, bad

    def end_failed(self) -> None:
        """Ends the requests that the scheduler took out."""
        for request, cause in self._scheduler.failed:
            self._end(request, "error", failure(request, cause), request.num_tokens)
        self._scheduler.failed.clear()

    def _end(self, request: Request, reason: str, error: RequestError | None, before: int) -> None:
        """Reports the end of a request that the scheduler has no more.

        Samples that waited for the prompt of one that failed end too.

        Args:
            request: which.
            reason, error: why.
            before: its tokens when the step began.
        """
        for one in (request, *self.siblings.pop(request, ())):
            output = self._take_out(one, reason, error)
            if one.stream:
                try:
                    self._deltas.append(_delta(one, before, output))
                except Exception as cause:
                    output = replace(output, finish_reason="error", error=failure(one, cause))
                    self._deltas.append(_delta(one, before, output))
            self._finished.append(output)

    def _take_out(self, request: Request, reason: str, error: RequestError | None) -> RequestOutput:
        """Takes a request out of the unfinished ones; returns what its caller gets."""
        samples = self.unfinished[request.request_id]
        samples.remove(request)
        if not samples:
            del self.unfinished[request.request_id]
        return request.output(reason, error)


def _append(tokens: NewTokens, now: float) -> str | None:
    """Adds a step's tokens to their request; returns the finish reason if one was the last."""
    request = tokens.request
    for i, token in enumerate(tokens.ids):
        if token == NO_TOKEN:
            return "nan"
        if request.params.logprobs is not None:
            request.logprobs.append(tokens.logprobs[i])
        reason = request.append(token, now)
        if reason is not None:
            return reason  # accepted drafts may go past the end
    return None


def _delta(request: Request, before: int, output: RequestOutput | None = None) -> OutputDelta:
    """What came to a request since it had ``before`` tokens.

    Args:
        output: where it has ended.
    """
    try:
        text = request.text.take() if request.text is not None else ""
    except Exception:
        if output is None or output.error is None:
            raise
        text = ""
    ids = tuple(request.tokens[before:].tolist())
    reason, error = (None, None) if output is None else (output.finish_reason, output.error)
    return OutputDelta(request.request_id, request.sample, ids, text, reason, error)
