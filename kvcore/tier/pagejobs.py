"""Jobs that move pages between memory and a file in worker threads, with checksums.

A page has a CRC-32, computed when it is written and compared when it is read. Of the checksums in
the standard library it is the quickest (3.5 GB/s a thread, where BLAKE2b makes 0.8 and SHA-256 1.6;
threads compute in parallel); it finds each error that lies within 32 bits, and all but one in 2**32
of others, such as a write that never came. It is no defence against whoever can write the files: he
can write the checksums too.
"""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, as_ints
from .pagefile import Bytes, PageFile

Sums = npt.NDArray[np.uint32]


class DamagedPages(OSError):
    """Pages that could not be read as they were written.

    Attributes:
        pages: their ids, ascending.
    """

    def __init__(self, path: str, reasons: dict[int, str]) -> None:
        self.pages = tuple(sorted(reasons))
        named = "; ".join(f"page {page}: {reasons[page]}" for page in self.pages[:4])
        more = len(self.pages) - 4
        super().__init__(errno.EIO, named + (f"; and {more} more" if more > 0 else ""), path)


class _Job:
    """One call of `read` or `write`, in parts."""

    def __init__(self, ids: Int64, epoch: int) -> None:
        self.ids, self.epoch = ids, epoch
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()
        self.left = 0
        self.damaged: dict[int, str] = {}
        self.error: BaseException | None = None


