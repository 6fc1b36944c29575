"""Host memory and disk behind the pool of an engine: what is loaded for whom, and what is stored.

Between two steps, `EngineTiers.advance`::

    copies that have ended      what came is findable; whom it was for is admitted like any other
    waiting requests, in order  where loading is quicker than computing, a load begins, and the
                                request waits for it while others run; at most one for each wait,
                                but for those that fail
    what eviction takes next    is stored, behind what is loaded

A load only prefetches into the prefix cache. What failed in one is dropped where it came from; so
the next load is for the next shorter resume point, and a request goes on with what is there.

A step may run ahead of a load from host memory: the request is admitted at once, and each layer
waits for its own page tensor (`quire.models.tiers.streams`). It does where nobody else would wait
for the copies, or where they take no longer than the prefill that they hide behind. What a disk
brings is checked first, page by page, so nothing runs ahead of that. Where such a copy fails, the
step does: its requests wait again, and what came is forgotten (`TierCalls._drop_step`).

What a folder holds is of use to the same weights in the same pages only
(`quire.models.engine.layout`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from quire.kvcore import KVCache, OutOfPages
from quire.kvcore.tier import Answer, Job, Share, Tiers, TierSpec
from quire.kvcore.tier.disk import DiskStore
from quire.kvcore.tier.hints import Intent
from quire.kvcore.tier.pagefile import DIRECT_BLOCKS, stride_of

from ..tiers.copier import FinishedJob, PageCopier
from ..tiers.host_pages import HostPages, row_stride
from ..tiers.parts import PageParts, page_parts
from .layout import layout

if TYPE_CHECKING:
    from .config import EngineConfig
    from .memory import MemoryPlan
    from .report import StepReport
    from .request import Request

GIB = 2**30
STORE_BYTES = 256 * 2**20  # of the stores into one tier that run at once, about
# Rates until they are measured: bytes a second of the links, and tokens a second of prefill.
LINK = {"cuda": 20e9, "cpu": 4e9}
DISK_LINK = 1e9
PREFILL = 5000.0
MOST_LOADS = 4  # for one wait of a request
MOST_EMPTY = 4  # calls in a row that find nothing to store, at the end


class EngineTiers:
    """Loads and stores of one engine, which calls it between steps.

    Args:
        kv: the cache. tiers: of it.
        copier: of its pool.
        parts: of its pages.
        sizes: bytes that a page of each tier takes there.
        disk: closed with it.

    Attributes:
        tiers: what is where.
        copier: who copies it.
    """

    def __init__(
        self,
        kv: KVCache,
        tiers: Tiers,
        copier: PageCopier,
        parts: PageParts,
        sizes: dict[str, int],
        disk: DiskStore | None = None,
    ) -> None:
        self._kv, self.tiers, self.copier, self._disk = kv, tiers, copier, disk
        self._parts, self._sizes = parts, sizes
        self._loading: dict[Request, Job] = {}  # by who waits for it
        self._tries: dict[Request, int] = {}  # loads of those that wait; MOST_LOADS = no more
        self._loads: dict[Job, Request] = {}  # for whom they were begun
        self._ended: list[FinishedJob] = []
        # Loads that steps run ahead of: for whom, and what came; those of them that failed.
        self._ahead: dict[Job, tuple[Request, tuple[Share, ...]]] = {}
        self._lost: list[FinishedJob] = []
        self._is_closed, self._now = False, time.monotonic()
        self._retains = False  # whether anything ever was to be kept for a time

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
        """Ends what is copied, and begins loads and stores.

        Args:
            waiting: first come first.
            room: requests that may be admitted.
            is_idle: no request runs.

        Returns:
            Requests whose look-up failed, and how.

        Raises:
            RuntimeError: the engine was closed.
        """
        self._expect_open()
        self._end(self.copier.poll())
        now = time.monotonic()
        for tier in self.tiers.tiers:
            tier.rate.relax(max(0.0, now - self._now))
        self._now = now
        if self._retains:
            self._kv.expire_pins(now)
        wanted = set(self._loading.values())
        for job in self._loads.keys() - wanted:  # nobody waits for what has not begun
            self.copier.cancel(job)
        failed = []
        for request in list(islice(waiting, max(0, room))):
            if request not in self._loading and self._tries.get(request, 0) < MOST_LOADS:
                try:
                    self._load(request, is_idle)
                except Exception as error:
                    failed.append((request, error))
        room = dict.fromkeys((tier.name for tier in self.tiers.tiers), STORE_BYTES)
        for job in self.tiers.jobs:
            if job.kind == "store" and job.copies:
                room[job.copies[0].target] -= job.num_bytes
        self._store({name: max(0, n) for name, n in room.items()})
        self._end(self.copier.poll())
        self.drop_lost()  # nobody was admitted since
        return failed

    def drop_lost(self) -> None:
        """What came with a load that failed after it was counted as done is found no more, nor is
        it where it came from. No request that runs may have it."""
        self._end(self.copier.poll())
        lost, self._lost = self._lost, []
        for one in lost:
            self._kv.evict_pages(np.array(one.failed))
        self.copier.streams.forget_ended(failed=True)

    def hint(
        self, prompt: np.ndarray, intent: Intent, *, salt: bytes, now: float, **options: Any
    ) -> Answer:
        """As `quire.kvcore.tier.Tiers.hint`; what is to be loaded begins to be."""
        self._expect_open()
        self._end(self.copier.poll())
        answer = self.tiers.hint(self.tiers.match(prompt, salt=salt), intent, now=now, **options)
        self._retains |= intent == "retain"
        self._loads.pop(answer.job, None)  # it is wanted, whoever goes away
        if answer.job is not None and not self.copier.has(answer.job):
            self.copier.start(answer.job)
        return answer

    def wait(self) -> None:
        """Waits until some copies have ended; `advance` sees to them."""
        self._ended += self.copier.wait()

    def settle(self) -> bool:
        """Waits for all copies, whose pages are held meanwhile; False where there are none."""
        had_jobs = bool(self.tiers.jobs)
        self._end([])
        while self.copier.has_jobs:
            self._end(self.copier.wait())
        return had_jobs

    def observe(self, report: StepReport) -> None:
        """A step was measured: what prefill takes, where it waited for no copies."""
        if self._ahead:
            return
        # A request with drafts, which is no prefill, has at most twice as many tokens.
        others = report.num_decodes + 2 * report.num_drafts
        num_tokens = report.num_tokens - others
        if num_tokens >= max(1, others):
            self.tiers.computed(num_tokens, report.total)

    def space(self) -> dict[str, tuple[int, int]]:
        """Of each tier, the bytes of its entries that hold rows, and those that they take; it looks
        at each resume point."""
        parts, found = self._parts, {}
        for name, counts in self.tiers.pages_by_group().items():
            pages = [n // each for n, each in zip(counts, parts.counts, strict=True)]
            held = sum(n * size for n, size in zip(pages, parts.filled, strict=True))
            found[name] = held, sum(counts) * self._sizes[name]
        return found

    def store_everything(self) -> None:
        """Writes what the pool and host memory hold behind them, as far as it has room."""
        self.settle()
        self.drop_lost()
        # Of what is more than there is room for, each is written once at most; what the last tier
        # gets passes all of them.
        left = sum(n * tier.index.pool.num_pages for n, tier in enumerate(self.tiers.tiers, 1))
        num_empty = 0  # what failed is not in the next call, but in one of those after it
        while left > 0 and num_empty < MOST_EMPTY:
            jobs = self._store(STORE_BYTES, everything=True)
            num_empty = 0 if jobs else num_empty + 1
            left -= sum(job.num_pages for job in jobs)
            self.settle()

    def close(self) -> None:
        """Waits for copies; has the disk hold what was cached, and closes it, whatever fails. A
        second time it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loading.clear()
        with ExitStack() as closed:
            if self._disk is not None:
                closed.callback(self._disk.close)
            closed.callback(self.copier.close)
            self.settle()
            if self._disk is not None:  # which outlives the process
                self.store_everything()

    def _expect_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("expected an engine that is open, got one after its close()")

    def _load(self, request: Request, is_idle: bool) -> None:
        look = request.behind = self.tiers.match(request.match.prompt)
        if look.pending is not None:  # of somebody with the same prefix
            self._loading[request] = look.pending
            return
        as_is = look.device.num_saved_tokens
        job = self.tiers.load(look) if look.num_saved_tokens != as_is else None
        if isinstance(job, OutOfPages):
            request.behind = replace(look, num_saved_tokens=as_is, limited_by="no-room")
        if not isinstance(job, Job):
            self._tries[request] = MOST_LOADS
        else:
            self._tries[request] = self._tries.get(request, 0) + 1
            ahead = self.copier.can_run_ahead(job) and (is_idle or self._is_hidden(job, request))
            self.copier.start(job, ahead=ahead)
            if ahead:
                shares = self.tiers.done(job)
                request.loads += shares
                self._ahead[job] = request, shares
            else:
                self._loading[request] = job
                self._loads[job] = request

    def _is_hidden(self, job: Job, request: Request) -> bool:
        """Whether the prefill of what is left of a request takes as long as its load."""
        host = self.tiers.tiers[0]
        left = request.match.prompt.num_tokens - job.num_tokens
        return host.queued_bytes <= host.bytes_per_second * self.tiers.prefill_seconds(left)

    def _store(self, max_bytes: int | dict[str, int], everything: bool = False) -> list[Job]:
        jobs = self.tiers.stores(max_bytes, everything=everything)
        for job in jobs:
            self.copier.start(job)
        return jobs

    def _end(self, ended: list[FinishedJob]) -> None:
        ended, self._ended = [*self._ended, *ended], []
        for one in ended:
            if one.job in self._ahead:
                self._end_ahead(one)
                continue
            maker = self._loads.pop(one.job, None)
            seconds = one.seconds or None
            shares = self.tiers.done(one.job, one.failed, missing=one.missing, seconds=seconds)
            for request in [r for r, job in self._loading.items() if job is one.job]:
                request.loads += shares
                if request is maker and not one.failed:  # others may lack more
                    self._tries[request] = MOST_LOADS
        if ended:
            self._loading = {r: job for r, job in self._loading.items() if job.is_open}

    def _end_ahead(self, one: FinishedJob) -> None:
        """A load has ended that was counted as done: now it is known how."""
        request, shares = self._ahead.pop(one.job)
        host = self.tiers.tiers[0]
        request.loads = [share for share in request.loads if share not in shares]
        if one.failed:
            host.counters["load_failures"] += 1
            self._lost.append(one)
            return
        request.loads += [replace(share, seconds=one.seconds) for share in shares]
        if one.seconds:
            host.rate.measured(one.job.num_bytes, one.seconds)


