"""What comes back of a request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from quire.kvcore.prefix.lookup import EXPLANATIONS
from quire.kvcore.tier.match import LOAD_EXPLANATIONS

REASONS: dict[str, str] = {**EXPLANATIONS, **LOAD_EXPLANATIONS}


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one position under the model itself.

    Before penalties, temperature and filters.

    Attributes:
        logprob: of the generated token.
        top: (token id, logprob) of the likeliest tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class RequestError(RuntimeError):
    """What ended one request early, while the others go on: which request, where, and why.

    ``__cause__`` is the exception behind it.
    """


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, or one of its samples.

    Attributes:
        sample: 0 unless `SamplingParams.n` is above 1.
        token_ids: generated tokens.
        text: their text without the stopping id or string, or None without a tokenizer.
        finish_reason: "stop" (stop_reason says by which id or string), "length" (max_tokens or the
            longest sequence was reached) or "abort"; "nan" = the model's logits give no token,
            "error" = something else failed in this request (error says what).
        num_cached_tokens: prompt tokens that the prefix cache gave when the request was first
            admitted.
        limited_by: why they were not more (`quire.kvcore.Match.limited_by`, with tiers
            `quire.kvcore.tier.TierMatch.limited_by`); "" when it never was admitted.
        dense_tokens: prompt tokens whose full-attention rows were cached then, in the pool or behind
            it.
        num_loaded_tokens: tokens added to its hits by loads from host memory.
        num_preemptions: times that the request lost its pages and was resumed.
        num_drafts, num_accepted: speculated tokens that were computed, and those that became
            output.
        arrival, token_times: seconds on `time.perf_counter`'s clock.
        logprobs: one for each of token_ids where they were asked for.
        error: what ended it early; None unless finish_reason is "nan" or "error". The tokens, and
            the text so far, are good.
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

    def explain(self) -> str:
        """One sentence: what of the prompt was cached, what was loaded for it, and why not more."""
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
    """What one step added to a request that is streamed.

    Ids, and the text that no later token can take back.

    Attributes:
        finish_reason, error: as in `RequestOutput`, None before the end.
    """

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    error: RequestError | None = None
