"""Request traces in Mooncake's format (kvcache-ai, ``FAST25-release/traces``): one JSON object a
line, with an id for each started block of 512 prompt tokens, and times in ms.

Files ending in ``.xz`` are decompressed. Equal ids after equal prefixes stand for equal tokens.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

BLOCK_TOKENS = 512
MAX_LENGTH = 1 << 26  # tokens of a request
MAX_LINE = 1 << 26  # bytes; a longer line is read in parts, which are no JSON
ANSWER_TOKENS = 1 << 30  # token ids from here on are answers that no later prompt repeats


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One prompt and the length of its answer.

    Attributes:
        arrival: seconds since the start.
        input, output: tokens. Output 0 is a look-up: it asks for a hit and runs nothing.
        ids: [n] int64, one for each block of `ids_block_size` tokens. The first
            ceil(input / ids_block_size) cover the prompt; further ones go on into a known answer.
    """

    arrival: float
    input: int
    output: int
    ids: np.ndarray = field(repr=False)
    ids_block_size: int

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


def load_mooncake(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests (None: all) of a file; an answer has at least one token.

    Raises:
        ValueError: a bad line, an empty file, or one that cannot be read; names file and fault.
    """
    number, requests = Numbering(BLOCK_TOKENS), []
    for where, row in islice(_objects(Path(path)), limit):
        milliseconds = _field(row, "timestamp", (int, float), where)
        length, output = (_field(row, n, int, where) for n in ("input_length", "output_length"))
        ids = _field(row, "hash_ids", list, where)
        try:
            known = number(ids[: -(-length // BLOCK_TOKENS)])
            time = float(milliseconds) / 1000
            requests.append(TraceRequest(time, length, output or 1, known, BLOCK_TOKENS))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"trace: {where}: {error}") from error
    if not requests:
        name = Path(path).name
        raise ValueError(f"trace: expected at least one request in {name}, got an empty file")
    return requests


def _field(row: dict[str, Any], name: str, kind: Any, where: str) -> Any:
    """A field of an object; raises ValueError, naming ``where``, for another type."""
    value = row.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"trace: {where}: {name}: expected {names}, got {value!r:.60}")
    return value


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, JSON object) of each line that is not blank."""
    with _open(path) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE), b""), start=1):
            if not line.strip():
                continue
            where = f"{path.name}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise ValueError(f"trace: {where}: expected a JSON object, got {line[:60]!r}")
            yield where, value


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """A file to read, decompressed when its name ends in ``.xz``."""
    try:
        if path.is_fifo():
            raise OSError("expected a file, got a pipe")
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as lines:
            yield lines
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"trace: cannot read {str(path)!r}: {reason}") from error
