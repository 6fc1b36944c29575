"""A request on its way through the engine: what was asked, what is known so far, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kvcore import Match
    from quire.models.tokenizer import TextStream

MAX_TOP_LOGPROBS = 64
MAX_SAMPLES = 16384


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. The defaults decode greedily.

    max_tokens: tokens to generate at most.
    stop_token_ids: ids that end the output besides the model's own; the stopping id is its last token.
    ignore_eos: True = the model's own stop ids do not end the output.
    stop: strings that end the output; the text ends before the first of them. They need a tokenizer.
    temperature: divides the logits; 0 = greedy, and then top_k, top_p and min_p change nothing.
    top_k: only the k likeliest tokens, of equal ones those with the lowest ids; 0 = all.
    top_p: only the likeliest tokens whose probabilities first add up to it.
    min_p: only tokens with at least this share of the likeliest one's probability.
    repetition_penalty: positive logits of tokens in prompt or output are divided by it, negative ones multiplied.
    seed: of the draws, which depend on seed, sample and position alone, never on what else the engine runs; None = one of the
        engine's own.
    n: samples of the prompt; they share its pages. logprobs: None, or how many of the likeliest tokens to report at each position.

    The order is that of transformers: penalty, temperature, top_k, top_p, min_p.

    Raises: ValueError for a value out of range.
    """

    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # One alone, a list and None will do too.
        for name, kind in (("stop", str), ("stop_token_ids", Integral)):
            value = getattr(self, name)
            value = (value,) if isinstance(value, kind) else tuple(value or ())
            object.__setattr__(self, name, value)
        for name, value, kind, ok, expected in (
            ("max_tokens", self.max_tokens, Integral, lambda x: x >= 1, "an int >= 1"),
            *(("stop_token_ids", i, Integral, lambda x: True, "ints") for i in self.stop_token_ids),
            *(("stop", text, str, bool, "strings that are not empty") for text in self.stop),
            ("temperature", self.temperature, Real, lambda x: 0 <= x < math.inf, "a finite number >= 0"),
            ("top_k", self.top_k, Integral, lambda x: 0 <= x < 2**31, "an int >= 0 (0 = all)"),
            ("top_p", self.top_p, Real, lambda x: 0 < x <= 1, "a number in (0, 1]"),
            ("min_p", self.min_p, Real, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty, Real, lambda x: 0 < x < math.inf, "a finite number > 0"),
            ("seed", self.seed, Integral | None, lambda x: True, "None or an int"),
            ("n", self.n, Integral, lambda x: 1 <= x <= MAX_SAMPLES, f"an int in 1..{MAX_SAMPLES}"),
            ("logprobs", self.logprobs, Integral | None, lambda x: x is None or 0 <= x <= MAX_TOP_LOGPROBS, f"None or 0..{MAX_TOP_LOGPROBS}"),
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, kind) or not ok(value):
                raise ValueError(f"{name}: expected {expected}, got {value!r}")

    @property
    def is_plain(self) -> bool:
        """Whether the next token is simply the largest logit."""
        return self.temperature == 0 and self.repetition_penalty == 1 and self.logprobs is None


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one position under the model itself, before penalties, temperature and filters.

    logprob: of the generated token. top: (token id, logprob) of the likeliest tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, or one of its samples.

    sample: 0 unless `SamplingParams.n` is above 1.
    token_ids: generated tokens. text: their text without the stopping id or string, or None without a tokenizer.
    finish_reason: "stop" (stop_reason says by which id or string), "length" (max_tokens or the longest sequence was reached) or
        "abort".
    num_cached_tokens: prompt tokens that the prefix cache gave when the request was first admitted.
    limited_by: why they were not more (`quire.kvcore.Match.limited_by`); "" when it never was admitted.
    num_preemptions: times that the request lost its pages and was resumed.
    num_drafts, num_accepted: speculated tokens that were computed, and those that became output.
    arrival, token_times: seconds on `time.perf_counter`'s clock.
    logprobs: one for each of token_ids where they were asked for.
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
    """What one step added to a request that is streamed: ids, and the text that no later token can take back.

    finish_reason: as in `RequestOutput`, None before the end.
    """

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None


@dataclass(eq=False)
class Request:
    """Mutable state of one unfinished sample of a request; the scheduler owns it.

    capacity: longest that prompt and output may get together. stop_ids: ids that end the output.
    salt: keeps its cached prefixes from other salts' requests. match: the hashed tokens, for admission.
    seed: of this request's draws. text: where its text grows; None where nobody asks for it before the end.
    stream: whether its new tokens are reported after each step.

    Attributes:
        slot: kvcore slot while running, else -1.
        drafts: tokens that may come next, [num_drafts] int32; the next step verifies them.
        draft_probs: [>= num_drafts, vocab_size] fp32 on the model's device, what they were drawn from; None = they were not drawn.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    capacity: int
    stop_ids: frozenset[int]
    salt: bytes
    arrival: float
    match: Match
    sample: int = 0
    seed: int = 0
    text: TextStream | None = None
    stream: bool = False
    slot: int = -1
    num_cached_tokens: int = -1
    limited_by: str = ""
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    stop_reason: int | str | None = None
    token_times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = self.num_tokens = len(self.prompt_token_ids)
        self._tokens = np.empty(self.capacity, dtype=np.int32)
        self._tokens[: self.prompt_len] = self.prompt_token_ids
        self.drafts = self._tokens[:0]
        self.draft_probs: Tensor | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What the allocator knows this sample by."""
        return self.request_id, self.sample

    @property
    def tokens(self) -> np.ndarray:
        """[num_tokens] int32: prompt and output so far."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_len

    def set_drafts(self, token_ids: np.ndarray, probs: Tensor | None = None) -> None:
        """Remembers what may come next, as much of it as leaves room for the token after it. probs: of `draft_probs`."""
        count = max(0, min(len(token_ids), self.capacity - self.num_tokens - 1))
        # Behind the known tokens, so that a step's input is one slice.
        self.drafts = self._tokens[self.num_tokens : self.num_tokens + count]
        self.drafts[:] = token_ids[:count]
        self.draft_probs = probs

    def inputs(self, start: int, end: int) -> np.ndarray:
        """[end - start] int32 tokens of these positions, drafts after the known ones."""
        return self._tokens[start:end]

    def append(self, token: int, now: float) -> str | None:
        """Adds a generated token; returns the finish reason if it was the last."""
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.drafts, self.draft_probs = self._tokens[:0], None
        self.token_times.append(now)
        if token in self.stop_ids:
            self.stop_reason = token
            return "stop"
        if self.text is not None:
            self.stop_reason = self.text.append(token)
            if self.stop_reason is not None:
                return "stop"
        return "length" if self.num_tokens == self.capacity else None

    def output(self, finish_reason: str) -> RequestOutput:
        """What the caller gets."""
        tokens = self.tokens.tolist()
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=tuple(tokens[: self.prompt_len]),
            token_ids=tuple(tokens[self.prompt_len :]),
            finish_reason=finish_reason,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            limited_by=self.limited_by,
            num_preemptions=self.num_preemptions,
            arrival=self.arrival,
            token_times=tuple(self.token_times),
            text=None if self.text is None else self.text.finish(),
            sample=self.sample,
            stop_reason=self.stop_reason,
            num_drafts=self.num_drafts,
            num_accepted=self.num_accepted,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
        )
