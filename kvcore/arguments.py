"""Checks of arguments: each returns the value in one type, or raises a ValueError that names it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .arrays import INT32, INT64, ZERO32, Int32, Int64


def refusal(name: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {got}")


def as_int(name: str, value: Any, low: int, high: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise refusal(name, f"an int >= {low}", repr(value))
    if value > high:
        raise refusal(name, f"an int <= {high}", f"{int(value):.6g}")
    return int(value)


def as_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refusal(name, "True or False", repr(value))
    return value


def as_bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise refusal(name, "bytes", type(value).__name__)
    return value


def as_number(name: str, value: Any, expected: str) -> float:
    """A finite float; `expected` describes it in the error."""
    kinds = (int, float, np.integer, np.floating)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    try:
        if is_number and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int past all floats
        pass
    raise refusal(name, expected, repr(value))


def as_seconds(name: str, value: Any) -> float:
    return as_number(name, value, "a finite number of seconds")


def as_ints(name: str, values: Any) -> Int64:
    """An array of ints, perhaps the caller's own: it is not to be kept."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:  # rows of several lengths, say
        raise refusal(name, "ints", repr(values)) from error
    if array.dtype != INT64:
        if array.size and array.dtype.kind not in "iu":
            raise refusal(name, "ints", _kind(array))
        array = array.astype(INT64)
    return array


def _kind(array: Any) -> Any:
    return "str" if array.dtype.kind == "U" else array.dtype


def as_token_ids(name: str, tokens: Any) -> Int32:
    """A contiguous vector of ids in [0, 2**31)."""
    array = np.asarray(tokens)
    quick = array.dtype == INT32 and array.ndim == 1 and array.flags.c_contiguous
    if quick and not np.count_nonzero(array < ZERO32):
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise refusal(name, "a 1-D sequence of ints", f"{_kind(array)} {list(array.shape)}")
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 2**31:
            raise refusal(name, "ids in [0, 2**31)", low if low < 0 else high)
    return np.ascontiguousarray(array, dtype=np.int32)


def as_unused(name: str, thing: Any, expected: str, is_one: bool) -> Any:
    """Check that `thing` is a policy or event log that no cache has, as it remembers entries."""
    if not is_one:
        raise refusal(name, expected, repr(thing))
    if getattr(thing, "_has_cache", False):
        raise refusal(name, "one that no cache was made with", repr(thing))
    return thing


def take_ownership(*things: Any) -> None:
    for thing in things:
        if thing is not None:
            thing._has_cache = True
