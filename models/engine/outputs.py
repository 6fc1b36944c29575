"""Outputs of requests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from quire.kvcore.prefix.lookup import EXPLANATIONS
from quire.kvcore.tier.match import LOAD_EXPLANATIONS

if TYPE_CHECKING:
    from .request import Request

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


def failure(request: Request, cause: Exception) -> RequestError:
    """The error of a request in which ``cause`` was raised."""
    error = RequestError(
        f"{request}, after {request.num_tokens} tokens: {type(cause).__name__}: {cause}"
    )
    error.__cause__ = cause
    return error
