"""A request: its sampling parameters, its tokens so far, and the checks of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from torch import Tensor

from ..config.fields import MAX_INT32, NumTokens, Rule, TokenId, check_fields, floats, ints, shown
from .outputs import RequestError, RequestOutput, TokenLogprobs, failure

if TYPE_CHECKING:
    from quire.kvcore import Match
    from quire.kvcore.tier import TierMatch

    from ..tokenizer import TextStream

MAX_SAMPLES = 16_384
LARGEST, SMALLEST = 1e30, 1e-30  # factors of logits: fp32 still holds what they make of them
NumLogprobs = ints(0, 64)
Seed = ints(-(2**63), 2**64 - 1)
StopString = Annotated[
    str,
    Rule(lambda text: isinstance(text, str) and text != "", "expected a text, not an empty one"),
]


@dataclass(frozen=True)
class SamplingParams:
    """Settings of a request's generation. The defaults decode greedily.

    The order is that of transformers: penalty, temperature, top_k, top_p, min_p. Numbers may be
    numpy's; they become ints and floats.

    Attributes:
        max_tokens: tokens to generate at most.
        stop_token_ids: ids that end the output, added to the model's own; the stopping id is the
            last token.
        ignore_eos: True = the model's own stop ids do not end the output.
        stop: strings that end the output; the text ends before the first of them. They need a
            tokenizer.
        temperature: divides the logits, at most 1e30; 0 = greedy, and then top_k, top_p and min_p
            change nothing.
        top_k: only the k likeliest tokens, ties by lowest id; 0 = all.
        top_p: only the likeliest tokens whose probabilities first add up to this share.
        min_p: only tokens with at least this share of the likeliest one's probability.
        repetition_penalty: positive logits of tokens in prompt or output are divided by it,
            negative ones multiplied; in 1e-30..1e30.
        seed: seed of the draws, taken modulo 2**64. Draws depend on seed, sample and position
            alone, not on other requests; None = a seed of the engine.
        n: samples of the prompt, at most 16,384; they share its pages.
        logprobs: number of the likeliest tokens to report at each position; None = none.
        prompt_logprobs: the same for the positions of the prompt but the first; None = none. What
            is cached of the prompt is then computed again.
        skip_special_tokens: False = the text has the special tokens of the output too, but for the
            id that stops it.

    Raises:
        ValueError: a value out of range.
    """

    max_tokens: NumTokens = 16
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    stop: tuple[StopString, ...] = ()
    temperature: floats(0, LARGEST) = 0.0
    top_k: ints(0, MAX_INT32) = 0
    top_p: floats(0, 1, is_open=True) = 1.0
    min_p: floats(0, 1) = 0.0
    repetition_penalty: floats(SMALLEST, LARGEST) = 1.0
    seed: Seed | None = None
    n: ints(1, MAX_SAMPLES) = 1
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("stop_token_ids", Integral), ("stop", str)):
            object.__setattr__(self, name, _as_tuple(getattr(self, name), kind))
        check_fields(self)


@dataclass(eq=False)
class Request:
    """Mutable state of one unfinished sample of a request.

    Attributes:
        prompt_token_ids: [prompt_len] int32, never changed.
        capacity: most tokens of prompt and output together.
        prompt_logprobs: of the prompt's tokens behind the first, as far as they are known; one list
            for all samples. None = not wanted.
        host_match: look-up in the host tier before its last load.
        text: its growing text, where stop strings or a stream need it.
        decode: ids to text, for the end; None = no tokenizer.
        slot: kvcore slot while running, else -1.
        num_output_placeholders: 1 while its next token is known to the device alone, else 0.
        buffer: [capacity] int32, known tokens, then drafts; until `reserve` the prompt's own.
        drafts: [num_drafts] int32, tokens that may come next, which the next step verifies.
        draft_probs: [>= num_drafts, vocab_size] fp32 on the model's device, the distributions they
            were drawn from; None = they were not drawn.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    capacity: int
    stop_ids: frozenset[int]
    salt: bytes
    arrival: float
    match: Match
    sample: int = 0
    seed: int = 0
    text: TextStream | None = None
    decode: Callable[[list[int]], str] | None = None
    stream: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None
    slot: int = -1
    num_output_placeholders: int = 0
    num_cached_tokens: int = -1
    limited_by: str = ""
    dense_tokens: int = 0
    host_match: TierMatch | None = None
    num_loaded_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    stop_reason: int | str | None = None
    token_times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = self.num_tokens = len(self.prompt_token_ids)
        self.buffer = self.prompt_token_ids
        self.drafts, self.draft_probs = self.buffer[:0], None

    def __str__(self) -> str:
        sample = f", sample {self.sample}" if self.params.n > 1 else ""
        return f"request {self.request_id!r}{sample}"

    @property
    def key(self) -> tuple[str, int]:
        """Key of this sample in the allocator."""
        return self.request_id, self.sample

    @property
    def tokens(self) -> np.ndarray:
        """[num_tokens] int32: prompt and output so far."""
        return self.buffer[: self.num_tokens]

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_len

    def unscored(self, start: int, end: int) -> range:
        """Rows in start .. end - 1 that give a wanted `prompt_logprobs` that is not known yet."""
        if self.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs)), min(end, self.prompt_len - 1))

    @property
    def max_hit(self) -> int | None:
        """Longest cached prefix that leaves all `unscored` rows to compute; None = no limit."""
        return len(self.prompt_logprobs) if self.unscored(0, self.prompt_len) else None

    def reserve(self) -> None:
        """Allocate memory for tokens and drafts; until then samples share the prompt's."""
        if len(self.buffer) < self.capacity:
            tokens = np.empty(self.capacity, dtype=np.int32)
            tokens[: self.num_tokens] = self.tokens
            self.buffer = tokens

    def set_drafts(self, token_ids: np.ndarray, probs: Tensor | None = None) -> None:
        """Keep drafts, as many as leave room for the token after them."""
        count = max(0, min(len(token_ids), self.capacity - self.num_tokens - 1))
        # Behind the known tokens, so that a step's input is one slice.
        self.drafts = self.buffer[self.num_tokens : self.num_tokens + count]
        self.drafts[:] = token_ids[:count]
        self.draft_probs = probs

    def output(self, finish_reason: str, error: RequestError | None = None) -> RequestOutput:
        """The output; "error" where the rest of the text cannot be decoded."""
        tokens = self.tokens.tolist()
        generated = tokens[self.prompt_len :]
        text = None
        try:
            if self.text is not None:
                text = self.text.finish()
            elif self.decode is not None:
                text = self.decode(generated[:-1] if finish_reason == "stop" else generated)
        except Exception as cause:
            text = None if self.text is None else self.text.text
            if error is None:
                finish_reason, error = "error", failure(self, cause)
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=tuple(tokens[: self.prompt_len]),
            token_ids=tuple(generated),
            finish_reason=finish_reason,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            limited_by=self.limited_by,
            dense_tokens=self.dense_tokens,
            num_loaded_tokens=self.num_loaded_tokens,
            num_preemptions=self.num_preemptions,
            arrival=self.arrival,
            token_times=tuple(self.token_times),
            text=text,
            sample=self.sample,
            stop_reason=self.stop_reason,
            num_drafts=self.num_drafts,
            num_accepted=self.num_accepted,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=(
                None if self.prompt_logprobs is None else (None, *self.prompt_logprobs)
            ),
            error=error,
        )


def checked_prompt(prompt: Any, vocab_size: int, max_model_len: int) -> np.ndarray:
    """A copy of a prompt as [num_tokens] int32.

    Raises:
        ValueError: no list of ids, an id out of range, or more than max_model_len - 1 of them.
    """
    expected = "prompt_token_ids: expected "
    try:
        length = len(prompt)
        if 0 < length < max_model_len:
            prompt = np.asarray(prompt.cpu() if isinstance(prompt, Tensor) else prompt)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{expected}a list of ids, got {shown(prompt)}") from error
    if not 0 < length < max_model_len:
        limit = max_model_len - 1
        raise ValueError(f"{expected}1..{limit} ids (max_model_len - 1), got {length}")
    if prompt.ndim != 1:
        raise ValueError(f"{expected}a list of ids, got shape {list(prompt.shape)}")
    if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(f"{expected}ints in 0..{vocab_size - 1}, got {shown(prompt.tolist())}")
    return prompt.astype(np.int32)


def _as_tuple(value: Any, kind: type) -> Any:
    """A value of ``kind`` alone, an iterable or None, as a tuple; others as they are."""
    if value is None or isinstance(value, kind):
        return () if value is None else (value,)
    try:
        return tuple(value)
    except TypeError:
        return value
