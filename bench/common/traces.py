"""Request traces in Mooncake's format: one JSON object a line, prompts as ids of their 512-token
blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

Equal ids stand for equal tokens after equal prefixes, and nothing else of the prompt is known. So
an id is expanded to pseudo-random tokens that depend on it alone: prompts then share exactly the
prefixes that they shared where the trace was taken.

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
MAX_LENGTH = 1 << 26  # tokens of a request
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
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
        ValueError naming file, line number and what is wrong with it; also for a file without
            requests, or that cannot be read.
    """
    check_size(limit, 1.0)
    path = Path(path)
    requests = []
    with open_trace(path) as lines:
        for number, line in _numbered(lines):
            if len(requests) == limit:
                break
            requests.append(_parse(line, f"{path.name}, line {number}"))
    if not requests:
        raise ValueError(f"trace: expected at least one request in {path.name}, got an empty file")
    return requests


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
        scale: factor of all lengths. Blocks shrink to 512 * scale tokens, so prompts share what
            they shared, only less of it.
        seed: of the expansion of ids to tokens.

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


@contextmanager
def open_trace(path: Path) -> Iterator[IO[bytes]]:
    """A file to read, decompressed when its name ends in ``.xz``.

    Raises:
        ValueError naming a file that is missing, damaged or cut off, when it is opened or while it
            is read.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as lines:
            yield lines
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"trace: cannot read {str(path)!r}: {reason}") from error


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object that ``text`` is. Raises ValueError, naming ``where``, if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"trace: {where}: expected a JSON object, got {text[:60]!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"trace: {where}: expected a JSON object, got {text[:60]!r}")
    return value


def _numbered(lines: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _parse(line: bytes, where: str) -> TraceRequest:
    record = parse_object(line, where)
    if missing := [field for field in FIELDS if field not in record]:
        raise ValueError(f"trace: {where}: missing fields {missing}, got {sorted(record)}")
    for field, least in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
        if not _is_int(record[field], least):
            raise ValueError(
                f"trace: {where}: {field}: expected an int >= {least}, got {record[field]!r:.60}"
            )
        if field != "timestamp" and record[field] > MAX_LENGTH:
            raise ValueError(
                f"trace: {where}: {field}: expected at most {MAX_LENGTH}, got {record[field]}"
            )
    ids = record["hash_ids"]
    if not isinstance(ids, list) or not all(_is_int(i, 0) for i in ids):
        raise ValueError(f"trace: {where}: hash_ids: expected a list of ints >= 0, got {ids!r:.60}")
    needed = -(-record["input_length"] // BLOCK_TOKENS)
    if len(ids) != needed:
        raise ValueError(
            f"trace: {where}: hash_ids: expected {needed} ids for {record['input_length']} tokens, "
            f"got {len(ids)}"
        )
    return TraceRequest(*(record[field] for field in FIELDS[:3]), tuple(ids))


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
