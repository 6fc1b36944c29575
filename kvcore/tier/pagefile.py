"""One large file of equal pages, page i at a fixed offset, which grows as pages are used."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # macOS has none
DIRECT_BLOCKS = 512, 4096  # bytes to which `O_DIRECT` is aligned: sectors of disks, old and new
_BLOCK = 4096
_RUN_BYTES = 4 << 20  # of one system call: long enough to be quick, short enough to share out
_GROWTH = 64 << 20
_MOST_VECTORS = 1024  # IOV_MAX of Linux and macOS


def direct_block(folder: str) -> int:
    """Bytes to which offsets, sizes and addresses of `O_DIRECT` are aligned in `folder`; 0 where
    there is none."""
    if not _O_DIRECT:
        return 0
    handle, path = tempfile.mkstemp(prefix=".probe-", dir=folder)
    try:
        os.close(handle)
        with mmap.mmap(-1, 2 * _BLOCK) as memory, memoryview(memory) as view:
            for block in DIRECT_BLOCKS:
                try:
                    handle = os.open(path, os.O_RDWR | _O_DIRECT)
                    try:
                        part = [view[block : 2 * block]]
                        if os.pwritev(handle, part, block) == os.preadv(handle, part, block):
                            return block
                    finally:
                        os.close(handle)
                        part[0].release()
                except OSError:
                    continue
    finally:
        os.unlink(path)
    return 0


def stride_of(page_bytes: int, block: int) -> int:
    """Bytes from page to page: whole blocks of most file systems where that wastes under 5 %, else
    as few as `O_DIRECT` with `block` can move."""
    stride = -(-page_bytes // _BLOCK) * _BLOCK
    if stride - page_bytes > page_bytes // 20:
        block = block or DIRECT_BLOCKS[0]
        stride = -(-page_bytes // block) * block
    return stride


class PageFile:
    """Moves runs of neighbouring pages between memory and the file, by the calling thread.

    Methods may be called by several threads.

    Args:
        path: of the file, which is made if it is not there.
        page_bytes, stride: bytes of a page, and from page to page.
        num_pages: with page 0, the null page, which has no place in the file.
        direct: go past the page cache; `stride` is a multiple of `direct_block`.

    Attributes:
        most: pages in one run at most.
    """

    def __init__(
        self, path: str, page_bytes: int, stride: int, num_pages: int, direct: bool
    ) -> None:
        self.path, self.page_bytes, self.stride = path, page_bytes, stride
        self.num_pages, self.direct = num_pages, direct
        self.most = min(max(1, _RUN_BYTES // stride), _MOST_VECTORS)
        self._growing = threading.Lock()
        self._local = threading.local()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | direct * _O_DIRECT, 0o600)
        self._size = os.fstat(self._handle).st_size

    @property
    def num_held(self) -> int:
        """Pages that the file is long enough for, with the null page; at most `num_pages`."""
        return min(self.num_pages, 1 + self._size // self.stride)

    def truncate(self, num_pages: int) -> None:
        """Give back the space of pages from `num_pages` on."""
        size = (num_pages - 1) * self.stride
        if self._size > size:
            os.ftruncate(self._handle, size)
            self._size = size

    def close(self) -> None:
        """Close the file; nothing else may be under way."""
        os.close(self._handle)

    def buffers(self, n: int) -> Bytes:
        """[n, page_bytes] uint8 of zeros that need no copy in between, if `page_bytes` is the
        stride."""
        memory = np.frombuffer(mmap.mmap(-1, max(1, n) * self.stride), np.uint8)
        rows: Bytes = memory.reshape(-1, self.stride)[:n, : self.page_bytes]
        return rows

    def write(self, first: int, rows: Sequence[Bytes]) -> None:
        """Write pages `first` and following, at most `most`.

        Raises:
            OSError: some may be written, some not.
        """
        start = (first - 1) * self.stride
        self._grow(start + len(rows) * self.stride)
        memory = self._spare(rows)
        if memory is not None:
            memory[:, self.page_bytes :] = 0
            for own, row in zip(memory, rows, strict=True):
                own[: self.page_bytes] = row
        whole = rows if memory is None else [memory.ravel()]
        if self._move(os.pwritev, whole, start) != len(rows) * self.stride:
            raise OSError(errno.EIO, "the system wrote less than it was given", self.path)

    def read(self, first: int, rows: Sequence[Bytes]) -> int:
        """Read pages `first` and following, at most `most`; returns how many of them, from the
        first, are in the file."""
        memory = self._spare(rows)
        whole = rows if memory is None else [memory.ravel()]
        got = self._move(os.preadv, whole, (first - 1) * self.stride)
        if memory is not None:
            for own, row in zip(memory, rows, strict=True):
                row[:] = own[: self.page_bytes]
        return got // self.stride

    def flush(self) -> None:
        """Return once all that was written before is on the disk."""
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self._handle, fcntl.F_FULLFSYNC)  # `fsync` there stops at the disk's cache
        else:
            os.fdatasync(self._handle)

    def _spare(self, rows: Sequence[Bytes]) -> Bytes | None:
        """Aligned memory [pages, stride] of this thread, if pages cannot go straight to and from
        `rows`."""
        if self.stride == self.page_bytes and (
            not self.direct or all(row.ctypes.data % _BLOCK == 0 for row in rows)
        ):
            return None
        memory: Bytes | None = getattr(self._local, "memory", None)
        size = len(rows) * self.stride
        if memory is None or len(memory) < size:
            memory = self._local.memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        return memory[:size].reshape(len(rows), self.stride)

    def _move(self, call: Callable[[int, Any, int], int], rows: Sequence[Any], start: int) -> int:
        """Bytes that `call` moved: all of `rows`, unless the file ends before."""
        views, done = [memoryview(row) for row in rows], 0
        while views:
            n = call(self._handle, views, start + done)
            if n == 0:
                break
            done += n
            while views and n >= len(views[0]):
                n -= len(views.pop(0))
            if n:
                views[0] = views[0][n:]
        return done

    def _grow(self, end: int) -> None:
        """Make the file at least `end` bytes long, of blocks that are there: a full disk is known
        now, and not when the system writes what it took already."""
        with self._growing:
            if end <= self._size:
                return
            most = (self.num_pages - 1) * self.stride
            sizes = sorted({end, max(end, min(most, self._size + _GROWTH))}, reverse=True)
            for size in sizes:
                try:
                    _allocate(self._handle, self._size, size - self._size)
                except OSError:
                    os.ftruncate(self._handle, self._size)  # gives back what there was
                    if size == end:
                        raise
                    continue
                self._size = size
                return


def _allocate(handle: int, start: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, start, length)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    os.ftruncate(handle, start + length)  # a file system that allocates only what is written
