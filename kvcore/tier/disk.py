"""A tier on the disk: pages in one file, their records in a database, both in one folder.

Order on the disk, which a crash at any point leaves whole:

    write(pages)      the page file; no record names these pages
    added(records)    1. flush the page file   2. commit the records, and flush their log
    removed(records)  commit, and flush the log; then `write` takes the pages again

So a record that is there names pages that were on the disk before it, and that nothing wrote since.
Pages are moved by threads; records by the thread that calls, which waits for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from itertools import chain
from types import TracebackType
from typing import Any, Literal

import numpy as np

from ..page_layout import LayoutMismatch, layout_texts
from ..prefix.keys import KEY_BYTES
from .journal import DamagedDatabase, RecordDatabase, Row
from .pagefile import DIRECT_BLOCKS, Bytes, PageFile, direct_block, stride_of
from .pagejobs import PageJobs
from .places import MOST_PAGES
from .records import Record


class StoreInUse(OSError):
    """Another process, or another store of this one, has the folder.

    Attributes:
        holder: what it wrote into the lock file: its process id and its host.
    """

    def __init__(self, path: str, holder: str) -> None:
        self.holder = holder
        super().__init__(
            errno.EBUSY, f"expected a store that nobody uses, got that of {holder}", path
        )


class DiskStore:
    """Pages and records in a folder of a local disk, for one process at a time.

    It keeps what its callers say, evicts nothing, and is itself the `Journal` of its tier. Methods
    may be called by several threads; a process that was forked has to open one of its own.

    Args:
        folder: is made if it is not there (its parent is). It gets three files, which only the user
            may read: `pages`, `records.sqlite`, `lock`.
        page_bytes: of a page.
        capacity: bytes of the file of pages. If it is less than before, what lies beyond is
            dropped; if it is more, all stays.
        layout: whatever must be the same for pages to be of use: model, dtype, order of bytes in a
            page, block sizes, alignment, hash seed. Of values that are bytes only a digest is kept.
        on_mismatch: with another layout or page size than before, or a damaged database: raise, or
            start anew with an empty folder.
        direct: go past the page cache where the file system can (`O_DIRECT`).
        workers: threads that read and write pages.

    Attributes:
        page_bytes: of a page. stride: that it takes on the disk. num_pages: pages 0 (the null page, which is not stored) to
            num_pages - 1.
        num_dropped: records that were found, but were damaged, or without those that they need.

    Raises:
        LayoutMismatch, DamagedDatabase: see `on_mismatch`.
        StoreInUse: another process has it.
        OSError: as of the system: no folder, no permission, no space.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        page_bytes: int,
        capacity: int,
        layout: Mapping[str, str | int | bytes],
        on_mismatch: Literal["refuse", "clear"] = "refuse",
        direct: bool = True,
        workers: int = 4,
    ) -> None:
        for name, value in (("page_bytes", page_bytes), ("workers", workers)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
        if on_mismatch not in ("refuse", "clear"):
            raise ValueError(f"on_mismatch: expected 'refuse' or 'clear', got {on_mismatch!r}")
        asked = layout_texts(layout, page_bytes)
        self.folder, self.page_bytes = os.fspath(folder), page_bytes
        self._pid = os.getpid()
        with suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        with ExitStack() as opened:
            self._lock_handle = _lock(os.path.join(self.folder, "lock"))
            opened.callback(os.close, self._lock_handle)
            block = direct_block(self.folder)
            self._records = self._open_records(asked, block, on_mismatch)
            opened.callback(self._records.close)
            self.stride = stride = self._records.stride
            if type(capacity) is not int or capacity < stride:
                raise ValueError(
                    f"capacity: expected at least {stride} (one page), got {capacity!r}"
                )
            self.num_pages = min(1 + capacity // stride, MOST_PAGES)
            path = os.path.join(self.folder, "pages")
            straight = direct and block > 0 and stride % block == 0
            file = PageFile(path, page_bytes, stride, self.num_pages, straight)
            self._pages = PageJobs(file, workers)
            opened.callback(self._pages.close)
            self.num_dropped = self._load()
            _sync_folder(self.folder)
            close = opened.pop_all(), self._pages.is_worker, self._pid
            self._closing = weakref.finalize(self, _close, *close)
            self._closing.atexit = False  # a process that ends lets go of all
        _OPEN.add(self)

    def _open_records(
        self, layout: Mapping[str, str], block: int, on_mismatch: str
    ) -> RecordDatabase:
        path = os.path.join(self.folder, "records.sqlite")
        # Of this disk first; the folder may have come from another.
        strides = [stride_of(self.page_bytes, size) for size in (block, *DIRECT_BLOCKS)]
        try:
            return RecordDatabase(path, layout, strides)
        except (LayoutMismatch, DamagedDatabase):
            if on_mismatch == "refuse":
                raise
        for suffix in ("", "-wal", "-shm"):  # in this order a crash in between leaves none behind
            with suppress(FileNotFoundError):
                os.unlink(path + suffix)
        return RecordDatabase(path, layout, strides)

    def _load(self) -> int:
        """Take over the records that are whole, forget the others; returns how many these are."""
        if self._records.new:
            self._pages.file.truncate(1)
            return 0
        depths = {b"": 0}  # of the segments so far
        bad: list[Row] = []
        for rows in self._records.chunks():
            if not self._take(rows, depths):  # else, as a rule, all at once
                bad += [row for row in rows if not self._take([row], depths)]
        if bad:
            self._records.forget(bad)
        self._pages.file.truncate(self.num_pages)
        return len(bad)

    def _take(self, rows: list[Row], depths: dict[bytes, int]) -> bool:
        """Take over rows, all or none; False where one is not whole.

        Args:
            depths: of the segments before, and then of these too.
        """
        more: dict[bytes, int] = {}
        for row in rows:
            needed = row.key if row.point else row.parent
            depth = more.get(needed)
            if depth is None:
                depth = depths.get(needed, -2)
            if depth + (not row.point) != row.depth or not row.sound:
                return False
            if not row.point:
                more[row.key] = row.depth
        ids = np.frombuffer(b"".join([row.pages for row in rows]), "<i4").astype(np.int64)
        sums = np.frombuffer(b"".join([row.sums for row in rows]), "<u4")
        is_page = ids > 0
        whole = not (ids >= self._pages.file.num_held).any()
        if not (whole and self._pages.adopt(ids[is_page], sums[is_page])):
            return False
        depths.update(more)
        return True

    # Pages.

    def buffers(self, n: int) -> Bytes:
        """[n, page_bytes] uint8 of zeros, in memory that the system moves without a copy in
        between."""
        return self._pages.file.buffers(n)

    def write(self, pages: Any, buffers: Iterable[Any]) -> Future[None]:
        """Write `pages`, which are not on the disk for sure until `added`.

        Args:
            pages: [n] ids, each once, in any order; neighbours are moved in one call.
            buffers: [n, page_bytes] array, or n objects with `page_bytes` contiguous bytes each
                (aligned to 4096 they are not copied); not to be changed until it is done.

        Returns:
            Done when all are written. Its exception, such as an OSError of a full disk, leaves
            these pages not written, and all others as they were. It is set by one of the threads,
            which runs the callbacks too; `close` is not to be called there.

        Raises:
            ValueError: arguments that do not fit; pages that a record names, or another job uses;
                the store is closed.
        """
        self._check()
        if self._records.unsettled:
            try:
                self._records.settle()
            except OSError as error:
                failed: Future[None] = Future()
                failed.set_exception(error)
                return failed
        return self._pages.write(pages, buffers)

    def read(self, pages: Any, buffers: Iterable[Any]) -> Future[None]:
        """Read `pages` (each once, in any order), and compare their checksums.

        Args:
            pages: [n] ids of written pages.
            buffers: [n, page_bytes] array, or n writable objects, as of `write`.

        Returns:
            Done when all are read. Its exception is `DamagedPages` if some could not be, or are not
            as they were written; the buffers of others are filled.

        Raises:
            ValueError: arguments that do not fit; pages that are not written; the store is closed.
        """
        self._check()
        return self._pages.read(pages, buffers)

    # Journal.

    def records(self) -> Iterator[Record]:
        """What is kept: each segment after its parent, each resume point after its segment."""
        self._check()
        return (row.record for row in self._records.rows())

    def added(self, records: Iterable[Record]) -> None:
        """Keep `records`, all or none: parents first, their pages written.

        Raises:
            ValueError: a record is kept already, or is not after those that it needs; its pages are
                not written.
            OSError: they are not kept. If flushing failed, what was written since the last call
                counts as not written.
        """
        self._check()
        records = list(records)
        self._check_order(records)
        ids = self._pages.check("pages", list(chain.from_iterable(r.pages for r in records)))
        named = ids[ids > 0]
        self._pages.keep(named)
        try:
            self._pages.sync()
            pages = ids.astype("<i4").tobytes()
            sums = np.where(ids > 0, self._pages.sums[ids], 0).astype("<u4").tobytes()
            rows, at = [], 0
            for record in records:
                end = at + 4 * len(record.pages)
                rows.append(Row.of(record, pages[at:end], sums[at:end]))
                at = end
            self._records.add(rows)
        except BaseException:
            self._pages.drop(named)
            raise

    def removed(self, records: Iterable[Record]) -> None:
        """Forget `records`, all or none; those that are not kept are passed over. Afterwards
        `write` takes their pages, unless other records name them.

        Raises:
            OSError: they are kept still.
        """
        self._check()
        keys = {(int(record.kind == "point"), record.key): None for record in records}
        rows = [row for key in keys if (row := self._records.find(*key)) is not None]
        self._records.remove(rows)
        ids = np.frombuffer(b"".join(row.pages for row in rows), "<i4").astype(np.int64)
        self._pages.drop(ids[ids > 0])

    def _check_order(self, records: list[Record]) -> None:
        """Refuse a record without those that it needs."""
        depths = {b"": 0}
        for record in records:
            point = record.kind == "point"
            if record.kind not in ("segment", "point") or (
                len(record.key) != KEY_BYTES or len(record.parent) not in (0, KEY_BYTES)
            ):
                raise ValueError(
                    "records: expected a segment or point, with keys of 32 bytes, got "
                    f"{record.kind!r:.40}, {len(record.key)} and {len(record.parent)} bytes"
                )
            needed = record.key if point else record.parent
            if needed not in depths:
                row = self._records.find(0, needed)
                if row is None:
                    raise ValueError(
                        f"records: expected segments before what follows them, got "
                        f"{record.kind} {record.key.hex()} without {needed.hex()}"
                    )
                depths[needed] = row.depth
            depth = depths[needed] + (not point)
            if record.depth != depth:
                raise ValueError(
                    f"records: expected depth {depth} of {record.kind} {record.key.hex()}, "
                    f"got {record.depth!r}"
                )
            if not point:
                depths[record.key] = depth

    # Life.

    def describe(self) -> str:
        """One line: where, how many pages of what size, how they are moved and checked."""
        file = self._pages.file
        how = "O_DIRECT" if file.direct else "page cache (no O_DIRECT)"
        return (
            f"{self.folder}: {self.num_pages - 1} pages of {self.page_bytes} bytes, "
            f"{file.stride} on the disk; {how}; CRC-32; {self.num_dropped} records dropped at start"
        )

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self.folder}: expected process {self._pid}, which opened the store, got "
                f"{os.getpid()}, forked from it; open another one there"
            )

    def close(self) -> None:
        """Finish what is under way, end the threads, give the folder free; so it is too once nobody
        refers to the store. In a forked process, and a second time, it does nothing."""
        if os.getpid() == self._pid:
            _OPEN.discard(self)
            self._closing()

    def forked(self) -> None:
        """In a forked process: let go of the lock, which else stays as long as this process."""
        if os.getpid() != self._pid:
            os.close(self._lock_handle)

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_OPEN: weakref.WeakSet[DiskStore] = weakref.WeakSet()


def _close(opened: ExitStack, is_worker: Callable[[], bool], pid: int) -> None:
    """Close what a store has opened, unless this process was forked from that of the store."""
    if os.getpid() != pid:
        return
    if is_worker():  # which would wait for itself
        threading.Thread(target=opened.close, name="quire-disk-close").start()
    else:
        opened.close()


def _leave_locks() -> None:
    for store in list(_OPEN):
        store.forked()


os.register_at_fork(after_in_child=_leave_locks)


def _lock(path: str) -> int:
    """A handle of the lock file, which this process has until the handle is closed."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    except BaseException as error:
        holder = os.pread(handle, 400, 0).decode(errors="replace")
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise StoreInUse(path, holder or "a process that starts") from error
        raise
    return handle


def _sync_folder(folder: str) -> None:
    """Make names of new files durable, and that of the folder."""
    for path in (folder, os.path.dirname(os.path.abspath(folder))):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
