"""Request traces in Mooncake's format: one JSON object a line, prompts as ids of their 512-token
blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

Equal ids stand for equal tokens after equal prefixes. An id is expanded to pseudo-random tokens that
depend on it alone, so prompts share the prefixes that they shared where the trace was taken.

Source: Mooncake (kvcache-ai), ``FAST25-release/traces``.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from .workload import Turn, Workload, check_size, scaled

BLOCK_TOKENS = 512
MAX_LENGTH, MAX_TIME = 1 << 26, 1 << 53  # tokens of a request; ms
MAX_LINE = 1 << 26  # bytes; a longer line is read in parts, which are no JSON
NUM_GROUPS = 5  # parts of the trace that results are grouped by


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        timestamp: ms since the start.
        input_length, output_length: tokens.
        hash_ids: one id per started block of 512 prompt tokens.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: str | Path, *, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests of a trace (None = all), in the order of the file.

    Args:
        path: JSONL, compressed when the name ends in ``.xz``.

    Raises:
        ValueError: a bad line, a file without requests, or one that cannot be read; names file,
            line and fault.
    """
    check_size(limit, 1.0)
    requests: list[TraceRequest] = []
    for where, row in read_objects(path):
        if len(requests) == limit:
            break
        requests.append(_request(row, where))
    return expect_some(requests, path)


def _request(row: dict[str, Any], where: str) -> TraceRequest:
    timestamp = value_of(row, "timestamp", int, where, 0, MAX_TIME)
    names = ("input_length", "output_length")
    lengths = [value_of(row, name, int, where, 1, MAX_LENGTH) for name in names]
    ids, needed = value_of(row, "hash_ids", list, where), -(-lengths[0] // BLOCK_TOKENS)
    if len(ids) != needed or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(
            f"trace: {where}: hash_ids: expected {needed} ints >= 0 for {lengths[0]} tokens, "
            f"got {ids!r:.60}"
        )
    return TraceRequest(timestamp, *lengths, tuple(ids))


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def value_of(
    row: dict[str, Any], field: str, kind: Any, where: str, least: Any = None, most: Any = None
) -> Any:
    """A field of an object; raises ValueError, naming ``where``, for another type or range."""
    value = row.get(field)
    good = isinstance(value, kind) and not isinstance(value, bool)
    if not good or (least is not None and not least <= value <= most):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        bound = "" if least is None else f" in {least}..{most}"
        raise ValueError(f"trace: {where}: {field}: expected {names}{bound}, got {value!r:.60}")
    return value


def expect_some(requests: list[Any], path: str | Path) -> list[Any]:
    """The requests of a file; raises ValueError if there are none."""
    if not requests:
        name = Path(path).name
        raise ValueError(f"trace: expected at least one request in {name}, got an empty file")
    return requests


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


def expand(hash_id: int, num_tokens: int, *, low: int, high: int, seed: int = 0) -> np.ndarray:
    """The first tokens that a block id stands for; fewer of them are a prefix of more.

    Args:
        num_tokens: 1..512.
        low, high: token ids are in low .. high - 1.

    Returns:
        [num_tokens] int32, the same on every machine.
    """
    digest = hashlib.shake_128(f"{seed}:{hash_id}".encode()).digest(4 * num_tokens)
    words = np.frombuffer(digest, dtype="<u4")
    return (low + words % (high - low)).astype(np.int32)


def trace_workload(
    path: str | Path,
    *,
    vocab_size: int,
    low: int = 3,
    limit: int | None = None,
    scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """A trace as sessions of one turn each, in the order of their timestamps.

    Args:
        vocab_size, low: token ids are in low .. vocab_size - 1.
        limit: requests at most.
        scale: factor of all lengths; blocks shrink to 512 * scale tokens.
        seed: seed of the expansion of ids to tokens.

    Raises:
        ValueError as `read_trace`, or unless 0 < scale <= 1.
    """
    check_size(limit, scale)
    if scale > 1:
        raise ValueError(f"scale: expected at most 1 with a trace, got {scale}")
    requests = sorted(read_trace(path, limit=limit), key=lambda r: r.timestamp)
    block = scaled(BLOCK_TOKENS, scale)
    sessions = []
    for i, request in enumerate(requests):
        whole, rest = divmod(request.input_length, BLOCK_TOKENS)
        sizes = [block] * whole + ([scaled(rest, block / BLOCK_TOKENS)] if rest else [])
        ids = [
            expand(hash_id, size, low=low, high=vocab_size, seed=seed)
            for hash_id, size in zip(request.hash_ids, sizes, strict=True)
        ]
        group = 1 + i * NUM_GROUPS // len(requests)
        turn = Turn(np.concatenate(ids), scaled(request.output_length, scale), group)
        sessions.append((turn,))
    title = (
        f"trace {Path(path).name}: {len(requests)} requests, "
        f"lengths x {scale:g} (blocks of {block} tokens)"
    )
    return Workload(title, "fifth of the trace", tuple(sessions))
