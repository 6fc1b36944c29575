"""Hands a computed prefix from one cache to another through a store.

    sender      exists    which segments, and whether the resume point, the store has
                put       those that it has not, each when its pages are copied
                put       when all of these have ended: the layout and the manifest
    receiver    exists    manifests of the prefixes of its prompt
                get       the longest of them; its layout is compared before anything else
                exists    what it names and the receiver lacks: all of it, or nothing is begun
                get       each, into memory; its checksum is compared, and its pages are copied
                          to pages of the pool that nobody can find
                          all came: the cache adopts them, and the prompt is a hit

So a receiver has a whole prefix or nothing new, wherever either of them or the store stops. What a
sender left without a manifest is not found; its objects are whole, and the next sender of the same
prefix passes them over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from quire.kvcore import KVCache, OutOfPages, Prompt
from quire.kvcore.arrays import as_token_ids
from quire.kvcore.handoff import HandOff, Incoming, Outgoing, incoming, outgoing
from quire.kvcore.page_layout import Layout, LayoutMismatch, layout_digest, layout_texts
from quire.kvcore.prefix.keys import KEY_BYTES, root_key

from .objects import HEADER_BYTES, Manifest, check, loads, seal
from .pages import PageMemory
from .run import Forgotten, HandedOff, NoRoom, TransferRun
from .store import DamagedObject, MissingObject, Store, StoreKey, Ticket

STAGING_BYTES = 64 * 2**20
TIMEOUT = 60.0  # seconds
FIRST_WAIT, LONGEST_WAIT = 1e-3, 50e-3  # seconds between two looks for a manifest


class PrefixTransfer:
    """Sends and receives prefixes of one cache. Any thread may; several may at once.

    Args:
        kv: the cache.
        pages: its pages.
        layout: what must be the same at both ends (`quire.kvcore.page_layout`).
        rank: of this process, where an engine has several: each sends and receives its own pages.
        between_steps: makes a context in which no step runs and nobody else calls the cache.
        staging_bytes: of host memory, for each hand-off that runs; more where one object has more.

    Attributes:
        layout: as texts.
    """

    def __init__(
        self,
        kv: KVCache,
        pages: PageMemory,
        layout: Layout,
        *,
        rank: int = 0,
        between_steps: Callable[[], AbstractContextManager[Any]] = nullcontext,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        if not kv.enable_caching:
            raise ValueError("kv: expected a cache with enable_caching, got one without")
        self._kv, self._pages, self._rank = kv, pages, rank
        self._between_steps, self._staging_bytes = between_steps, staging_bytes
        self.layout = layout_texts(layout, pages.page_bytes)
        self._digest = layout_digest(self.layout)

    # Send.

    def send(
        self,
        token_ids: Any,
        store: Store,
        *,
        salt: bytes | None = None,
        extra_keys: Any = None,
        skip_tokens: int = 0,
        timeout: float = TIMEOUT,
    ) -> HandedOff:
        """Has a store hold what is cached of a prompt: dense segments and one resume point.

        Args:
            token_ids, salt, extra_keys: as of `KVCache.match`.
            store: where to.
            skip_tokens: whose dense segments the receiver has, a multiple of the alignment.
            timeout: seconds, for all of it.

        Returns:
            What was sent; ``num_tokens`` is 0 where nothing of the prompt is cached.

        Raises:
            ValueError: as `KVCache.match`, or skip_tokens is out of range.
            TransferError: it failed; a receiver finds nothing of it.
        """
        run = TransferRun("send", store, timeout)
        with run.timed("cache"), self._between_steps():
            match = self._kv.match(token_ids, salt=salt, extra_keys=extra_keys)
            out = outgoing(self._kv, match, skip_tokens=skip_tokens)
        if out is None:
            return run.ended()
        try:
            self._send(out, self._marker(token_ids, salt), run)
        finally:
            with self._between_steps():
                out.end()
        run.report.num_tokens = out.num_tokens
        return run.ended()

    def _send(self, out: Outgoing, marker: StoreKey, run: TransferRun) -> None:
        manifest = self._manifest(out)
        head = self._head(out.keys, len(out.keys) // KEY_BYTES)
        objects = self._objects(out)
        *known, has_head = run.exists([*(key for key, _ in objects), head])
        missing = [one for one, size in zip(objects, known, strict=True) if size is None]
        run.report.num_known = len(objects) - len(missing)
        if missing or has_head is None:

            def put(*of_object: Any) -> Ticket:
                return self._put_one(out, *of_object)

            try:
                self._move(missing, run, put)
                self._expect_valid(out)
            except Forgotten:
                run.take_back([key for key, _ in missing])
                raise
            data = np.frombuffer(manifest.dumps(), np.uint8)
            for key in (marker, head):  # what it is, before that it is
                run.finish([run.store.put(key, [seal(key, [data]), data])])
                run.report.count(key.kind, HEADER_BYTES + len(data))

    @staticmethod
    def _expect_valid(out: Outgoing) -> None:
        if out.is_void:
            raise Forgotten("send")

    def _put_one(
        self,
        out: Outgoing,
        key: StoreKey,
        pages: np.ndarray,
        staging: Any,
        rows: np.ndarray,
        run: TransferRun,
    ) -> Ticket:
        with run.timed("copy"):
            self._pages.copy_out(pages, staging, rows)
        self._expect_valid(out)  # else others may have written these pages meanwhile
        buffers = staging.arrays(rows)
        with run.timed("checksum"):
            header = seal(key, buffers)
        return run.store.put(key, [header, *buffers])

    # Receive.

    def receive(
        self,
        token_ids: Any,
        store: Store,
        *,
        salt: bytes | None = None,
        extra_keys: Any = None,
        num_tokens: int | None = None,
        wait: float = 0.0,
        remove: bool = False,
        timeout: float = TIMEOUT,
    ) -> HandedOff:
        """Has the cache hold what a store has of a prompt, so that the prompt is a hit.

        Args:
            token_ids, salt, extra_keys: as of `KVCache.match`.
            store: where from.
            num_tokens: of the prefix that was sent (`HandedOff.num_tokens`); None = the longest
                that there is, while it waits the longest that a request can use.
            wait: seconds for that to come, if it is not there.
            remove: take what came out of the store.
            timeout: seconds, for all but ``wait``.

        Returns:
            What came. ``num_tokens`` is of the hit now: at least what it was before, 0 where
            nothing of the prompt is cached or in the store.

        Raises:
            ValueError: as `KVCache.match`, or num_tokens is out of range.
            LayoutMismatch: the prefix is there in another layout; the message says what differs.
            TransferError: it failed; nothing of it is cached.
        """
        run = TransferRun("receive", store, timeout)
        with run.timed("cache"), self._between_steps():
            match = self._kv.match(token_ids, salt=salt, extra_keys=extra_keys)
        prompt, a = match.prompt, self._kv.alignment
        most = min((prompt.num_tokens - 1) // a, prompt.num_segments)
        marker = self._marker(token_ids, salt)
        if num_tokens is not None and (num_tokens % a or not 0 < num_tokens <= most * a):
            self._expect_no_other(marker, run)
            raise ValueError(
                f"num_tokens: expected a multiple of {a} in 1..{most * a}, got {num_tokens}"
            )
        wanted = most if num_tokens is None else num_tokens // a
        run.report.num_tokens = match.num_tokens
        have = match.num_tokens // a
        if have >= wanted:
            return run.ended()
        depths = range(wanted, have, -1) if num_tokens is None else [wanted]
        found = self._find(prompt.keys, depths, wait, run)
        if found is None:
            self._expect_no_other(marker, run)
            return run.ended()
        head, manifest = found
        with run.timed("cache"), self._between_steps():
            made = incoming(self._kv, match, manifest.num_tokens)
        if isinstance(made, OutOfPages):
            raise NoRoom(made)
        if made is not None:  # else another request has computed it meanwhile
            try:
                self._receive(made, head, manifest, run)
            finally:
                with self._between_steps():
                    made.end()
        run.report.num_tokens = manifest.num_tokens
        if remove:
            depths = range(1, manifest.num_tokens // a + 1)
            keys = [self._key(prompt.keys, depth, "segment") for depth in depths]
            point = head._replace(kind="point")
            run.store.remove([head, marker, point, *keys])
        return run.ended()

    def _find(
        self, keys: bytes, depths: Sequence[int], wait: float, run: TransferRun
    ) -> tuple[StoreKey, Manifest] | None:
        """The manifest of the longest prefix, at one of ``depths`` (longest first)."""
        heads = [self._head(keys, depth) for depth in depths]
        end, pause = time.monotonic() + wait, FIRST_WAIT
        while True:
            sizes = run.exists(heads)
            there = [i for i, size in enumerate(sizes) if size is not None]
            if (there and there[0] == 0) or time.monotonic() >= end:
                break
            with run.timed("wait"):
                time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, LONGEST_WAIT)
        run.begin()
        if not there:
            return None
        head = heads[there[0]]
        manifest = Manifest.loads(head, self._get_json(head, sizes[there[0]], run))
        self._expect_layout(run, manifest.layout)
        if manifest.num_tokens != depths[there[0]] * self._kv.alignment:
            raise DamagedObject(head, f"expected another prefix, got {manifest}")
        return head, manifest

    def _expect_no_other(self, marker: StoreKey, run: TransferRun) -> None:
        """That no engine with another layout has sent this prompt."""
        [size] = run.exists([marker])
        if size is not None:
            told = loads(marker, self._get_json(marker, size, run)).get("layout")
            if isinstance(told, dict):
                self._expect_layout(run, told)

    def _expect_layout(self, run: TransferRun, layout: Any) -> None:
        if layout != self.layout:
            raise LayoutMismatch(
                f"the sender, in {type(run.store).__name__}", layout, self.layout,
                "pages of another layout are of no use here",
            )  # fmt: skip

    def _get_json(self, key: StoreKey, size: int, run: TransferRun) -> bytes:
        if size <= HEADER_BYTES:
            raise run.dropped(key, DamagedObject(key, f"expected a header, got {size} bytes"))
        header, data = np.empty(HEADER_BYTES, np.uint8), np.empty(size - HEADER_BYTES, np.uint8)
        run.finish([run.store.get(key, [header, data])])
        try:
            check(key, header, [data])
        except DamagedObject as error:
            raise run.dropped(key, error) from None
        run.report.count(key.kind, size)
        return data.tobytes()

    def _receive(
        self, made: Incoming, head: StoreKey, manifest: Manifest, run: TransferRun
    ) -> None:
        objects = self._objects(made)
        expected = self._manifest(made)
        if made.point is None:  # it is there already
            expected = replace(expected, point_bytes=manifest.point_bytes)
        if expected != manifest:
            error = DamagedObject(head, f"expected {expected}, got {manifest}")
            raise run.dropped(head, error)
        sizes = run.exists([key for key, _ in objects])
        missing = [key for (key, _), size in zip(objects, sizes, strict=True) if size is None]
        if missing:
            raise MissingObject(*missing)
        self._move(objects, run, self._get_one)
        with run.timed("cache"), self._between_steps():
            if not made.adopt():
                raise Forgotten("receive")

    def _get_one(
        self, key: StoreKey, pages: np.ndarray, staging: Any, rows: np.ndarray, run: TransferRun
    ) -> Ticket:
        header, buffers = np.empty(HEADER_BYTES, np.uint8), staging.arrays(rows)

        def came() -> None:
            try:
                with run.timed("checksum"):
                    check(key, header, buffers)
            except DamagedObject as error:
                raise run.dropped(key, error) from None
            with run.timed("copy"):
                self._pages.copy_in(pages, staging, rows)

        ticket = run.store.get(key, [header, *buffers])
        run.at_end[ticket] = came
        return ticket

    # Both.

    def _key(self, keys: bytes, depth: int, kind: str) -> StoreKey:
        segment = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
        return StoreKey(segment, kind, self._digest, self._rank)

    def _marker(self, token_ids: Any, salt: bytes | None) -> StoreKey:
        """Of the object that tells with which layout a prompt was sent. Keys of segments would not
        find it, as they depend on the layout."""
        prompt = isinstance(token_ids, Prompt)
        tokens = token_ids.tail if prompt else as_token_ids("token_ids", token_ids)
        digest = sha256(token_ids.last_key if prompt else root_key(b"", salt or b""))
        digest.update(tokens.tobytes())
        return StoreKey(digest.digest(), "layout", b"", self._rank)

    def _head(self, keys: bytes, depth: int) -> StoreKey:
        return self._key(keys, depth, "manifest")

    def _objects(self, handoff: HandOff) -> list[tuple[StoreKey, np.ndarray]]:
        """Objects that a hand-off consists of, and their pages, parents first."""
        found = []
        if handoff.segments.shape[1]:
            for i, pages in enumerate(handoff.segments, handoff.first + 1):
                found.append((self._key(handoff.keys, i, "segment"), pages))
        if handoff.point is not None and handoff.point.any():
            key = self._key(handoff.keys, len(handoff.keys) // KEY_BYTES, "point")
            found.append((key, handoff.point[handoff.point != 0]))
        return found

    def _manifest(self, handoff: HandOff) -> Manifest:
        point = 0 if handoff.point is None else int((handoff.point != 0).sum())
        size = self._pages.page_bytes
        return Manifest(
            self.layout, handoff.num_tokens, handoff.segments.shape[1] * size, point * size
        )

    def _move(
        self,
        objects: list[tuple[StoreKey, np.ndarray]],
        run: TransferRun,
        begin: Callable[[StoreKey, np.ndarray, Any, np.ndarray, TransferRun], Ticket],
    ) -> None:
        """Puts or gets objects, as many at once as the staging rows are enough for."""
        if not objects:
            return
        most = max(len(pages) for _, pages in objects)
        total = sum(len(pages) for _, pages in objects)
        num_rows = min(total, max(most, self._staging_bytes // self._pages.page_bytes))
        # Of this hand-off alone: a store that timed out may still write to them.
        staging, free = self._pages.staging(num_rows), np.arange(num_rows)
        rows_of: dict[Ticket, np.ndarray] = {}
        for key, pages in objects:
            while len(free) < len(pages):
                ended = run.some(list(rows_of))
                free = np.concatenate([free, *(rows_of.pop(ticket) for ticket in ended)])
            rows, free = free[: len(pages)], free[len(pages) :]
            ticket = begin(key, pages, staging, rows, run)
            run.begun.append(ticket)
            rows_of[ticket] = rows
            run.report.count(key.kind, HEADER_BYTES + len(pages) * self._pages.page_bytes)
        run.finish(list(rows_of))
