"""Host memory behind the pool of an engine: what is loaded for which request, and what is stored.

Between two steps, `EngineTiers.advance`::

    copies that have ended      what came is findable; the request is admitted like any other
    waiting requests, in order  where loading is quicker than computing, a load begins, and the
                                request waits for it while others run; at most one for each wait,
                                but for those that fail
    what eviction takes next    is stored, behind what is loaded

A load only prefetches into the prefix cache. What failed in one is dropped where it came from; so
the next load is for the next shorter resume point, and a request goes on with what is there.

A step may run ahead of a load: the request is admitted at once, and each layer waits for its own
page tensor (`quire.models.tiers.streams`). It does where no other request would wait for the
copies, or where they take no longer than the prefill that they hide behind. Where such a copy
fails, the step does: its requests wait again, and what came is forgotten (`Engine._drop_step`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn

from quire.kvcore import KVCache, OutOfPages
from quire.kvcore.tier import Job, Share, Tiers, TierSpec

from ..tiers.copier import FinishedJob, PageCopier
from ..tiers.host_pages import HostPages
from ..tiers.parts import PageParts, page_parts

if TYPE_CHECKING:
    from .config import EngineConfig
    from .memory import MemoryPlan
    from .report import StepReport
    from .request import Request

GIB = 2**30
STORE_BYTES = 256 * 2**20  # of the stores that run at once, about
# Rates until they are measured: bytes a second of the link, and tokens a second of prefill.
LINK = {"cuda": 20e9, "cpu": 4e9}
PREFILL = 5000.0
MOST_LOADS = 4  # for one wait of a request


class EngineTiers:
    """Loads and stores of one engine, which calls it between steps.

    Args:
        kv: the cache.
        tiers: the host behind it.
        copier: of its pool.
        parts: of its pages.

    Attributes:
        tiers: what is where.
        copier: runs the copies.
    """

    def __init__(self, kv: KVCache, tiers: Tiers, copier: PageCopier, parts: PageParts) -> None:
        self._kv, self.tiers, self.copier, self._parts = kv, tiers, copier, parts
        self._loading: dict[Request, Job] = {}  # by the request that waits
        self._tries: dict[Request, int] = {}  # loads of those that wait; MOST_LOADS = no more
        self._loads: dict[Job, Request] = {}  # the request that each was begun for
        self._ended: list[FinishedJob] = []
        # Loads that steps run ahead of: for which request, and what came; those of them that failed.
        self._ahead: dict[Job, tuple[Request, Share | None]] = {}
        self._lost: list[FinishedJob] = []
        self._is_closed, self._now = False, time.monotonic()

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for a load."""
        return bool(self._loading)

    def waits(self, request: Request) -> bool:
        """Whether a request is not to be admitted yet."""
        return request in self._loading

    def forget(self, request: Request) -> None:
        """A request waits no more."""
        self._loading.pop(request, None)
        self._tries.pop(request, None)

    def advance(
        self, waiting: Iterable[Request], room: int, *, is_idle: bool = False
    ) -> list[tuple[Request, Exception]]:
        """End what is copied, and begin loads and stores.

        Args:
            waiting: first come first.
            room: requests that may be admitted.
            is_idle: no request runs.

        Returns:
            Requests whose look-up failed, and how.

        Raises:
            RuntimeError: the engine was closed.
        """
        if self._is_closed:
            raise RuntimeError("expected an engine that is open, got one after its close()")
        self._end(self.copier.poll())
        now = time.monotonic()
        self.tiers.host.rate.relax(max(0.0, now - self._now))
        self._now = now
        failed = []
        for request in list(islice(waiting, max(0, room))):
            if request not in self._loading and self._tries.get(request, 0) < MOST_LOADS:
                try:
                    self._load(request, is_idle)
                except Exception as error:
                    failed.append((request, error))
        storing = sum(job.num_bytes for job in self.tiers.jobs if job.kind == "store")
        if storing < STORE_BYTES:
            for job in self.tiers.stores(STORE_BYTES - storing):
                self.copier.start(job)
        self._end(self.copier.poll())
        self.drop_lost()  # no request was admitted since
        return failed

    def drop_lost(self) -> None:
        """Forget what came with a load that failed after it was counted as done, also where it
        came from. No request that runs may have it."""
        self._end(self.copier.poll())
        lost, self._lost = self._lost, []
        for one in lost:
            self._kv.evict_pages(one.failed)
        self.copier.streams.forget_ended(failed=True)

    def wait(self) -> None:
        """Wait until some copies have ended; `advance` sees to them."""
        self._ended += self.copier.wait()

    def settle(self) -> bool:
        """Wait for all copies, whose pages are held meanwhile; False where there are none."""
        had_jobs = bool(self.tiers.jobs)
        self._end([])
        while self.copier.has_jobs:
            self._end(self.copier.wait())
        return had_jobs

    def observe(self, report: StepReport) -> None:
        """Measure the prefill rate by a step, where it waited for no copies."""
        if self._ahead:
            return
        # A request with drafts, which is no prefill, has at most twice as many tokens.
        others = report.num_decodes + 2 * report.num_drafts
        num_tokens = report.num_tokens - others
        if num_tokens >= max(1, others):
            self.tiers.computed(num_tokens, report.total)

    def space(self) -> tuple[int, int]:
        """Bytes of the host's entries that hold rows, and those that they take; it looks at each
        resume point."""
        parts, counts = self._parts, self.tiers.pages_by_group()
        pages = [n // each for n, each in zip(counts, parts.counts, strict=True)]
        held = sum(n * size for n, size in zip(pages, parts.filled, strict=True))
        return held, sum(counts) * self.tiers.page_bytes

    def close(self) -> None:
        """Wait for copies. A second time it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loading.clear()
        self.settle()

    def _load(self, request: Request, is_idle: bool) -> None:
        look = request.behind = self.tiers.match(request.match.prompt)
        if look.pending is not None:  # of another request with the same prefix
            self._loading[request] = look.pending
            return
        as_is = look.device.num_saved_tokens
        job = self.tiers.load(look) if look.num_saved_tokens != as_is else None
        if isinstance(job, OutOfPages):
            request.behind = replace(look, num_saved_tokens=as_is, limited_by="no-room")
        if not isinstance(job, Job):
            self._tries[request] = MOST_LOADS
            return
        self._tries[request] = self._tries.get(request, 0) + 1
        ahead = self._runs_ahead(job, request, is_idle)
        self.copier.start(job, ahead=ahead)
        if ahead:
            share = self.tiers.done(job)
            _note(request, share)
            self._ahead[job] = request, share
        else:
            self._loading[request] = job
            self._loads[job] = request

    def _runs_ahead(self, job: Job, request: Request, is_idle: bool) -> bool:
        """Whether steps run ahead of a load: no other request waits for its copies, or the prefill
        of what is left of the request takes as long."""
        if is_idle or not job.copies:
            return bool(job.copies)
        host = self.tiers.host
        left = request.match.prompt.num_tokens - job.num_tokens
        return host.queued_bytes <= host.bytes_per_second * self.tiers.prefill_seconds(left)

    def _end(self, ended: list[FinishedJob]) -> None:
        ended, self._ended = [*self._ended, *ended], []
        for one in ended:
            if one.job in self._ahead:
                self._end_ahead(one)
                continue
            maker = self._loads.pop(one.job, None)
            share = self.tiers.done(one.job, one.failed, seconds=one.seconds or None)
            for request in [r for r, job in self._loading.items() if job is one.job]:
                _note(request, share)
                if request is maker and one.error is None:  # others may lack more
                    self._tries[request] = MOST_LOADS
        if ended:
            self._loading = {r: job for r, job in self._loading.items() if job.is_open}

    def _end_ahead(self, one: FinishedJob) -> None:
        """A load has ended that was counted as done: now it is known how."""
        request, share = self._ahead.pop(one.job)
        host = self.tiers.host
        request.loads = [known for known in request.loads if known is not share]
        if one.error is not None:
            host.counters["load_failures"] += 1
            self._lost.append(one)
            return
        _note(request, share and replace(share, seconds=one.seconds))
        if one.seconds:
            host.rate.measured(one.job.num_bytes, one.seconds)


def _note(request: Request, share: Share | None) -> None:
    """Note what a load brought for a request."""
    if share is not None:
        request.loads.append(share)


def make_tiers(
    model: nn.Module, kv: KVCache, pool: Any, memory: MemoryPlan, config: EngineConfig,
    opened: ExitStack,
) -> EngineTiers:  # fmt: skip
    """Make the host tier of a configuration that has one.

    Args:
        pool: whose ``tensors`` are the page tensors, and ``filled`` what pages of each group fill
            of them (`quire.models.tiers.parts`).
        opened: gets what has to be closed if the engine is not made after all.

    Raises:
        NotImplementedError: ``config.tier_dtype`` of pages that have no rows for it.
        ValueError: there is not room for one page.
        MemoryError: there is not so much host memory.
    """
    rows, lossy = None, config.tier_dtype != "auto"
    if lossy and (rows := getattr(pool, "e4m3_rows", None)) is None:
        raise NotImplementedError(
            f"tier_dtype: {config.tier_dtype!r} is supported with full and sliding attention whose "
            f"keys and values are in bf16, fp16 or fp32, got {type(model).__name__} with "
            f"kv_cache_dtype={config.kv_cache_dtype!r}"
        )
    parts = page_parts(memory.groups, pool.tensors, pool.filled, e4m3_rows=rows)
    pages, device = parts.pages, model.device
    size = pages.num_bytes
    if memory.host_bytes < size:
        raise ValueError(
            f"host_cache_gib: expected at least {size / GIB:.3g} (one page of {size} bytes), got "
            f"{memory.host_bytes} bytes"
        )
    num_pages = max(2, memory.host_bytes // size)
    host = HostPages(num_pages, size, device)
    # What a step may take is to be had without a loss.
    blocks = ((g, -(-config.max_num_batched_tokens // g.block_size)) for g in memory.groups)
    step = sum(g.pages_per_block * count for g, count in blocks)
    tiers = Tiers(
        kv,
        host=TierSpec(num_pages, LINK[device.type], lossy=lossy),
        prefill_tokens_per_second=PREFILL,
        page_bytes=size,
        parts=parts.counts,
        watermark=min(memory.num_pages // 2, max(memory.num_pages // 8, step)),
    )
    by_tensor = hasattr(pool, "arrive")
    copier = PageCopier(pages, host, num_tensors=len(pool.tensors) if by_tensor else None)
    opened.callback(copier.close)
    if by_tensor:
        pool.arrive = copier.streams.arrive
    return EngineTiers(kv, tiers, copier, parts)
