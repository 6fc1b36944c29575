"""What an implementation is to the benchmarks, and the list of those that load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

Call = Callable[[], tuple[Tensor, ...]]
"""Computes one copy; returns what ``wrong`` of what is expected takes: for attention (out,) or
(out, lse), [num_tokens, num_heads, head_dim] and [num_heads, num_tokens] in natural log.
"""


class Unsupported(Exception):
    """An implementation cannot do a case; the message says why."""


@dataclass(frozen=True)
class Peer:
    """An implementation.

    Attributes:
        name: short, for tables and ``--impl``.
        version: of the package.
        note: what differs in its work, or "".
        prepare: problem of the peer's family (`bench.kernels.families`) -> one call for each copy;
            raises Unsupported.
        ours: whether a wrong result of it is a bug of this repository.
    """

    name: str
    version: str
    note: str
    prepare: Callable[[Any], list[Call]]
    ours: bool = False


def load_peers(
    loaders: dict[str, Callable[[Path | None], Peer]], folder: Path | None
) -> tuple[list[Peer], dict[str, str]]:
    """The peers that load, and {name: why} of the others."""
    found, missing = [], {}
    for name, load in loaders.items():
        try:
            found.append(load(folder))
        # Foreign packages fail to load in many ways, a missing library among them; each is a reason
        # to report, not to stop.
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return found, missing
