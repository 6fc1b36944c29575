"""Traces in three public formats, as `Request`s.

* Mooncake (kvcache-ai, ``FAST25-release/traces``): ids of 512 prompt tokens, no sessions.
* Qwen-Bailian (alibaba-edu, ``qwen-bailian-usagetraces-anon``): ids of 16 prompt tokens; turns are
  linked by ``parent_chat_id``.
* Weka: agentic coding sessions, one JSON object each (a file, a folder of files, or one a line).
  Ids of `block_size` prompt tokens belong to one session unless ``hash_id_scope`` is "global".
  Requests of subagents are nested in those of their parent.

Files with names that end in ``.xz`` are decompressed. Loaders raise ValueError naming file, line
and the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..common.traces import BLOCK_TOKENS, expect_some, read_objects, read_trace, value_of
from ..common.workload import check_size
from .requests import Numbering, Request

BAILIAN_BLOCK = 16
MAX_BLOCK = 1 << 16


def load_mooncake(path: str | Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a Mooncake trace; each is a session of its own."""
    size, number = BLOCK_TOKENS, Numbering(BLOCK_TOKENS)
    return [
        Request(r.timestamp / 1000, i, r.input_length, r.output_length, number(r.hash_ids), size)
        for i, r in enumerate(read_trace(path, limit=limit))
    ]


def load_bailian(path: str | Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a Qwen-Bailian trace; turns of a chat share a session."""
    check_size(limit, 1.0)
    number, sessions = Numbering(BAILIAN_BLOCK), dict[int, int]()
    requests: list[Request] = []
    for where, row in read_objects(path):
        if len(requests) == limit:
            break
        chat, parent = (
            value_of(row, "chat_id", int, where),
            value_of(row, "parent_chat_id", int, where),
        )
        session = sessions[chat] = sessions.get(parent, len(requests))
        fields = ("timestamp", "input_length", "output_length", "hash_ids")
        requests.append(_request(row, fields, where, session, BAILIAN_BLOCK, number))
    return expect_some(requests, path)


def load_weka(path: str | Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of Weka sessions, in the order of their times.

    Each session starts at its own recorded time. A prompt whose last, partial block has no id ends
    in tokens of its own.
    """
    check_size(limit, 1.0)
    requests: list[Request] = []
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
                f"trace: {where}: hash_id_scope: expected 'local' or 'global', got {scope!r}"
            )
        name = "" if scope == "global" else str(trace.get("id", session))
        for row in _calls(trace, where):
            tail = ("tail", session, len(requests))
            fields = ("t", "in", "out", "hash_ids")
            requests.append(_request(row, fields, where, session, size, number, name, tail))
    requests.sort(key=lambda r: r.arrival)
    return expect_some(requests[:limit], path)


LOADERS: dict[str, Callable[[str | Path, int | None], list[Request]]] = {
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
    row: dict[str, Any], fields: tuple[str, str, str, str], where: str, session: int, size: int,
    number: Numbering, scope: str = "", tail: object = None,
) -> Request:  # fmt: skip
    """The request of a row; `fields` name its time, lengths and ids; `tail`: id of a last block."""
    time, length, answer, blocks = fields
    arrival = value_of(row, time, (int, float), where)
    input, output = value_of(row, length, int, where), value_of(row, answer, int, where)
    ids = list(value_of(row, blocks, list, where))
    if tail is not None and input % size and len(ids) == input // size:
        ids.append(tail)
    needed = -(-input // size)
    if len(ids) < needed:
        raise ValueError(
            f"trace: {where}: hash_ids: expected {needed} ids for {input} tokens, got {len(ids)}"
        )
    output = output or 1  # an output of 0 would be a look-up
    try:
        return Request(float(arrival), session, input, output, number(ids[:needed]), size, scope)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"trace: {where}: {error}") from error
