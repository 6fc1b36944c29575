"""How pages go between a pool and host memory: by a kernel, or by copy engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from quire.kernels import PoolPages, gather_pages, scatter_pages

from .streams import DIRECTIONS, TO_HOST

PROBED = (1, 4, 16, 64)  # pages
REPEATS = 5
# A kernel takes multiprocessors from the model meanwhile: it has to be that much quicker.
WORTH_IT = 1.25


class PageWays:
    """Copies pages between a pool and rows of host memory, by what is quicker there.

    Args:
        pool: the page tensors.
        num_tensors: of a page of the device, for copies of one of them alone.

    Attributes:
        kernel_from: by direction, pages of one copy from which on the kernel takes it; before
            `probe`, and on a CPU, it never does. Of a pool with ``e4m3_rows`` it takes all, as a
            copy engine converts nothing.
    """

    def __init__(self, pool: PoolPages, num_tensors: int | None = None) -> None:
        self._pool = pool
        self._has_all = num_tensors in (None, pool.num_tensors)
        self._tensors = [self._share_of(i) for i in range(num_tensors or 0)]
        self.kernel_from: dict[str, float] = dict.fromkeys(DIRECTIONS, math.inf)

    def copy(
        self,
        direction: str,
        pages: np.ndarray,
        buffer: Tensor,
        rows: np.ndarray,
        tensor: int | None = None,
    ) -> object:
        """Copies pages on the current stream.

        Args:
            direction: `TO_HOST` or `TO_DEVICE`.
            pages: [n] ids in the pool, as of `PoolPages`.
            buffer: [num_rows, num_bytes] uint8 of the host.
            rows: [n] of it.
            tensor: what this page tensor has of them alone; None = what all have.

        Returns:
            What has to live until it is done.
        """
        by_kernel = len(pages) >= self.kernel_from[direction]
        return self._by(direction, "triton" if by_kernel else "torch", pages, buffer, rows, tensor)

    def _share_of(self, tensor: int) -> PoolPages:
        """What a page tensor of the device has of the pool: a share of each part, or it is in one
        part alone."""
        pool = self._pool
        if self._has_all:
            return replace(pool, tensors=pool.tensors[tensor :: pool.num_tensors])
        return replace(pool, tensors=[pool.tensors[tensor]], num_parts=1)

    def _of_tensor(
        self, tensor: int, ids: np.ndarray, rows: np.ndarray, buffer: Tensor
    ) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """Those of the copies that concern a page tensor of the device, and where it is in rows."""
        part, column = divmod(tensor, self._pool.num_tensors)
        if not self._has_all:
            own = ids % self._pool.num_parts == part
            ids, rows = ids[own] // self._pool.num_parts, rows[own]
        size = self._pool.kept_bytes
        return ids, rows, buffer[:, column * size : (column + 1) * size]

    def _by(
        self,
        direction: str,
        impl: str,
        pages: np.ndarray,
        buffer: Tensor,
        rows: np.ndarray,
        tensor: int | None = None,
    ) -> object:
        pool = self._pool
        if tensor is not None:
            pages, rows, buffer = self._of_tensor(tensor, pages, rows, buffer)
            pool = self._tensors[tensor]
        ids = [torch.from_numpy(x.astype(np.int64)) for x in (pages, rows)]
        if impl == "triton" and self._pool.device.type == "cuda":
            # From pinned memory, or the host would wait for all that the stream waits for.
            ids = [x.pin_memory().to(self._pool.device, non_blocking=True) for x in ids]
        copy = gather_pages if direction == TO_HOST else scatter_pages
        copy(pool, ids[0], buffer, ids[1], impl=impl)
        return ids

    def probe(
        self, buffer: Tensor, synchronize: Callable[[], None] = torch.cuda.synchronize
    ) -> None:
        """Measures on a GPU from how many pages on the kernel is quicker. Nothing is cached yet.

        Args:
            buffer: [num_rows, num_bytes] uint8 of pinned memory, which holds zeros, as all pages do.
            synchronize: waits for the current stream.
        """
        most = min(self._pool.num_ids - 1, len(buffer))
        counts = [n for n in PROBED if n <= most]
        for direction in DIRECTIONS:
            converts = self._pool.e4m3_rows is not None
            self.kernel_from[direction] = 0 if converts else math.inf
            for n in () if converts else reversed(counts):
                pages, rows = np.arange(1, n + 1), np.arange(n)
                seconds = {"triton": math.inf, "torch": math.inf}
                for _ in range(REPEATS):  # by turns; the first compiles
                    for impl in seconds:
                        synchronize()
                        start = perf_counter()
                        self._by(direction, impl, pages, buffer, rows)
                        synchronize()
                        seconds[impl] = min(seconds[impl], perf_counter() - start)
                if seconds["triton"] * WORTH_IT > seconds["torch"]:
                    break
                self.kernel_from[direction] = n
            if self.kernel_from[direction] <= most:  # compiled now, not when a request waits
                first = 0 if self._tensors else None
                self._by(direction, "triton", np.arange(1, 2), buffer, np.arange(1), first)
