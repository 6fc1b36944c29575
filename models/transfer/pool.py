"""The page tensors of an engine, for hand-offs."""

from __future__ import annotations

import numpy as np

from quire.kernels import PoolPages

from ..tiers.host_pages import HostPages
from ..tiers.streams import DIRECTIONS, TO_DEVICE, TO_HOST, CopyStreams
from ..tiers.ways import PageWays

# Pages from which on a kernel copies. To measure it (`PageWays.probe`) would write over pages.
KERNEL_FROM = 16


class PoolMemory:
    """A `quire.models.transfer.pages.PageMemory`. Its copies have streams of their own; nothing of
    the model waits for them.

    Args:
        pool: the page tensors.

    Attributes:
        page_bytes: of a page id.
    """

    def __init__(self, pool: PoolPages) -> None:
        self._pool, self.page_bytes = pool, pool.num_bytes
        self._streams, self._ways = CopyStreams(pool.device), PageWays(pool)
        if pool.device.type == "cuda":
            self._ways.kernel_from = dict.fromkeys(DIRECTIONS, KERNEL_FROM)

    def staging(self, num_rows: int) -> HostPages:
        """New rows, pinned where there is a GPU."""
        return HostPages(num_rows, self.page_bytes, self._pool.device)

    def copy_out(self, pages: np.ndarray, staging: HostPages, rows: np.ndarray) -> None:
        """As of `PageMemory`."""
        self._copy(TO_HOST, pages, staging, rows)

    def copy_in(self, pages: np.ndarray, staging: HostPages, rows: np.ndarray) -> None:
        """As of `PageMemory`."""
        self._copy(TO_DEVICE, pages, staging, rows)

    def _copy(
        self, direction: str, pages: np.ndarray, staging: HostPages, rows: np.ndarray
    ) -> None:
        self._streams.begin(
            direction, lambda: self._ways.copy(direction, pages, staging.rows, rows)
        ).result()
