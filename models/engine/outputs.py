"""Outputs of requests, and the queue that collects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from quire.kvcore.prefix.lookup import EXPLANATIONS
from quire.kvcore.tier.match import LOAD_EXPLANATIONS

from ..config.fields import shown

if TYPE_CHECKING:
    from .request import Request
    from .scheduler import Scheduler

REASONS: dict[str, str] = {**EXPLANATIONS, **LOAD_EXPLANATIONS}
NO_TOKEN = -1  # as `quire.kernels.sample_tokens` returns it


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one position, before penalties, temperature and filters.

    Attributes:
        logprob: natural-log probability of the token that is there.
        top: (token id, logprob) of the likeliest tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class RequestError(RuntimeError):
    """The error of one request, while the others go on; its cause is in ``__cause__``."""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, or one of its samples.

    Attributes:
        sample: 0 unless `SamplingParams.n` is above 1.
        token_ids: generated tokens.
        text: their text without the stopping id or string, or None without a tokenizer.
        finish_reason: "stop" (stop_reason has the id or string); "length" (max_tokens or the
            longest sequence was reached); "abort"; "nan" (the model's logits give no token);
            "error" (another failure).
        num_cached_tokens: prompt tokens found in the prefix cache on the first admission.
        limited_by: the limit of that hit (`quire.kvcore.Match.limited_by`, with a host tier
            `quire.kvcore.tier.TierMatch.limited_by`); "" if the request was never admitted.
        dense_tokens: prompt tokens whose full-attention rows were cached then, on the device or the
            host.
        num_loaded_tokens: tokens added to its hits by loads from host memory.
        num_preemptions: times that the request lost its pages and was resumed.
        num_drafts, num_accepted: speculated tokens that were computed, and accepted ones.
        arrival, token_times: seconds on `time.perf_counter`'s clock.
        logprobs: one for each of token_ids; None without `SamplingParams.logprobs`.
        prompt_logprobs: one for each of prompt_token_ids, fewer if the request ended before it was
            computed; the first is None. None without `SamplingParams.prompt_logprobs`.
        error: the reason of "nan" or "error", else None. Tokens and text so far are good.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    num_cached_tokens: int
    limited_by: str
    num_preemptions: int
    arrival: float
    token_times: tuple[float, ...]
    text: str | None = None
    sample: int = 0
    stop_reason: int | str | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: RequestError | None = None
    dense_tokens: int = 0
    num_loaded_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def explain(self) -> str:
        """One sentence: tokens of the prompt that were cached or loaded, and why not more."""
        cached = f"{self.num_cached_tokens} of {len(self.prompt_token_ids)} tokens"
        if self.num_loaded_tokens:
            cached += f", {self.num_loaded_tokens} loaded from host memory"
        why = "it was never admitted"
        if self.limited_by:
            why = REASONS[self.limited_by].format(dense=self.dense_tokens)
        return f"{cached}: {why}"

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token; NaN when there is none."""
        return self.token_times[0] - self.arrival if self.token_times else float("nan")

    @property
    def itl(self) -> tuple[float, ...]:
        """Seconds between one token and the next: one fewer than tokens."""
        return tuple(after - before for before, after in pairwise(self.token_times))


@dataclass(frozen=True)
class OutputDelta:
    """Tokens and text that one step added to a streamed request.

    Attributes:
        text: text that no later token can take back.
        finish_reason, error: fields of `RequestOutput`; None before the end.
    """

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    error: RequestError | None = None


class NewTokens(NamedTuple):
    """New tokens of one request, and their log-probabilities if it wants them."""

    request: Request
    ids: list[int]  # accepted drafts, then the next token or `NO_TOKEN`
    logprobs: list[TokenLogprobs] | None = None


class OutputQueue:
    """The unfinished requests of an engine, and the outputs since the last report."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.on_failure = self._fail
        self.unfinished: dict[str, list[Request]] = {}  # samples by request id
        # Samples that wait until the prompt of the first one, the key, is computed.
        self.siblings: dict[Request, list[Request]] = {}
        self.finished: list[RequestOutput] = []
        self.deltas: list[OutputDelta] = []

    def take(self) -> tuple[list[RequestOutput], list[OutputDelta]]:
        """Outputs and deltas since the last call."""
        taken = self.finished, self.deltas
        self.finished, self.deltas = [], []
        return taken

    def add(self, samples: list[Request]) -> None:
        """Queue the samples of a request."""
        first = samples[0]
        self.unfinished[first.request_id] = samples
        self._scheduler.waiting.append(first)
        if len(samples) > 1:
            self.siblings[first] = samples[1:]

    def abort(self, request_id: str) -> RequestOutput:
        """As `Engine.abort`."""
        if not isinstance(request_id, str) or request_id not in self.unfinished:
            raise ValueError(f"request_id: expected an unfinished request, got {shown(request_id)}")
        outputs = []
        for request in list(self.unfinished[request_id]):
            self._scheduler.waiting.extend(self.siblings.pop(request, []))
            self._scheduler.finish(request)
            outputs.append(self._take_out(request, "abort", None))
        return outputs[0]

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
                reason = request.extend(tokens, now)
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
                self._scheduler.waiting.extendleft(reversed(self.siblings.pop(request, [])))
            if reason is not None:
                self._scheduler.finish(request)
                self._end(request, reason, error, before)
        return num_generated, has_nan

    def _fail(self, request: Request, cause: Exception) -> None:
        self._end(request, "error", failure(request, cause), request.num_tokens)

    def _end(self, request: Request, reason: str, error: RequestError | None, before: int) -> None:
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


def failure(request: Request, cause: Exception) -> RequestError:
    """The error of a request in which ``cause`` was raised."""
    error = RequestError(
        f"{request}, after {request.num_tokens} tokens: {type(cause).__name__}: {cause}"
    )
    error.__cause__ = cause
    return error


def _delta(
    request: Request, before: int, reason: str | None = None, error: RequestError | None = None
) -> OutputDelta:
    text = "" if request.text is None else request.text.take()
    ids = tuple(request.tokens[before:].tolist())
    return OutputDelta(request.request_id, request.sample, ids, text, reason, error)
