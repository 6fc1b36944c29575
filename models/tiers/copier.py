"""Runs the jobs of tiers: pages between a pool, host memory and a disk.

    device <-> host     one copy of a stream
    host <-> disk       one call of the store, whose threads move the rows themselves
    device <-> disk     both, over rows of a small buffer

Nothing waits but `PageCopier.wait`: `PageCopier.poll`, between two steps, takes each copy one stage
further where the stage before has ended. On a CPU copies between device and host run in the order
of calls, those that a step runs ahead of when it reads their pages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import PoolPages

from .host_pages import HostPages
from .streams import TO_DEVICE, TO_HOST, CopyStreams, Pending
from .ways import PageWays

if TYPE_CHECKING:
    from quire.kvcore.tier import Copies, DiskStore, Job

DEVICE, HOST, DISK = "device", "host", "disk"
STAGING_BYTES = 128 * 2**20
PARTS_AT_ONCE = 4  # that these are enough for


@dataclass(frozen=True)
class FinishedJob:
    """A job whose copies have all ended.

    Attributes:
        failed: pages of the target whose copies failed.
        missing: those whose copies were never begun, as the job was cancelled.
        errors: what was raised, each once.
        seconds: that the copies themselves took, without what they waited for.
    """

    job: Job
    failed: tuple[int, ...]
    missing: tuple[int, ...]
    errors: tuple[BaseException, ...]
    seconds: float


@dataclass(eq=False)
class _Running:
    """A job that runs.

    Attributes:
        parts: copies that are not begun.
        is_ahead: whether its pages are in use already.
        open: number of those that are begun and not ended.
        seconds: of copies between device and host.
        span: from when to when the disk moved its pages.
    """

    job: Job
    parts: deque[Copies]
    is_ahead: bool = False
    open: int = 0
    seconds: float = 0.0
    span: list[float] = field(default_factory=lambda: [math.inf, -math.inf])
    failed: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


@dataclass(eq=False)
class _Part:
    """Copies under way: the stages that follow, and what the one before waits for."""

    running: _Running
    stages: Generator[Pending, None, None]
    pending: Pending | None
    rows: np.ndarray


class PageCopier:
    """Copies pages for jobs, several at a time. One thread calls it.

    Args:
        pool: the page tensors of the device; a page of a tier has what is behind one id of them.
        host: pages of the tier "host", if there is one.
        disk: pages of the tier "disk".
        num_tensors: copies that steps run ahead of come tensor by tensor, of so many that a page
            of the device has; None = all at once.

    Attributes:
        streams: of copies between device and host.
        num_bytes: moved since the start, by (source, target).
    """

    def __init__(
        self,
        pool: PoolPages,
        *,
        host: HostPages | None = None,
        disk: DiskStore | None = None,
        num_tensors: int | None = None,
    ) -> None:
        self._pool, self._host, self._disk = pool, host, disk
        self.streams, self._ways = CopyStreams(pool.device), PageWays(pool, num_tensors)
        self._ahead_tensors = [None] if num_tensors is None else [*range(num_tensors)]
        self._staging: HostPages | None = None
        if disk is not None:
            num_rows = max(1, min(STAGING_BYTES // pool.num_bytes, pool.num_ids))
            self._staging = HostPages(num_rows, pool.num_bytes, pool.device)
        self._free = np.arange(0 if self._staging is None else len(self._staging.rows))
        self._running: list[_Running] = []
        self._parts: list[_Part] = []
        self.num_bytes: dict[tuple[str, str], int] = {}
        some = self._staging or host
        if pool.device.type == "cuda" and some is not None:
            with torch.cuda.device_of(pool.addresses):
                self._ways.probe(some.rows)

    @property
    def addresses(self) -> Tensor:
        """On the device of the pool."""
        return self._pool.addresses

    def has(self, job: Job) -> bool:
        """Whether a job was started and has not ended."""
        return any(running.job is job for running in self._running)

    @property
    def has_jobs(self) -> bool:
        """Whether any job has not ended."""
        return bool(self._running)

    def start(self, job: Job, *, ahead: bool = False) -> None:
        """Begins to copy what a job says, behind the jobs before it.

        Args:
            ahead: of a job that `can_run_ahead`: its pages may be used from now on, by whoever
                comes behind `streams`.
        """
        parts = deque(part for copies in job.copies for part in self._cut(copies))
        if ahead:
            # A model's layers need the tensors in turn, each of them in the pages of all groups.
            names = ("sources", "targets", "parts")
            whole = {x: np.concatenate([getattr(c, x) for c in parts]) for x in names}
            parts = deque([replace(parts[0], **whole)])
        self._running.append(_Running(job, parts, is_ahead=ahead))
        self._begin()

    def can_run_ahead(self, job: Job) -> bool:
        """Whether all of a job is given to the stream at once. What a disk brings is checked first,
        page by page."""
        return bool(job.copies) and all((c.source, c.target) == (HOST, DEVICE) for c in job.copies)

    def cancel(self, job: Job) -> None:
        """Copies of a job that are not begun will not be: their pages are missing."""
        for running in self._running:
            if running.job is job:
                for part in running.parts:
                    running.missing += part.targets.tolist()
                running.parts.clear()

    def poll(self) -> list[FinishedJob]:
        """Begins what can begin; returns the jobs that have ended since the last call."""
        for part in list(self._parts):
            if part.pending.done():
                self._advance(part)
        self._begin()
        self.streams.forget_ended()
        ended = [running for running in self._running if not running.parts and not running.open]
        self._running = [running for running in self._running if running not in ended]
        return [
            FinishedJob(
                one.job,
                tuple(one.failed),
                tuple(one.missing),
                tuple(one.errors),
                one.seconds + max(0.0, one.span[1] - one.span[0]),
            )
            for one in ended
        ]

    def wait(self) -> list[FinishedJob]:
        """Waits until a job has ended; none where none runs."""
        ended = self.poll()
        while not ended and self._parts:
            part = self._parts[0]
            with suppress(Exception):  # its next stage sees it
                part.pending.result()
            ended = self.poll()
        return ended

    def close(self) -> None:
        """Waits for what is under way, and begins nothing more; the disk is its owner's to close."""
        for running in self._running:
            self.cancel(running.job)
        while self._running:
            self.wait()

    def _cut(self, copies: Copies) -> list[Copies]:
        """Copies in parts that the staging rows are enough for, where they go over these."""
        size = len(copies)
        if {copies.source, copies.target} == {DEVICE, DISK}:
            size = max(1, len(self._staging.rows) // PARTS_AT_ONCE)
        return [copies[i : i + size] for i in range(0, len(copies), size)]

    def _begin(self) -> None:
        """Begins what there are staging rows for."""
        for running in self._running:
            while running.parts:
                part = running.parts[0]
                staged = len(part) if {part.source, part.target} == {DEVICE, DISK} else 0
                if staged > len(self._free):
                    break
                running.parts.popleft()
                rows, self._free = self._free[:staged], self._free[staged:]
                running.open += 1
                begun = _Part(running, self._stages(running, part, rows), None, rows)
                self._parts.append(begun)
                self._advance(begun)

    def _advance(self, part: _Part) -> None:
        """Takes a part through its stages, up to one that has not ended."""
        try:
            part.pending = next(part.stages)
            while part.pending.done():
                part.pending = next(part.stages)
        except StopIteration:
            part.running.open -= 1
            self._parts.remove(part)
            self._free = np.concatenate([self._free, part.rows])

    def _stages(
        self, running: _Running, copies: Copies, rows: np.ndarray
    ) -> Generator[Pending, None, None]:
        """The stages of a part; what fails in one of them fails there and goes no further."""
        sources, targets, parts = copies.sources, copies.targets, copies.parts
        source, target = copies.source, copies.target
        try:
            if source == DISK:
                to, into = (self._host, targets) if target == HOST else (self._staging, rows)
                reading = _timed(running, self._disk.read(sources, to.arrays(into)))
                yield reading
                good = _good(reading, sources)
                running.failed += targets[~good].tolist()
                running.errors += [] if good.all() else [reading.exception()]
                sources, targets, rows = sources[good], targets[good], rows[good[: len(rows)]]
                if target == DEVICE and len(targets):
                    ids = self._ids(targets, parts[good])
                    yield from self._copy(running, TO_DEVICE, ids, self._staging, rows)
            elif target == DISK:
                of, at = (self._host, sources) if source == HOST else (self._staging, rows)
                if source == DEVICE:
                    ids = self._ids(sources, parts)
                    yield from self._copy(running, TO_HOST, ids, self._staging, rows)
                writing = _timed(running, self._disk.write(targets, of.arrays(at)))
                yield writing
                writing.result()
            elif target == HOST:
                ids = self._ids(sources, parts)
                yield from self._copy(running, TO_HOST, ids, self._host, targets)
            else:
                ids = self._ids(targets, parts)
                yield from self._copy(running, TO_DEVICE, ids, self._host, sources)
        except Exception as error:
            running.failed += targets.tolist()
            running.errors.append(error)
            return
        moved = self.num_bytes.get((source, target), 0)
        self.num_bytes[source, target] = moved + len(targets) * self._pool.num_bytes

    def _ids(self, pages: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """Ids of parts of pages of the pool."""
        return pages.astype(np.int64) * self._pool.num_parts + parts

    def _copy(
        self,
        running: _Running,
        direction: str,
        ids: np.ndarray,
        host: HostPages,
        rows: np.ndarray,
    ) -> Generator[Pending, None, None]:
        if running.is_ahead:
            copy = partial(self._ways.copy, direction, ids, host.rows, rows)
            copying = self.streams.begin_ahead([partial(copy, t) for t in self._ahead_tensors])
        else:
            copying = self.streams.begin(
                direction, lambda: self._ways.copy(direction, ids, host.rows, rows)
            )
        yield copying
        copying.result()
        running.seconds += copying.seconds


def _timed(running: _Running, future: Future[None]) -> Future[None]:
    """The same call of a disk, with its time noted when it ends."""
    span = running.span
    span[0] = min(span[0], perf_counter())

    def ended(_: Any) -> None:
        span[1] = max(span[1], perf_counter())

    future.add_done_callback(ended)
    return future


def _good(reading: Any, sources: np.ndarray) -> np.ndarray:
    """[n] bool: which pages a read of the disk has brought.

    Raises:
        Exception: of a read that does not say which.
    """
    error = reading.exception()
    damaged = getattr(error, "pages", None)
    if error is not None and damaged is None:
        raise error
    return ~np.isin(sources, () if damaged is None else damaged)
