"""What a hand-off copies pages with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Staging(Protocol):
    """Rows of host memory that pages are copied over."""

    def arrays(self, rows: np.ndarray) -> list[np.ndarray]:
        """[page_bytes] uint8 of each of ``rows``: the memory itself."""


class PageMemory(Protocol):
    """The pages of a pool; any thread calls it. `ArrayPages` is one over an array, and
    `quire.models.transfer.pool.PoolMemory` one over page tensors.

    Attributes:
        page_bytes: bytes of a page id, in all page tensors.
    """

    page_bytes: int

    def staging(self, num_rows: int) -> Staging:
        """New rows."""

    def copy_out(self, pages: np.ndarray, staging: Any, rows: np.ndarray) -> None:
        """Copies pages to rows, behind all that was launched so far, and waits for it."""

    def copy_in(self, pages: np.ndarray, staging: Any, rows: np.ndarray) -> None:
        """Copies rows to pages, likewise."""


class ArrayPages:
    """Pages in an array of the host.

    Args:
        memory: [num_pages, page_bytes] uint8.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._memory, self.page_bytes = memory, memory.shape[1]

    def staging(self, num_rows: int) -> ArrayRows:
        """As of `PageMemory`."""
        return ArrayRows(np.empty((num_rows, self.page_bytes), np.uint8))

    def copy_out(self, pages: np.ndarray, staging: ArrayRows, rows: np.ndarray) -> None:
        """As of `PageMemory`."""
        staging.memory[rows] = self._memory[pages]

    def copy_in(self, pages: np.ndarray, staging: ArrayRows, rows: np.ndarray) -> None:
        """As of `PageMemory`."""
        self._memory[pages] = staging.memory[rows]


@dataclass(frozen=True)
class ArrayRows:
    """Staging of `ArrayPages`.

    Attributes:
        memory: [num_rows, page_bytes] uint8.
    """

    memory: np.ndarray

    def arrays(self, rows: np.ndarray) -> list[np.ndarray]:
        """As of `Staging`."""
        return [self.memory[row] for row in rows.tolist()]
