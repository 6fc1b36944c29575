"""A request on its way through the engine: what was asked, what is known so far, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire.kvcore import Match


@dataclass(frozen=True)
class SamplingParams:
    """How to generate; decoding is greedy.

    max_tokens: tokens to generate at most.
    stop_token_ids: ids that end the output besides the model's own; the stopping id is its last token.
    ignore_eos: True = the model's own stop ids do not end the output.

    Raises: ValueError when max_tokens is below 1.
    """

    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected >= 1, got {self.max_tokens}")


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    token_ids: generated tokens. text: their text without the stopping id, or None without a tokenizer.
    finish_reason: "stop" (a stop id was generated), "length" (max_tokens or the longest sequence was reached) or "abort".
    num_cached_tokens: prompt tokens that the prefix cache gave when the request was first admitted.
    limited_by: why they were not more (`quire.kvcore.Match.limited_by`); "" when it never was admitted.
    num_preemptions: times that the request lost its pages and was resumed.
    arrival, token_times: seconds on `time.perf_counter`'s clock.
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

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token; NaN when there is none."""
        return self.token_times[0] - self.arrival if self.token_times else float("nan")

    @property
    def itl(self) -> tuple[float, ...]:
        """Seconds between one token and the next: one fewer than tokens."""
        return tuple(after - before for before, after in pairwise(self.token_times))


@dataclass(eq=False)
class Request:
    """Mutable state of one unfinished request; the scheduler owns it.

    prompt_len: tokens of the prompt. capacity: longest that prompt and output may get together.
    stop_ids: ids that end the output. match: the hashed tokens, for admission.
    slot: kvcore slot while running, else -1. salt: keeps its cached prefixes from other salts' requests.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    capacity: int
    stop_ids: frozenset[int]
    salt: bytes
    arrival: float
    match: Match
    slot: int = -1
    num_cached_tokens: int = -1
    limited_by: str = ""
    num_preemptions: int = 0
    token_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = self.num_tokens = len(self.prompt_token_ids)
        self._tokens = np.empty(self.capacity, dtype=np.int32)
        self._tokens[: self.prompt_len] = self.prompt_token_ids

    @property
    def tokens(self) -> np.ndarray:
        """[num_tokens] int32: prompt and output so far."""
        return self._tokens[: self.num_tokens]

    def append(self, token: int, now: float) -> str | None:
        """Adds a generated token; returns the finish reason if it was the last."""
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.token_times.append(now)
        if token in self.stop_ids:
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
        )
