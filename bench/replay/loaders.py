"""Traces in three public formats, as `TraceRequest`s.

* Mooncake (kvcache-ai, ``FAST25-release/traces``): ids of 512 prompt tokens, no sessions.
* Qwen-Bailian (alibaba-edu, ``qwen-bailian-usagetraces-anon``): ids of 16 prompt tokens; turns are
  linked by ``parent_chat_id``.
* Weka: agentic coding sessions, one JSON object each (a file, a folder of files, or one a line).
  Ids of `block_size` prompt tokens belong to one session unless ``hash_id_scope`` is "global".

Files ending in ``.xz`` are decompressed. A ValueError names file, line and fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..common.traces import BLOCK_TOKENS, expect_some, read_objects, read_trace, value_of
from ..common.workload import check_size
from .requests import Numbering, TraceRequest

BAILIAN_BLOCK = 16
MAX_BLOCK = 1 << 16


def load_mooncake(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a Mooncake trace; each is a session of its own."""
    size, number = BLOCK_TOKENS, Numbering(BLOCK_TOKENS)
    return [
        TraceRequest(
            r.timestamp / 1000, i, r.input_length, r.output_length, number(r.hash_ids), size
        )
        for i, r in enumerate(read_trace(path, limit=limit))
    ]


def load_bailian(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a Qwen-Bailian trace; turns of a chat share a session."""
    check_size(limit, 1.0)
    number, sessions = Numbering(BAILIAN_BLOCK), dict[int, int]()
    requests: list[TraceRequest] = []
    for where, row in read_objects(path):
        if len(requests) == limit:
            break
        chat = value_of(row, "chat_id", int, where)
        parent = value_of(row, "parent_chat_id", int, where)
        session = sessions[chat] = sessions.get(parent, len(requests))
        arrival = value_of(row, "timestamp", (int, float), where)
        lengths = [value_of(row, f"{part}_length", int, where) for part in ("input", "output")]
        ids = value_of(row, "hash_ids", list, where)
        requests.append(_request(where, arrival, session, lengths, ids, BAILIAN_BLOCK, number))
    return expect_some(requests, path)


def load_weka(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of Weka sessions and their subagents, in the order of their times.

    Each session starts at its own recorded time. A prompt whose last, partial block has no id ends
    in tokens of its own.
    """
    check_size(limit, 1.0)
    requests: list[TraceRequest] = []
    numbers: dict[int, Numbering] = {}
    path = Path(path)
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    for session, (where, trace) in enumerate(pair for file in files for pair in read_objects(file)):
        size = value_of(trace, "block_size", int, where)
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
            arrival = value_of(row, "t", (int, float), where)
            lengths = [value_of(row, part, int, where) for part in ("in", "out")]
            ids = value_of(row, "hash_ids", list, where)
            if lengths[0] % size and len(ids) == lengths[0] // size:
                ids = [*ids, ("tail", session, len(requests))]
            requests.append(_request(where, arrival, session, lengths, ids, size, number, name))
    requests.sort(key=lambda r: r.arrival)
    return expect_some(requests[:limit], path)


LOADERS: dict[str, Callable[[str | Path, int | None], list[TraceRequest]]] = {
    "mooncake": load_mooncake,
    "bailian": load_bailian,
    "weka": load_weka,
}


def _calls(trace: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Model calls of a session and of its subagents."""
    for row in value_of(trace, "requests", list, where):
        if not isinstance(row, dict):
            raise ValueError(f"trace: {where}: requests: expected objects, got {row!r:.60}")
        if row.get("type") == "subagent":
            yield from _calls(row, where)
        else:
            yield row


def _request(
    where: str, arrival: float, session: int, lengths: list[int], ids: list[Any], size: int,
    number: Numbering, scope: str = "",
) -> TraceRequest:  # fmt: skip
    """The request of a row. An answer of 0 tokens would be a look-up: it becomes 1."""
    try:
        known = number(ids[: -(-lengths[0] // size)])
        return TraceRequest(
            float(arrival), session, lengths[0], lengths[1] or 1, known, size, scope
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"trace: {where}: {error}") from error
