"""Request traces in three public formats, one JSON object a line.

    mooncake  kvcache-ai, ``FAST25-release/traces``: ids of 512 prompt tokens, times in ms
    bailian   alibaba-edu, ``qwen-bailian-usagetraces-anon``: ids of 16 prompt tokens
    weka      agentic coding sessions, one object each (a file, a folder of files, or one a line);
              ids of ``block_size`` prompt tokens, of one session or "global"

Files ending in ``.xz`` are decompressed. Equal ids after equal prefixes stand for equal tokens.
Readers raise ValueError for a bad line, an empty file, or one that cannot be read; it names file,
line and fault.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

BLOCK_TOKENS = 512  # of Mooncake
MAX_BLOCK = 1 << 16
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
        scope: requests of different scopes share nothing (tenants, or ids local to a session).
    """

    arrival: float
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


def load_lines(
    path: str | Path, limit: int | None = None, *, size: int, unit: int
) -> list[TraceRequest]:
    """The first `limit` requests (None: all) of a file with one a line, in its order.

    Args:
        size: tokens of a block.
        unit: timestamps of a second.
    """
    number = Numbering(size)
    requests = [
        _request(row, where, number, size, ("timestamp", "input_length", "output_length"), unit)
        for where, row in islice(_objects(path), limit)
    ]
    return _some(requests, path)


def load_weka(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of sessions and their subagents, in the order of their times.

    Each session starts at its own recorded time. A prompt whose last, partial block has no id ends
    in tokens of its own.
    """
    requests: list[TraceRequest] = []
    numbers: dict[int, Numbering] = {}
    path = Path(path)
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    for session, (where, trace) in enumerate(pair for file in files for pair in _objects(file)):
        size = _field(trace, "block_size", int, where)
        if not 1 <= size <= MAX_BLOCK:
            raise ValueError(f"trace: {where}: block_size: expected 1..{MAX_BLOCK}, got {size}")
        number = numbers.setdefault(size, Numbering(size))
        scope = trace.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise ValueError(
                f"trace: {where}: hash_id_scope: expected 'local' or 'global', got {scope!r:.60}"
            )
        name = "" if scope == "global" else str(trace.get("id", session))
        for row in _calls(trace, where):
            length, ids = _field(row, "in", int, where), _field(row, "hash_ids", list, where)
            if length % size and len(ids) == length // size:
                row = row | {"hash_ids": [*ids, ("tail", session, len(requests))]}
            requests.append(_request(row, where, number, size, ("t", "in", "out"), scope=name))
    requests.sort(key=lambda r: r.arrival)
    return _some(requests[:limit], path)


load_mooncake = partial(load_lines, size=BLOCK_TOKENS, unit=1000)
LOADERS: dict[str, Callable[[str | Path, int | None], list[TraceRequest]]] = {
    "mooncake": load_mooncake,
    "bailian": partial(load_lines, size=16, unit=1),
    "weka": load_weka,
}


def _calls(trace: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Model calls of a session and of its subagents."""
    for row in _field(trace, "requests", list, where):
        if not isinstance(row, dict):
            raise ValueError(f"trace: {where}: requests: expected objects, got {row!r:.60}")
        if row.get("type") == "subagent":
            yield from _calls(row, where)
        else:
            yield row


def _request(
    row: dict[str, Any], where: str, number: Numbering, size: int, names: tuple[str, str, str],
    unit: int = 1, scope: str = "",
) -> TraceRequest:  # fmt: skip
    """The request of a row with these fields of time and lengths; an answer has a token or more."""
    time = _field(row, names[0], (int, float), where)
    length, output = (_field(row, name, int, where) for name in names[1:])
    ids = _field(row, "hash_ids", list, where)
    try:
        known = number(ids[: -(-length // size)])
        return TraceRequest(float(time) / unit, length, output or 1, known, size, scope)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"trace: {where}: {error}") from error


def _field(row: dict[str, Any], name: str, kind: Any, where: str) -> Any:
    """A field of an object; raises ValueError, naming ``where``, for another type."""
    value = row.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"trace: {where}: {name}: expected {names}, got {value!r:.60}")
    return value


def _some(requests: list[TraceRequest], path: str | Path) -> list[TraceRequest]:
    if not requests:
        name = Path(path).name
        raise ValueError(f"trace: expected at least one request in {name}, got an empty file")
    return requests


def _objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, JSON object) of a file that holds one object in all (.json) or one a line."""
    path = Path(path)
    with _open(path) as lines:
        if path.name.removesuffix(".xz").endswith(".json"):
            yield path.name, _parse_object(lines.read(MAX_LINE), path.name)
            return
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE), b""), start=1):
            if line.strip():
                where = f"{path.name}, line {number}"
                yield where, _parse_object(line, where)


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


def _parse_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"trace: {where}: expected a JSON object, got {text[:60]!r}")
    return value
