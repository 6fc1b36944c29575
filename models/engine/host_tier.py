"""The host tier of an engine: pages in host memory, their copies, and the choice of both.

Between two steps `HostTier.advance` ends the jobs whose copies have ended. It begins a load for
each waiting request that it serves sooner than a prefill, and stores entries that will be evicted
soon. A request gets one load per wait, and others run meanwhile. A load is a prefetch into the
prefix cache: if it fails, its request runs with the shorter hit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import PoolPages, gather_pages, scatter_pages
from quire.kvcore import KVCache
from quire.kvcore.tier import Job, Tiers

from ..device import page_lock
from .memory import free_memory

if TYPE_CHECKING:
    from .config import EngineConfig
    from .memory import MemoryPlan
    from .request import Request

GIB = 2**30
SYSTEM_PAGE = 4096  # bytes; the driver pins whole pages
STORE_BYTES = 256 * 2**20  # approximate limit of the stores under way
# Bytes per second from host memory and tokens per second of prefill: estimates, not measured.
RATES = {"cuda": (20e9, 20e3), "cpu": (4e9, 1e3)}
DIRECTIONS = {"store": "to_host", "load": "to_device"}


class HostTier:
    """Loads and stores of one engine. The stepping thread calls it between steps.

    Raises:
        ValueError: ``config.host_cache_gib`` is less than one page.
        MemoryError: not enough free host memory.
    """

    def __init__(
        self, kv: KVCache, pool: Any, memory: MemoryPlan, config: EngineConfig, device: torch.device
    ) -> None:
        pages = PoolPages(pool.tensors)
        size = pages.num_bytes
        if memory.host_bytes < size:
            raise ValueError(
                f"host_cache_gib: expected at least {size / GIB:.3g} (one page of {size} bytes), "
                f"got {memory.host_bytes} bytes"
            )
        num_pages = max(2, memory.host_bytes // size)
        link, prefill = RATES[device.type]
        # The pages of a whole step should be free or have a copy.
        step = sum(-(-config.max_num_batched_tokens // g.block_size) for g in memory.groups)
        self.tiers = Tiers(
            kv,
            num_pages=num_pages,
            bytes_per_second=link,
            prefill_tokens_per_second=prefill,
            page_bytes=size,
            watermark=min(memory.num_pages // 2, max(memory.num_pages // 8, step)),
        )
        self.copier = PageCopier(pages, HostPages(num_pages, size, device))
        self._loading: dict[Request, Job] = {}  # waiting request -> its load
        self._settled: set[Request] = set()  # waiting requests without another load to come

    @property
    def is_loading(self) -> bool:
        """True if any request waits for a load."""
        return bool(self._loading)

    def waits(self, request: Request) -> bool:
        """True if a request must not be admitted yet."""
        return request in self._loading

    def forget(self, request: Request) -> None:
        """Drop a request that no longer waits."""
        self._loading.pop(request, None)
        self._settled.discard(request)

    def advance(
        self,
        waiting: Iterable[Request],
        num_admissible: int,
        fail: Callable[[Request, Exception], None],
    ) -> None:
        """End jobs, then begin loads and stores.

        Args:
            waiting: waiting requests, the next one first.
            num_admissible: requests that may be admitted now.
            fail: called for each request whose look-up fails.
        """
        self._end(self.copier.poll())
        for request in list(islice(waiting, max(0, num_admissible))):
            known = request in self._loading or request in self._settled
            if not known and request.max_hit is None:
                try:
                    self._look_up(request)
                except Exception as error:
                    fail(request, error)
        storing = sum(job.num_bytes for job in self.tiers.jobs if job.kind == "store")
        if storing < STORE_BYTES:
            for job in self.tiers.stores(STORE_BYTES - storing):
                self.copier.start(job)
        self._end(self.copier.poll())

    def _look_up(self, request: Request) -> None:
        match = request.host_match = self.tiers.match(request.match.prompt)
        if match.pending is not None:  # another request's, of the same prefix
            self._loading[request] = match.pending
            return
        self._settled.add(request)
        job = self.tiers.load(match)
        if job is not None:
            self._loading[request] = job
            self.copier.start(job)
        elif match.num_bytes:
            saved = match.device.num_saved_tokens
            request.host_match = replace(match, num_saved_tokens=saved, limited_by="no-room")

    def _end(self, ended: list[Copying]) -> None:
        for copying in ended:
            job = copying.job
            came = self.tiers.done(job, failed=copying.error is not None)
            for request in [r for r, waited in self._loading.items() if waited is job]:
                del self._loading[request]
                if came and request.host_match is not None:
                    before = request.host_match.device.num_saved_tokens
                    request.num_loaded_tokens += max(0, job.num_tokens - before)

    def wait(self) -> None:
        """Wait until some copies have ended."""
        self._end(self.copier.wait())

    def settle(self) -> bool:
        """Wait for all copies, which hold pages; False if there are none."""
        had_jobs = bool(self.tiers.jobs)
        while self.copier.has_jobs:
            self._end(self.copier.wait())
        return had_jobs

    def close(self) -> None:
        """Wait for copies."""
        self._loading.clear()
        self.settle()


@dataclass(eq=False)
class Copying:
    """A job under way."""

    job: Job
    event: Any = None  # recorded after the copies; None on a CPU, or if they did not begin
    keep: Any = None  # tensors that the copies need
    error: Exception | None = None


class PageCopier:
    """Copy the pages of jobs beside the model.

    A GPU has one stream for each direction. A copy waits for the work that the model's stream has
    at that time. The model never waits: until the host sees the end of a job, its pages are free or
    only read. On a CPU a job has ended when `start` returns.

    Attributes:
        num_bytes: bytes copied since the start, by direction.
    """

    def __init__(self, pool: PoolPages, host: HostPages) -> None:
        self._pool, self._host = pool, host
        on_gpu = pool.device.type == "cuda"
        self._streams = {d: torch.cuda.Stream(pool.device) for d in DIRECTIONS.values() if on_gpu}
        self._running: list[Copying] = []
        self.num_bytes = dict.fromkeys(DIRECTIONS.values(), 0)
        for direction in self._streams:  # compile now, not while a request waits
            self._copy(direction, np.zeros(1), np.zeros(1))

    @property
    def has_jobs(self) -> bool:
        """True if any job has not ended."""
        return bool(self._running)

    def start(self, job: Job) -> None:
        """Begin the copies of a job."""
        copying, direction = Copying(job), DIRECTIONS[job.kind]
        pages, rows = job.sources, job.targets
        if job.kind == "load":
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
        ids = [torch.from_numpy(x.astype(np.int64)) for x in (pages, rows)]
        if self._streams:  # from pinned memory: otherwise the host waits for the stream
            ids = [x.pin_memory().to(self._pool.device, non_blocking=True) for x in ids]
        copy = gather_pages if direction == "to_host" else scatter_pages
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


class HostPages:
    """Pages in host memory, pinned for a GPU: rows [num_pages, page_bytes] uint8, zeros at first.

    Raises:
        MemoryError: not enough free memory; errors of `page_lock`.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        num_bytes = num_pages * page_bytes
        if sys.platform == "linux" and num_bytes > (free := free_memory(torch.device("cpu"))):
            raise MemoryError(
                f"expected host memory for {num_pages} pages of {page_bytes} bytes, "
                f"{num_bytes / GIB:.4g} GiB, and {free / GIB:.4g} GiB are free"
            )
        memory = torch.zeros(num_bytes + SYSTEM_PAGE, dtype=torch.uint8)
        # By numpy, a storage that begins there: `Tensor.is_pinned` asks for the storage's address.
        start = -memory.data_ptr() % SYSTEM_PAGE
        whole = torch.from_numpy(memory.numpy()[start:][:num_bytes])
        self.rows = whole.view(num_pages, page_bytes)
        if device.type == "cuda":
            with torch.cuda.device(device):
                page_lock(whole, self)