def make_tiers(
    model: nn.Module, kv: KVCache, pool: Any, memory: MemoryPlan, config: EngineConfig,
    opened: ExitStack,
) -> EngineTiers:  # fmt: skip
    """The tiers of a configuration that has some.

    Args:
        pool: whose ``tensors`` are the page tensors, and ``filled`` what pages of each group fill
            of them (`quire.models.tiers.parts`).
        opened: gets what has to be closed if the engine is not made after all.

    Raises:
        NotImplementedError: ``config.tier_dtype`` of pages that have no rows for it.
        ValueError: there is not room for one page.
        MemoryError: there is not so much host memory.
        OSError: the folder is of no use; of another layout, or in use
            (`quire.kvcore.tier.disk`).
    """
    on_disk = config.disk_cache is not None
    rows, lossy = None, config.tier_dtype != "auto"
    if lossy and (rows := getattr(pool, "e4m3_rows", None)) is None:
        raise NotImplementedError(
            f"tier_dtype: {config.tier_dtype!r} is supported with full and sliding attention whose "
            f"keys and values are in bf16, fp16 or fp32, got {type(model).__name__} with "
            f"kv_cache_dtype={config.kv_cache_dtype!r}"
        )
    parts = page_parts(memory.groups, pool.tensors, pool.filled, on_disk=on_disk, e4m3_rows=rows)
    pages, device = parts.pages, model.device
    host = disk = None
    specs: dict[str, TierSpec] = {}
    sizes: dict[str, int] = {}
    if config.host_cache_gib is not None:
        sizes["host"] = row_stride(pages.num_bytes)
        _expect_a_page("host_cache_gib", memory.host_bytes, sizes["host"])
        num_pages = max(2, memory.host_bytes // sizes["host"])
        host = HostPages(num_pages, pages.num_bytes, device)
        specs["host"] = TierSpec(num_pages, LINK[device.type], lossy=lossy)
    if config.disk_cache is not None:
        _expect_a_page(
            "disk_cache_gib", memory.disk_bytes, stride_of(pages.num_bytes, DIRECT_BLOCKS[-1])
        )
        disk = DiskStore(
            config.disk_cache,
            page_bytes=pages.num_bytes,
            capacity=memory.disk_bytes,
            layout=layout(model, memory, config)
            | {"tier_dtype": config.tier_dtype, "parts": repr(parts.shape)},
        )
        opened.callback(disk.close)
        specs["disk"] = TierSpec(disk.num_pages, DISK_LINK, journal=disk, lossy=lossy)
        sizes["disk"] = disk.stride
    # What a step may take is to be had without a loss.
    blocks = ((g, -(-config.max_num_batched_tokens // g.block_size)) for g in memory.groups)
    step = sum(g.pages_per_block * count for g, count in blocks)
    tiers = Tiers(
        kv,
        **specs,
        prefill_tokens_per_second=PREFILL,
        page_bytes=pages.num_bytes,
        parts=parts.counts,
        watermark=min(memory.num_pages // 2, max(memory.num_pages // 8, step)),
        max_hint_bytes=None if config.max_hint_gib is None else int(config.max_hint_gib * GIB),
    )
    by_tensor = hasattr(pool, "arrive")
    num_tensors = len(pool.tensors) if by_tensor else None
    copier = PageCopier(pages, host=host, disk=disk, num_tensors=num_tensors)
    opened.callback(copier.close)
    if by_tensor:
        pool.arrive = copier.streams.arrive
    return EngineTiers(kv, tiers, copier, parts, sizes, disk)


def _expect_a_page(name: str, num_bytes: int, needed: int) -> None:
    """Raises ValueError unless a setting gives a tier room for a page."""
    if num_bytes < needed:
        raise ValueError(
            f"{name}: expected at least {needed / GIB:.3g} (one page of {needed} bytes), got "
            f"{num_bytes} bytes"
        )
