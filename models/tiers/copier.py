"""Run the jobs of the host tier: pages between a pool and host memory, one copy of a stream a job.

Nothing waits but `PageCopier.wait`. On a CPU copies run in the order of calls, those that a step
runs ahead of when it reads their pages.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.kernels import PoolPages

from .host_pages import HostPages
from .streams import TO_DEVICE, TO_HOST, Copying, CopyStreams
from .ways import PageWays

if TYPE_CHECKING:
    from quire.kvcore.tier import Job


@dataclass(frozen=True)
class FinishedJob:
    """A job whose copies have ended.

    Attributes:
        error: raised by the copies; None = all pages came. Otherwise none counts as copied.
        seconds: of the copies, without the time that they waited.
    """

    job: Job
    error: Exception | None
    seconds: float

    @property
    def failed(self) -> np.ndarray:
        """[n] target pages whose copies failed."""
        none = np.empty(0, dtype=np.int32)
        if self.error is None:
            return none
        return np.concatenate([none, *(c.targets for c in self.job.copies)])


class PageCopier:
    """Copies pages for jobs, several at a time. One thread calls it.

    Args:
        pool: the page tensors of the device; a page of the host has the bytes of one id of them.
        host: pages in host memory.
        num_tensors: tensors of a page of the device, where copies that steps run ahead of come
            tensor by tensor; None = all at once.

    Attributes:
        streams: of the copies.
        num_bytes: moved since the start, by direction (`TO_HOST`, `TO_DEVICE`).
    """

    def __init__(self, pool: PoolPages, host: HostPages, *, num_tensors: int | None = None) -> None:
        self._pool, self._host = pool, host
        self.streams, self._ways = CopyStreams(pool.device), PageWays(pool, num_tensors)
        self._ahead_tensors = [None] if num_tensors is None else [*range(num_tensors)]
        self._running: list[tuple[Job, Copying]] = []
        self.num_bytes = {TO_HOST: 0, TO_DEVICE: 0}
        if pool.device.type == "cuda":
            with torch.cuda.device_of(pool.addresses):
                self._ways.probe(host.rows)

    @property
    def addresses(self) -> Tensor:
        """On the device of the pool."""
        return self._pool.addresses

    @property
    def has_jobs(self) -> bool:
        """Whether any job has not ended."""
        return bool(self._running)

    def start(self, job: Job, *, ahead: bool = False) -> None:
        """Begin the copies of a job, behind those of the jobs before it.

        Args:
            ahead: of a load: its pages may be used from now on, by work that comes behind
                `streams`.
        """
        direction = TO_HOST if job.kind == "store" else TO_DEVICE
        sources, targets, parts = (
            np.concatenate([np.empty(0, dtype=np.int32), *(getattr(c, name) for c in job.copies)])
            for name in ("sources", "targets", "parts")
        )
        pages, rows = (sources, targets) if job.kind == "store" else (targets, sources)
        ids = pages.astype(np.int64) * self._pool.num_parts + parts
        copy = partial(self._ways.copy, direction, ids, self._host.rows, rows)
        try:
            if ahead:
                # A model's layers need the tensors in turn, each in the pages of all groups.
                copying = self.streams.begin_ahead([partial(copy, t) for t in self._ahead_tensors])
            else:
                copying = self.streams.begin(direction, copy)
        except Exception as error:
            copying = Copying([])
            copying.error = error
        self._running.append((job, copying))

    def poll(self) -> list[FinishedJob]:
        """The jobs that have ended since the last call."""
        ended = [one for one in self._running if one[1].done()]
        self._running = [one for one in self._running if one not in ended]
        self.streams.forget_ended()
        return [self._end(*one) for one in ended]

    def wait(self) -> list[FinishedJob]:
        """Wait until a job has ended; none where none runs."""
        if self._running:
            with suppress(Exception):  # `poll` sees it
                self._running[0][1].result()
        return self.poll()

    def close(self) -> None:
        """Wait for all copies."""
        while self._running:
            self.wait()

    def _end(self, job: Job, copying: Copying) -> FinishedJob:
        try:
            copying.result()
        except Exception as error:
            return FinishedJob(job, error, 0.0)
        direction = TO_HOST if job.kind == "store" else TO_DEVICE
        self.num_bytes[direction] += sum(map(len, job.copies)) * self._pool.num_bytes
        return FinishedJob(job, None, copying.seconds)
