"""A digest of everything that an object holds: equal before and after a call that changed nothing."""

from __future__ import annotations

import types
from collections import deque
from functools import partial
from hashlib import blake2b

import numpy as np

PLAIN = (type(None), bool, int, float, str, bytes, np.generic)
SCRATCH = {"_mark", "_checked", "_found", "_found_at"}  # attributes that remember nothing


def digest(root: object) -> str:
    """Hash of the graph of objects under `root`: their values and how they refer to one another."""
    names: dict[int, int] = {}
    objects: list[object] = []
    hasher = blake2b(digest_size=16)

    def name(x: object) -> str:
        if isinstance(x, PLAIN):
            return f"{type(x).__name__} {x!r}"
        if id(x) not in names:
            names[id(x)] = len(objects)
            objects.append(x)
        return f"#{names[id(x)]}"

    name(root)
    for x in objects:  # which grows
        hasher.update(repr((type(x).__name__, *_parts(x, name))).encode())
    return hasher.hexdigest()


def _parts(x: object, name):
    if isinstance(x, np.ndarray):
        yield from (str(x.dtype), x.shape, x.tobytes())
    elif isinstance(x, (bytearray, memoryview)):
        yield bytes(x)
    elif isinstance(x, dict):
        yield from ((name(k), name(v)) for k, v in x.items())
    elif isinstance(x, (list, tuple, deque)):
        yield from map(name, x)
    elif isinstance(x, (set, frozenset)):
        yield from sorted(map(name, x))
    elif isinstance(x, partial):
        yield from map(name, (x.func, x.args, x.keywords))
    elif isinstance(x, types.MethodType):
        yield from (x.__func__.__qualname__, name(x.__self__))
    elif isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        yield getattr(x, "__qualname__", x.__name__)
    else:
        slots = {s for c in type(x).__mro__ for s in getattr(c, "__slots__", ())}
        held = {s: getattr(x, s) for s in sorted(slots) if hasattr(x, s)}
        held.update(getattr(x, "__dict__", {}))
        yield from ((k, name(v)) for k, v in held.items() if k not in SCRATCH)
