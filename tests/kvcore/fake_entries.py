"""Entries as a policy sees them, without an index."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvcore import Adaptive


@dataclass(eq=False)
class Fake:
    """An entry as a policy sees it."""

    key: bytes
    last_used: int = 0
    num_uses: int = 0
    depth: int = 1
    gain: int = 1
    num_pages: int = 1
    freed: int = 1
    shorter: Fake | None = None


def key(*names: object) -> bytes:
    """Segment keys, 32 bytes each."""
    return b"".join(str(name).encode().rjust(32) for name in names)


def chance(policy: Adaptive, entry: Fake) -> float:
    """How likely `policy` takes a hit on `entry` to be at the next prompt."""
    policy.coming(0)  # which looks at all that was added
    return policy._returns.chance(policy._filed[entry][1])
