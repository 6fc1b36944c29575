"""Workloads of the main benchmark: chats of several turns, each a prompt that continues the whole
conversation before it, or the requests of a trace.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .traces import BLOCK_TOKENS, load_mooncake

# Modules with much prose: system prompts quote the first ones, users the others.
SYSTEM_MODULES = ("statistics", "heapq", "textwrap")
USER_MODULES = ("argparse", "difflib", "datetime", "decimal", "doctest", "tarfile")

# Tokens of a chat at scale 1; every length but that of a system prompt varies by half around these.
SYSTEM_TOKENS = 448
USER_TOKENS = 96
ANSWER_TOKENS = 24
NUM_SESSIONS = 8
NUM_TURNS = 4
NUM_GROUPS = 5  # parts of a trace that results are grouped by


@dataclass(frozen=True, eq=False)
class Turn:
    """One request of a session.

    Attributes:
        token_ids: [n] int32, what follows the previous turn's prompt and answer (the whole prompt
            in a first turn).
        max_tokens: tokens to generate, always all of them.
        group: what results are grouped by, as `Workload.group_name` says.
    """

    token_ids: np.ndarray
    max_tokens: int
    group: int


@dataclass(frozen=True)
class Workload:
    """Sessions, each a tuple of turns.

    Attributes:
        title: one line for the report.
        group_name: meaning of `Turn.group`.
    """

    title: str
    group_name: str
    sessions: tuple[tuple[Turn, ...], ...]

    @property
    def num_requests(self) -> int:
        return sum(len(session) for session in self.sessions)

    @property
    def longest(self) -> int:
        return max(sum(len(t.token_ids) + t.max_tokens for t in s) for s in self.sessions)


def retention(text: str) -> str | int:
    """Type of an option: a retention by name, or an interval in tokens."""
    return int(text) if text.isdecimal() else text


def scaled(length: int, scale: float) -> int:
    """length * scale, rounded, and at least 1."""
    return max(1, round(length * scale))


def chat_workload(
    encode: Callable[[str], list[int]],
    *,
    bos_token_id: int | None = None,
    limit: int | None = None,
    scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Chats about texts of the standard library; several sessions share each of the system prompts.

    The same arguments give the same tokens under the same Python version, whose own files are the
    text.

    Args:
        encode: text -> token ids, with or without bos in front; each text is encoded once and then
            cut by tokens.
        bos_token_id: first token of every session; None = none.
        limit: sessions at most; None = NUM_SESSIONS.
        scale: factor of all lengths.
    """

    def tokens(text: str) -> list[int]:
        ids = encode(text)
        return ids[1:] if ids and ids[0] == bos_token_id else ids

    start = [] if bos_token_id is None else [bos_token_id]
    user, assistant = tokens("\n\nUser: Please explain this.\n"), tokens("\n\nAssistant: ")
    systems = [
        tokens(f"You answer questions about the Python module {name}. Its source:\n{_source(name)}")
        for name in SYSTEM_MODULES
    ]
    corpora = [tokens(_source(name)) for name in USER_MODULES]
    rng = np.random.default_rng(seed)

    def around(length: int) -> int:
        return scaled(length, scale * rng.uniform(0.5, 1.5))

    sessions = []
    for s in range(NUM_SESSIONS if limit is None else min(limit, NUM_SESSIONS)):
        turns = []
        for t in range(NUM_TURNS):
            corpus = corpora[rng.integers(len(corpora))]
            length = min(around(USER_TOKENS), len(corpus))
            first = int(rng.integers(len(corpus) - length + 1))
            ids = [*user, *corpus[first : first + length], *assistant]
            if t == 0:
                system = systems[s % len(systems)][: scaled(SYSTEM_TOKENS, scale)]
                ids = [*start, *system, *ids]
            turns.append(Turn(np.array(ids, dtype=np.int32), around(ANSWER_TOKENS), t + 1))
        sessions.append(tuple(turns))
    title = (
        f"chat: {len(sessions)} sessions of {NUM_TURNS} turns on {len(systems)} system prompts, "
        f"texts of the standard library"
    )
    return Workload(title, "turn", tuple(sessions))


def trace_workload(
    path: str | Path,
    *,
    vocab_size: int,
    low: int = 3,
    limit: int | None = None,
    scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Requests of a trace in Mooncake's format as sessions of one turn, in the order of arrival.

    Args:
        vocab_size, low: token ids are in low .. vocab_size - 1.
        scale: factor of all lengths; blocks shrink to 512 * scale tokens.

    Raises:
        ValueError as `load_mooncake`, or unless scale <= 1.
    """
    if scale > 1:
        raise ValueError(f"scale: expected at most 1 with a trace, got {scale}")
    requests = sorted(load_mooncake(path, limit), key=lambda r: r.arrival)
    block = scaled(BLOCK_TOKENS, scale)
    sessions = []
    for i, request in enumerate(requests):
        whole, rest = divmod(request.input, BLOCK_TOKENS)
        sizes = [block] * whole + ([scaled(rest, block / BLOCK_TOKENS)] if rest else [])
        ids = [
            expand(number, size, low=low, high=vocab_size, seed=seed)
            for number, size in zip(request.ids.tolist(), sizes, strict=True)
        ]
        group = 1 + i * NUM_GROUPS // len(requests)
        sessions.append((Turn(np.concatenate(ids), scaled(request.output, scale), group),))
    title = (
        f"trace {Path(path).name}: {len(requests)} requests, "
        f"lengths x {scale:g} (blocks of {block} tokens)"
    )
    return Workload(title, "fifth of the trace", tuple(sessions))


def expand(number: int, num_tokens: int, *, low: int, high: int, seed: int = 0) -> np.ndarray:
    """The first tokens [num_tokens <= 512] int32 of a block, in low .. high - 1, the same on every
    machine; fewer of them are a prefix of more.
    """
    digest = hashlib.shake_128(f"{seed}:{number}".encode()).digest(4 * num_tokens)
    words = np.frombuffer(digest, dtype="<u4")
    return (low + words % (high - low)).astype(np.int32)


def _source(module: str) -> str:
    """Text of a module of the standard library, which is found but not imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin).read_text(encoding="utf-8")
