"""Requests of a trace, and the tokens that their ids stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.kvcore import KVCache, Prompt

from ..common.traces import MAX_LENGTH

ANSWER_TOKENS = 1 << 30  # token ids from here on are answers that no later prompt repeats


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One prompt and the length of its answer.

    Attributes:
        arrival: seconds since the start.
        session: number of the conversation, the same for all its turns.
        input, output: tokens. Output 0 is a look-up: it asks for a hit and runs nothing.
        ids: [n] int64, one for each block of `ids_block_size` tokens; equal ids after equal
            prefixes stand for equal tokens. The first ceil(input / ids_block_size) cover the
            prompt; further ones go on into a known answer.
        scope: requests of different scopes share nothing (tenants, or ids local to a session).
    """

    arrival: float
    session: int
    input: int
    output: int
    ids: np.ndarray = field(repr=False)
    ids_block_size: int
    scope: str = ""

    def __post_init__(self) -> None:
        lengths = f"{self.input} and {self.output}"
        if self.input < 1 or self.output < 0:
            raise ValueError(f"request: expected input >= 1 and output >= 0, got {lengths}")
        if self.input + self.output > MAX_LENGTH:
            raise ValueError(f"request: expected at most {MAX_LENGTH} tokens, got {lengths}")
        if not math.isfinite(self.arrival):
            raise ValueError(f"arrival: expected a finite time, got {self.arrival}")
        needed, found = -(-self.input // self.ids_block_size), len(self.ids)
        if found < needed:
            raise ValueError(
                f"hash_ids: expected {needed} ids for {self.input} tokens, got {found}"
            )

    def tokens(self, number: int) -> np.ndarray:
        """Token ids [input + output] int32 of prompt and answer.

        Args:
            number: place of the request in the trace; makes the tokens of an unknown answer unique.
        """
        size, length = self.ids_block_size, self.input + self.output
        known = min(len(self.ids) * size, length)
        if known < length:
            known = self.input  # the rest of the last block is not of this answer
        blocks = self.ids[: -(-known // size), None] * size + np.arange(size)
        answer = (number * 65536 + np.arange(length - known)) % ANSWER_TOKENS
        return np.concatenate([blocks.ravel()[:known], ANSWER_TOKENS + answer]).astype(np.int32)


class Numbering:
    """Replace ids of any hashable type by small integers; token ids made from them have 31 bits."""

    def __init__(self, block_size: int) -> None:
        self._limit = ANSWER_TOKENS // block_size
        self._numbers: dict[object, int] = {}

    def __call__(self, ids: Sequence[object]) -> np.ndarray:
        """Numbers [n] int64, equal for equal ids; raises ValueError for too many distinct ids."""
        numbers = self._numbers
        result = np.array([numbers.setdefault(i, len(numbers)) for i in ids], dtype=np.int64)
        if len(numbers) > self._limit:
            raise ValueError(f"ids: expected at most {self._limit} distinct ones, got more")
        return result


@dataclass
class TraceWorkload:
    """A trace in the order of arrival.

    Attributes:
        name: title of tables and pictures.
        requests: sorted by arrival.
    """

    name: str
    requests: list[TraceRequest]
    _prompts: dict[int, list[Prompt]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"requests: expected at least one in workload {self.name!r}")
        self.requests.sort(key=lambda r: r.arrival)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(r.input + r.output for r in self.requests)

    def prompts(self, cache: KVCache) -> list[Prompt]:
        """Hashed prompts, computed once for all caches of this alignment."""
        if cache.alignment not in self._prompts:
            self._prompts[cache.alignment] = [
                cache.match(r.tokens(i)[: r.input], salt=r.scope.encode()).prompt
                for i, r in enumerate(self.requests)
            ]
        return self._prompts[cache.alignment]

    def chains(self, cache: KVCache) -> list[bytes]:
        """Keys of each prompt with its answer, 32 bytes a segment."""
        return [
            cache.match(r.tokens(i), salt=r.scope.encode()).prompt.keys
            for i, r in enumerate(self.requests)
        ]
