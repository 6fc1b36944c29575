"""Arrays of ints: types, constants, operations that numpy lacks, and checks of arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)

# Numpy computes with an array of no dimensions in half the time that it takes with an int.
ONE: Int64 = np.array(1)
ZERO32: Int32 = np.array(0, dtype=np.int32)
NO_ROWS: Int64 = np.empty(0, dtype=np.int64)
NO_VALUES: Int32 = np.empty(0, dtype=np.int32)


def ragged_arange(starts: Int64, lengths: Int64) -> tuple[Int64, Int64]:
    """Row ids [total] and values [total] of the ranges ``starts[i] .. starts[i] + lengths[i] - 1``,
    one after another.
    """
    if len(lengths) == 1:
        start, length = int(starts[0]), int(lengths[0])
        return np.zeros(length, dtype=np.int64), np.arange(start, start + length)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) + (starts - before)[rows]


def as_ints(name: str, values: Any) -> Int64:
    """`values` as an array, perhaps the caller's own, which is not to be kept; ValueError if they
    are no ints.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:  # rows of several lengths, say
        raise ValueError(f"{name}: expected ints, got {values!r}") from error
    if array.dtype != INT64:
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"{name}: expected ints, got {array.dtype}")
        array = array.astype(INT64)
    return array


def as_token_ids(name: str, tokens: Any) -> Int32:
    """`tokens` as a contiguous int32 vector; ValueError if they are not one-dimensional, not
    integers, or outside [0, 2**31).
    """
    array = np.asarray(tokens)
    quick = array.dtype == INT32 and array.ndim == 1 and array.flags.c_contiguous
    if quick and not np.count_nonzero(array < ZERO32):
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: expected a 1-D sequence of ints, got {array.dtype} {list(array.shape)}"
        )
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 2**31:
            bad = low if low < 0 else high
            raise ValueError(f"{name}: expected ids in [0, 2**31), got {bad}")
    return np.ascontiguousarray(array, dtype=np.int32)
