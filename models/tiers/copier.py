"""Copy the pages of host-tier jobs beside the model.

A GPU has one stream for each direction, as the link moves both at once. One kernel launch copies
all pages of a job. It waits for the work that the model's stream has at that time: a running step
may still read pages that a load fills, and it writes pages that a store copies. The model never
waits: until the host sees the end of a job, its pages are free or only read.

On a CPU a job has ended when `PageCopier.start` returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import PoolPages, gather_pages, scatter_pages

from .host_pages import HostPages

if TYPE_CHECKING:
    from quire.kvcore.tier import Job

TO_HOST, TO_DEVICE = "to_host", "to_device"
DIRECTIONS = {"store": TO_HOST, "load": TO_DEVICE}


@dataclass(eq=False)
class Copying:
    """A job under way.

    Attributes:
        event: recorded after the copies; None on a CPU, or if they did not begin.
        keep: tensors that the copies need.
        error: exception of the copies; None = all pages were copied.
    """

    job: Job
    event: Any = None
    keep: Any = None
    error: Exception | None = None


class PageCopier:
    """Copy the pages of several jobs at a time. One thread calls it.

    Args:
        pool: page tensors of the device.
        host: host pages; a row holds one page of all tensors.

    Attributes:
        num_bytes: bytes copied since the start, by direction.
    """

    def __init__(self, pool: PoolPages, host: HostPages) -> None:
        self._pool, self._host = pool, host
        on_gpu = pool.device.type == "cuda"
        self._streams = {d: torch.cuda.Stream(pool.device) for d in DIRECTIONS.values() if on_gpu}
        self._running: list[Copying] = []
        self.num_bytes = {TO_HOST: 0, TO_DEVICE: 0}
        for direction in self._streams:  # compile now, not while a request waits
            self._copy(direction, np.zeros(1), np.zeros(1))

    @property
    def addresses(self) -> Tensor:
        """A tensor on the device of the pool."""
        return self._pool.addresses

    @property
    def has_jobs(self) -> bool:
        """True if any job has not ended."""
        return bool(self._running)

    def start(self, job: Job) -> None:
        """Begin the copies of a job."""
        copying, direction = Copying(job), DIRECTIONS[job.kind]
        pages, rows = job.sources, job.targets
        if direction == TO_DEVICE:
            pages, rows = rows, pages
        try:
            if not self._streams:
                self._copy(direction, pages, rows)
            else:
                stream = self._streams[direction]
                stream.wait_stream(torch.cuda.current_stream(self._pool.device))
                with torch.cuda.stream(stream):
                    copying.keep = self._copy(direction, pages, rows)
                    copying.event = stream.record_event()
        except Exception as error:
            copying.error = error
        self._running.append(copying)

    def _copy(self, direction: str, pages: np.ndarray, rows: np.ndarray) -> list[Tensor]:
        """Copy pool pages to or from host rows; return the tensors that the copies need."""
        ids = [torch.from_numpy(x.astype(np.int64)) for x in (pages, rows)]
        if self._streams:  # from pinned memory: otherwise the host waits for the stream
            ids = [x.pin_memory().to(self._pool.device, non_blocking=True) for x in ids]
        copy = gather_pages if direction == TO_HOST else scatter_pages
        copy(self._pool, ids[0], self._host.rows, ids[1])
        return ids

    def poll(self) -> list[Copying]:
        """Jobs that ended since the last call."""
        ended = [c for c in self._running if c.event is None or c.event.query()]
        self._running = [c for c in self._running if c not in ended]
        for copying in ended:
            if copying.error is None:
                self.num_bytes[DIRECTIONS[copying.job.kind]] += copying.job.num_bytes
        return ended

    def wait(self) -> list[Copying]:
        """Wait until a job has ended; return at once if none runs."""
        if self._running and self._running[0].event is not None:
            self._running[0].event.synchronize()
        return self.poll()
