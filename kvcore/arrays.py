"""Arrays of ints: types, constants, and operations that numpy lacks."""

from __future__ import annotations

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
    """Concatenate the ranges ``starts[i] .. starts[i] + lengths[i] - 1``: their numbers i [total]
    and their values [total].
    """
    if len(lengths) == 1:
        start, length = int(starts[0]), int(lengths[0])
        return np.zeros(length, dtype=np.int64), np.arange(start, start + length)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) + (starts - before)[rows]
