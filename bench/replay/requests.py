"""One request of a trace, and the tokens that its ids stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..common.traces import MAX_LENGTH

ANSWER_TOKENS = 1 << 30  # token ids from here on are answers that no later prompt repeats


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt, and how long its answer is.

    arrival: seconds since the start. session: turns of one conversation have the same.
    input, output: tokens. output 0 is a look-up: it asks for a hit, runs nothing and keeps nothing.
    ids: [n] int64, one for each block of `ids_block_size` tokens; equal ids after equal prefixes stand for equal tokens. The first
        ceil(input / ids_block_size) cover the prompt; where there are more, the answer is known and they go on into it.
    scope: requests of different scopes share nothing (a tenant, or a trace whose ids restart in each session).
    """

    arrival: float
    session: int
    input: int
    output: int
    ids: np.ndarray = field(repr=False)
    ids_block_size: int
    scope: str = ""

    def __post_init__(self) -> None:
        if self.input < 1 or self.output < 0:
            raise ValueError(
                f"request: expected input >= 1 and output >= 0, got {self.input} and {self.output}"
            )
        if self.input + self.output > MAX_LENGTH:
            raise ValueError(
                f"request: expected at most {MAX_LENGTH} tokens, got {self.input} + {self.output}"
            )
        if not math.isfinite(self.arrival):
            raise ValueError(f"arrival: expected a finite time, got {self.arrival}")
        if len(self.ids) * self.ids_block_size < self.input:
            raise ValueError(
                f"ids: expected at least {-(-self.input // self.ids_block_size)} for {self.input} tokens, got {len(self.ids)}"
            )

    def tokens(self, number: int) -> np.ndarray:
        """Prompt and answer: [input + output] int32. `number`, the place in the trace, makes unknown answers unique."""
        size = self.ids_block_size
        known = min(len(self.ids) * size, self.input + self.output)
        if known < self.input + self.output:
            known = self.input  # the rest of the last block is not of this answer
        blocks = self.ids[: -(-known // size), None] * size + np.arange(size)
        answer = np.arange(self.input + self.output - known)
        answer = ANSWER_TOKENS + (number * 65536 + answer) % ANSWER_TOKENS
        return np.concatenate([blocks.ravel()[:known], answer]).astype(np.int32)


class Numbering:
    """Small ids in place of any hashable ones: tokens are made from them, and token ids have 31 bits."""

    def __init__(self, block_size: int) -> None:
        self._limit = ANSWER_TOKENS // block_size
        self._numbers: dict[object, int] = {}

    def __call__(self, ids: Sequence[object]) -> np.ndarray:
        """[n] int64 numbers of `ids`, the same for equal ids.

        Raises: ValueError when there are more distinct ids than tokens can tell apart.
        """
        numbers = self._numbers
        result = np.array([numbers.setdefault(i, len(numbers)) for i in ids], dtype=np.int64)
        if len(numbers) > self._limit:
            raise ValueError(f"ids: expected at most {self._limit} distinct ones, got more")
        return result
