"""Load for waiting requests from host memory, and store entries before they are evicted.

`EngineTiers.advance` runs between two steps:

1. End the jobs whose copies have ended. Their requests can be admitted.
2. Begin a load for each waiting request for which loading is quicker than computing. The request
   waits for it while others run; it gets one load per wait.
3. Begin stores.

A load is a prefetch into the prefix cache: if it fails, its request runs with the shorter hit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from quire.kernels import PoolPages
from quire.kvcore import KVCache
from quire.kvcore.tier import Job, Tiers

from ..tiers.copier import Copying, PageCopier
from ..tiers.host_pages import HostPages

if TYPE_CHECKING:
    from .config import EngineConfig
    from .memory import MemoryPlan
    from .request import Request

GIB = 2**30
STORE_BYTES = 256 * 2**20  # approximate limit of the stores under way
# Estimated bytes per second from host memory and tokens per second of prefill. Most loads are far
# quicker than the prefill they save; the exception is a large window that saves few tokens.
RATES = {"cuda": (20e9, 20e3), "cpu": (4e9, 1e3)}


class EngineTiers:
    """Loads and stores of one engine. The stepping thread calls it between steps.

    Args:
        tiers: host tier of the engine's cache.
        copier: copier of the engine's pool.
    """

    def __init__(self, tiers: Tiers, copier: PageCopier) -> None:
        self.tiers, self.copier = tiers, copier
        self._loading: dict[Request, Job] = {}  # waiting request -> its load
        self._settled: set[Request] = set()  # waiting requests without another load to come
        self._ended: list[Copying] = []
        self._is_closed = False

    @property
    def is_loading(self) -> bool:
        """True if any request waits for a load."""
        return bool(self._loading)

    def waits(self, request: Request) -> bool:
        """True if a request must not be admitted yet."""
        return request in self._loading

    def forget(self, request: Request) -> None:
        """Drop a request that no longer waits. Callers hold the engine's lock."""
        self._loading.pop(request, None)
        self._settled.discard(request)

    def advance(self, waiting: Iterable[Request], room: int) -> list[tuple[Request, Exception]]:
        """End jobs, then begin loads and stores.

        Args:
            waiting: waiting requests in order of arrival.
            room: number of requests that may be admitted.

        Returns:
            (request, exception) of each failed look-up.

        Raises:
            RuntimeError: the engine was closed.
        """
        if self._is_closed:
            raise RuntimeError("expected an engine that is open, got one after its close()")
        self._end(self.copier.poll())
        failed = []
        for request in list(islice(waiting, max(0, room))):
            if request not in self._loading and request not in self._settled:
                try:
                    self._look(request)
                except Exception as error:
                    failed.append((request, error))
        storing = sum(job.num_bytes for job in self.tiers.jobs if job.kind == "store")
        if storing < STORE_BYTES:
            for job in self.tiers.stores(STORE_BYTES - storing):
                self.copier.start(job)
        self._end(self.copier.poll())
        return failed

    def _look(self, request: Request) -> None:
        """Look a request up in both places, and begin its load if any."""
        look = request.behind = self.tiers.match(request.match.prompt)
        if look.pending is not None:  # another request's, of the same prefix
            self._loading[request] = look.pending
            return
        self._settled.add(request)
        job = self.tiers.load(look)
        if job is not None:
            self._loading[request] = job
            self.copier.start(job)
        elif look.num_bytes:
            saved = look.device.num_saved_tokens
            request.behind = replace(look, num_saved_tokens=saved, limited_by="no-room")

    def _end(self, ended: list[Copying]) -> None:
        ended, self._ended = [*self._ended, *ended], []
        for copying in ended:
            job = copying.job
            came = self.tiers.done(job, failed=copying.error is not None)
            for request in [r for r, waited in self._loading.items() if waited is job]:
                del self._loading[request]
                if came and request.behind is not None:
                    before = request.behind.device.num_saved_tokens
                    request.num_loaded_tokens += max(0, job.num_tokens - before)

    def wait(self) -> None:
        """Wait until some copies have ended; `advance` ends their jobs."""
        self._ended += self.copier.wait()

    def settle(self) -> bool:
        """Wait for all copies, which hold pages; False if there are none."""
        had_jobs = bool(self.tiers.jobs)
        self._end([])
        while self.copier.has_jobs:
            self._end(self.copier.wait())
        return had_jobs

    def close(self) -> None:
        """Wait for copies. A second time it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loading.clear()
        self.settle()


def make_tiers(
    kv: KVCache, pool: Any, memory: MemoryPlan, config: EngineConfig, device: torch.device
) -> EngineTiers:
    """Make the host tier of an engine with ``host_cache_gib``.

    Args:
        pool: object with the page tensors in ``tensors``.

    Raises:
        ValueError: ``host_cache_gib`` is less than one page.
        MemoryError: not enough free host memory.
    """
    pages = PoolPages(pool.tensors)
    size = pages.num_bytes
    if memory.host_bytes < size:
        raise ValueError(
            f"host_cache_gib: expected at least {size / GIB:.3g} (one page of {size} bytes), got "
            f"{memory.host_bytes} bytes"
        )
    num_pages = max(2, memory.host_bytes // size)
    link, prefill = RATES[device.type]
    # The pages of a whole step should be free or have a copy.
    step = sum(-(-config.max_num_batched_tokens // g.block_size) for g in memory.groups)
    tiers = Tiers(
        kv,
        num_pages=num_pages,
        bytes_per_second=link,
        prefill_tokens_per_second=prefill,
        page_bytes=size,
        watermark=min(memory.num_pages // 2, max(memory.num_pages // 8, step)),
    )
    return EngineTiers(tiers, PageCopier(pages, HostPages(num_pages, size, device)))