class PageJobs:
    """Jobs that read and write pages of a file in threads, and which pages they may touch.

    Methods may be called by several threads.

    Args:
        file: closed with this.
        workers: threads.

    Attributes:
        sums: [num_pages] uint32 checksums of the pages that are written.
    """

    def __init__(self, file: PageFile, workers: int) -> None:
        self.file = file
        self.sums: Sums = np.zeros(file.num_pages, np.uint32)
        self._written = np.zeros(file.num_pages, np.bool_)
        self._kept = np.zeros(file.num_pages, np.int32)  # records that name the page
        self._busy = np.zeros(file.num_pages, np.int32)  # reads under way; -1: a write
        self._unsynced: set[int] = set()
        self._epoch = 0  # flushes that failed
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._open = True
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Daemons: a process that ends without `close` is a crash, which loses little.
        self._threads = [
            threading.Thread(target=self._work, name=f"quire-disk-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def is_worker(self) -> bool:
        """Whether one of its threads calls."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Wait for what is under way, end the threads, close the file."""
        with self._lock:
            was_open, self._open = self._open, False
        if not was_open:
            return
        for _ in self._threads:
            self._queue.put(None)  # behind all jobs
        for thread in self._threads:
            thread.join()
        with self._syncing:
            self.file.close()

    def _work(self) -> None:
        while (part := self._queue.get()) is not None:
            part()
            del part  # or the thread holds the caller's buffers until the next job

    # What records say.

    def adopt(self, ids: Int64, sums: Sums) -> bool:
        """Records found on the disk name these pages; False, and nothing done, if one says another
        checksum than one before."""
        before = self.sums[ids]
        if (self._written[ids] & (before != sums)).any():
            return False
        self.sums[ids] = sums
        if (self.sums[ids] != sums).any():
            self.sums[ids] = before
            return False
        self._written[ids] = True
        np.add.at(self._kept, ids, 1)
        return True

    def keep(self, ids: Int64) -> None:
        """Records will name these pages (repeats allowed), which nobody may write until `drop`.

        Raises:
            ValueError: a page was not written, or is being written. Nothing is done.
        """
        with self._lock:
            wrong = ids[~self._written[ids]]
            if len(wrong):
                raise ValueError(f"pages: expected pages that are written, got {wrong[0]}")
            np.add.at(self._kept, ids, 1)

    def drop(self, ids: Int64) -> None:
        """Undo `keep`."""
        with self._lock:
            np.subtract.at(self._kept, ids, 1)

    def sync(self) -> None:
        """Return once all that was written before is on the disk.

        Raises:
            OSError: it is not. All pages that were not on the disk before count as not written:
                after an error systems may forget what they could not write, and say so only once.
        """
        with self._syncing:
            with self._lock:
                self._check_open()
                pages, self._unsynced = self._unsynced, set()
            if not pages:
                return
            try:
                self.file.flush()
            except BaseException:
                with self._lock:
                    self._epoch += 1  # fails what is being written, too
                    lost = np.array(sorted(pages | self._unsynced), np.int64)
                    self._unsynced = set()
                    self._written[lost] = False
                raise

    # Reading and writing.

    def write(self, pages: Any, buffers: Iterable[Any]) -> Future[None]:
        """Write `pages` from `buffers`; see `DiskStore.write`."""
        ids, rows = self._asked(pages, buffers, writable=False)
        with self._lock:
            self._refuse(ids, self._kept[ids] != 0, "that no record names")
            self._refuse(ids, self._busy[ids] != 0, "that no other job reads or writes")
            self._check_open()
            self._busy[ids] = -1
            self._written[ids] = False
            job = _Job(ids, self._epoch)
            self._start(job, rows, self._write_part, self._wrote)
        return job.future

    def read(self, pages: Any, buffers: Iterable[Any]) -> Future[None]:
        """Read `pages` into `buffers`; see `DiskStore.read`."""
        ids, rows = self._asked(pages, buffers, writable=True)
        with self._lock:
            self._refuse(ids, ~self._written[ids], "that are written")
            self._check_open()
            self._busy[ids] += 1
            job = _Job(ids, self._epoch)
            self._start(job, rows, self._read_part, self._have_read)
        return job.future

    def _asked(
        self, pages: Any, buffers: Iterable[Any], writable: bool
    ) -> tuple[Int64, list[Bytes]]:
        """Pages and buffers as arrays, checked."""
        ids = self.check("pages", pages).copy()
        self._refuse(ids, ids == 0, f"in 1..{self.file.num_pages - 1}")
        if len(np.unique(ids)) < len(ids):
            raise ValueError(f"pages: expected each once, got {ids.tolist()}")
        rows = []
        for i, buffer in enumerate(buffers):
            try:
                row = np.frombuffer(buffer, np.uint8)
            except (TypeError, ValueError, BufferError) as error:
                raise ValueError(
                    f"buffers: expected contiguous memory at {i}, got {type(buffer).__name__}: "
                    f"{error}"
                ) from error
            if len(row) != self.file.page_bytes or (writable and not row.flags.writeable):
                kind = "writable bytes" if writable else "bytes"
                raise ValueError(
                    f"buffers: expected {self.file.page_bytes} {kind} at {i}, "
                    f"got {len(row)}{'' if row.flags.writeable else ' that are read-only'}"
                )
            rows.append(row)
        if len(rows) != len(ids):
            raise ValueError(f"buffers: expected {len(ids)}, one a page, got {len(rows)}")
        return ids, rows

    def check(self, name: str, pages: Any) -> Int64:
        """`pages` as a vector [n] of ids in the file, or 0.

        Raises:
            ValueError: they are none.
        """
        ids = as_ints(name, pages)
        if ids.ndim != 1:
            raise ValueError(f"{name}: expected a vector, got {list(ids.shape)}")
        self._refuse(
            ids, (ids < 0) | (ids >= self.file.num_pages), f"in 0..{self.file.num_pages - 1}", name
        )
        return ids

    def _refuse(self, ids: Int64, wrong: Any, expected: str, name: str = "pages") -> None:
        if wrong.any():
            raise ValueError(f"{name}: expected pages {expected}, got {ids[wrong][0]}")

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"{self.file.path}: expected an open store, got one that is closed")

    def _start(
        self,
        job: _Job,
        rows: list[Bytes],
        part: Callable[[_Job, Int64, list[Bytes]], None],
        finish: Callable[[_Job], None],
    ) -> None:
        """Give the runs of neighbours to the threads; under the lock, so none comes after
        `close`."""
        order = np.argsort(job.ids)
        ids = job.ids[order]
        rows = [rows[i] for i in order]
        cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
        parts = [
            (i, min(i + self.file.most, end))
            for start, end in pairwise(cuts)
            for i in range(start, end, self.file.most)
        ]
        job.left = len(parts)

        def run(first: int, end: int) -> None:
            try:
                part(job, ids[first:end], rows[first:end])
            except BaseException as error:
                job.error = error
            with self._lock:
                job.left -= 1
                if job.left:
                    return
                finish(job)
            if job.error is None and job.damaged:
                job.error = DamagedPages(self.file.path, job.damaged)
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(None)

        for first, end in parts:
            self._queue.put(partial(run, first, end))
        if not parts:
            job.future.set_result(None)

    def _wrote(self, job: _Job) -> None:
        self._busy[job.ids] = 0
        if job.error is None and job.epoch != self._epoch:
            job.error = OSError(
                errno.EIO, "flushing failed while pages were written", self.file.path
            )
        if job.error is None:
            self._written[job.ids] = True
            self._unsynced.update(job.ids.tolist())

    def _have_read(self, job: _Job) -> None:
        self._busy[job.ids] -= 1

    def _write_part(self, job: _Job, ids: Int64, rows: list[Bytes]) -> None:
        self.sums[ids] = [zlib.crc32(row.data) for row in rows]
        self.file.write(int(ids[0]), rows)

    def _read_part(self, job: _Job, ids: Int64, rows: list[Bytes]) -> None:
        try:
            there = self.file.read(int(ids[0]), rows)
        except OSError as error:
            if len(ids) == 1:
                job.damaged[int(ids[0])] = str(error)
                return
            for i in range(len(ids)):  # its neighbours may be sound
                self._read_part(job, ids[i : i + 1], rows[i : i + 1])
            return
        for i, (page, row) in enumerate(zip(ids.tolist(), rows, strict=True)):
            expected = int(self.sums[page])
            if i >= there:
                job.damaged[page] = "the file ends before its end"
            elif (found := zlib.crc32(row.data)) != expected:
                job.damaged[page] = f"expected CRC-32 {expected:08x}, got {found:08x}"
