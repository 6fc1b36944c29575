"""Check that an eviction policy or an event log serves one cache: each remembers its content."""

from __future__ import annotations

from typing import Any

from .events import EventLog

METHODS = ("add", "discard", "pop", "asked")  # of an eviction policy


def check_policy(policy: Any) -> None:
    """Raise ValueError unless `policy` is an eviction policy that no cache uses."""
    methods = [getattr(policy, name, None) for name in METHODS]
    if isinstance(policy, type) or not all(map(callable, methods)):
        raise ValueError(f"policy: expected an eviction policy, such as LRU(), got {policy!r}")
    _check_unattached("policy", policy)


def check_log(log: Any) -> None:
    """Raise ValueError unless `log` is None or an event log that no cache uses."""
    if log is None:
        return
    if not isinstance(log, EventLog):
        raise ValueError(f"events: expected an EventLog or None, got {log!r}")
    _check_unattached("events", log)


def _check_unattached(name: str, thing: Any) -> None:
    # Reading its `__dict__` would make its attributes slow.
    if not type(thing).__dictoffset__:
        raise ValueError(f"{name}: expected a class without __slots__, got {thing!r}")
    if getattr(thing, "_has_cache", False):
        raise ValueError(f"{name}: expected one that no cache was made with, got {thing!r}")


def take_ownership(*things: Any) -> None:
    """Mark `things` (those that are not None) as used by a cache."""
    for thing in things:
        if thing is not None:
            thing._has_cache = True
