"""Pages of an engine's last tier in a store: `EngineConfig.disk_cache` that is no folder.

Each page is an object of its own, with a checksum (`objects`). A page that is written again is
another object, as objects do not change. Which object holds which page is known to this engine
alone: it finds nothing of others, and removes its own when it is closed.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from quire.kvcore.tier.places import MOST_PAGES

from .objects import HEADER_BYTES, check, seal
from .store import TIMEOUT, Store, StoreFailed, StoreKey, StoreTimeout, Ticket, TransferError

BYTES_AT_ONCE = 64 * 2**20  # of pages that are under way in one call
KIND = "page"


class LostPages(OSError):
    """Pages that the store does not give back as they were written.

    Attributes:
        pages: their ids, ascending.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.pages = tuple(sorted(reasons))
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        super().__init__(errno.EIO, f"page {self.pages[0]}{more}: {reasons[self.pages[0]]}")


class StoredPages:
    """Pages by number, each written and read as a whole.

    Args:
        store: which stays open; others may use it too.
        page_bytes: of a page.
        capacity: bytes of all pages, without what the store takes besides.
        layout: what must be the same for pages to be of use; a digest is part of each key.
        rank: of this process among those of the engine.
        timeout: seconds for a store that does not end its calls itself.

    Attributes:
        stride: bytes that a page takes.
        num_pages: pages 0, which is not stored, to num_pages - 1.

    Raises:
        ValueError: less room than for one page.
    """

    def __init__(
        self,
        store: Store,
        *,
        page_bytes: int,
        capacity: int,
        layout: Mapping[str, Any],
        rank: int = 0,
        timeout: float = 2 * TIMEOUT,
    ) -> None:
        self.stride = page_bytes + HEADER_BYTES
        if capacity < self.stride:
            raise ValueError(
                f"disk_cache_gib: expected at least {self.stride} bytes (one page), got {capacity}"
            )
        self.num_pages = min(1 + capacity // self.stride, MOST_PAGES)
        self._store, self._page_bytes, self._rank = store, page_bytes, rank
        self._layout = hashlib.blake2b(repr(sorted(layout.items())).encode(), digest_size=16)
        self._timeout = timeout
        self._owner, self._numbers = os.urandom(16), itertools.count()
        self._keys: dict[int, StoreKey] = {}  # of the pages that are written
        self._unwanted: list[StoreKey] = []  # that are to be removed
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="quire-store")

    def write(self, pages: Sequence[int], buffers: Iterable[np.ndarray]) -> Future[None]:
        """Writes pages; done when all are.

        Args:
            pages: [n] numbers, each once.
            buffers: n arrays of page_bytes uint8, not to be changed until it is done.

        Returns:
            Its exception, a `TransferError`, leaves these pages as they were.
        """
        return self._threads.submit(self._write, [int(page) for page in pages], [*buffers])

    def read(self, pages: Sequence[int], buffers: Iterable[np.ndarray]) -> Future[None]:
        """Reads pages that were written, and compares their checksums.

        Args:
            pages, buffers: as of `write`.

        Returns:
            Done when all are read. Its exception is `LostPages` where some are not there, or not as
            they were written; the buffers of others are filled, and those of these are untouched.
        """
        return self._threads.submit(self._read, [int(page) for page in pages], [*buffers])

    def close(self) -> None:
        """Ends what is under way and removes all pages, as far as the store still can."""
        self._threads.shutdown()
        self._unwanted += self._keys.values()
        self._keys.clear()
        self._remove()

    def _write(self, pages: list[int], buffers: list[np.ndarray]) -> None:
        keys, tickets = [self._new_key(page) for page in pages], []
        try:
            for some in self._waves(len(pages)):
                for i in some:
                    header = seal(keys[i], [buffers[i]])
                    tickets.append(self._store.put(keys[i], [header, buffers[i]]))
                self._wait(tickets)
                for ticket in tickets:
                    if ticket.error is not None:
                        raise ticket.error
        except BaseException:
            with suppress(Exception):  # what ends later could not be removed
                self._wait(tickets)
            self._unwanted += keys
            raise
        self._unwanted += [self._keys[page] for page in pages if page in self._keys]
        self._keys.update(zip(pages, keys, strict=True))
        self._remove()

    def _read(self, pages: list[int], buffers: list[np.ndarray]) -> None:
        reasons: dict[int, str] = {}
        for some in self._waves(len(pages)):
            # Of its own: a get that came too late would write to a row that is another page's.
            parts = [
                [np.empty(n, np.uint8) for n in (HEADER_BYTES, self._page_bytes)] for _ in some
            ]
            try:
                keys = [self._keys[pages[i]] for i in some]
                tickets = [self._store.get(k, part) for k, part in zip(keys, parts, strict=True)]
                self._wait(tickets)
            except Exception as error:  # the others would wait as long
                reasons |= dict.fromkeys(pages[some.start :], f"{type(error).__name__}: {error}")
                break
            for i, key, (header, data), ticket in zip(some, keys, parts, tickets, strict=True):
                try:
                    if ticket.error is not None:
                        raise ticket.error
                    check(key, header, [data])
                    buffers[i][:] = data
                except TransferError as error:
                    reasons[pages[i]] = f"{type(error).__name__}: {error}"
            if any(isinstance(ticket.error, StoreFailed) for ticket in tickets):
                reasons |= dict.fromkeys(pages[some.stop :], "the store failed before")
                break
        if reasons:
            raise LostPages(reasons)

    def _new_key(self, page: int) -> StoreKey:
        text = f"{page} {next(self._numbers)}".encode()
        segment = hashlib.blake2b(self._owner + text, digest_size=32).digest()
        return StoreKey(segment, KIND, self._layout.digest(), self._rank)

    def _waves(self, count: int) -> Iterator[range]:
        """Pages whose bytes are under way at once."""
        size = max(1, BYTES_AT_ONCE // self.stride)
        return (range(i, min(i + size, count)) for i in range(0, count, size))

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        end, left = time.monotonic() + self._timeout, [t for t in tickets if not t.done]
        while left:
            ended = self._store.poll(left, min(1.0, self._timeout))
            left = [ticket for ticket in left if ticket not in ended]
            if left and time.monotonic() > end:
                raise StoreTimeout(
                    f"{left[0].key.text}: expected an answer in {self._timeout:g} s, got none"
                )

    def _remove(self) -> None:
        """Those that cannot be removed now are with the next ones."""
        gone, self._unwanted = self._unwanted, []
        if gone:
            with suppress(Exception):
                self._store.remove(gone)
                return
            self._unwanted += gone
