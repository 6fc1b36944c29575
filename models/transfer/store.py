"""What a store is: objects of bytes by keys, put and got in the background.

Objects do not change: who puts a key that is there has put the same, and may find it kept as it
was. A put is atomic: an object is there whole or not at all, whoever is killed meanwhile. Nothing
else is asked of a store: it may lose objects, be killed or damage bytes, and every object has a
checksum of its own (`objects`).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

TIMEOUT = 30.0  # seconds
STORE_METHODS = ("exists", "put", "get", "poll", "remove")
Buffers = Sequence[np.ndarray]


class StoreKey(NamedTuple):
    """Which object.

    Attributes:
        segment: 32 bytes, the key of a segment (`quire.kvcore.prefix.keys`): of it, or of the
            prefix that ends with it; of ``"layout"`` a digest of a whole prompt; of ``"page"``
            of a number and of who put it.
        kind: ``"segment"``, ``"point"`` (a resume point), ``"manifest"``, ``"layout"`` or
            ``"page"`` (of a tier, `tier`).
        layout: digest of the layout (`quire.kvcore.page_layout`); empty for ``"layout"``, which
            tells of one.
        rank: of the engine's process whose pages these are; 0 where there is one.
    """

    segment: bytes
    kind: str
    layout: bytes
    rank: int

    @property
    def text(self) -> str:
        """The key as a word, which may be the name of a file."""
        return f"quire-{self.layout.hex() or 'any'}-{self.rank}-{self.kind}-{self.segment.hex()}"


class TransferError(RuntimeError):
    """What a hand-off ends with. Nothing is half done: the request computes its prompt."""


class StoreFailed(TransferError):
    """A store cannot be reached, or has no room."""


class StoreTimeout(StoreFailed):
    """A store does not answer in time."""


class MissingObject(TransferError):
    """An object is not, or no more, in the store.

    Attributes:
        keys: of such objects.
    """

    def __init__(self, *keys: StoreKey) -> None:
        self.keys = keys
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        super().__init__(f"expected {keys[0].text} in the store, got no such object{more}")


class DamagedObject(TransferError):
    """An object is not what was put.

    Attributes:
        key: of it.
    """

    def __init__(self, key: StoreKey, reason: str) -> None:
        self.key = key
        super().__init__(f"{key.text}: {reason}")


@dataclass(eq=False)
class Ticket:
    """A put or get that was begun.

    Attributes:
        key: of the object.
        done: it has ended; `poll` says so.
        error: how it failed; None if it did not.
    """

    key: StoreKey
    done: bool = False
    error: Exception | None = None
    deadline: float = field(default=math.inf, repr=False)


class Store(Protocol):
    """Objects of bytes by keys. Any thread may call; nothing waits longer than a time-out of the
    store's own, 30 s unless it says otherwise."""

    def exists(self, keys: Sequence[StoreKey]) -> list[int | None]:
        """Bytes of each object; None where there is none.

        Raises:
            StoreFailed: the store cannot tell.
        """

    def put(self, key: StoreKey, buffers: Buffers) -> Ticket:
        """Begin to put an object.

        Args:
            buffers: contiguous uint8 arrays, one after the other its bytes, of which there are
                some. They do not change until the ticket has ended.
        """

    def get(self, key: StoreKey, buffers: Buffers) -> Ticket:
        """Begin to get an object.

        Args:
            buffers: contiguous uint8 arrays to fill, of its size together. What they hold is of no
                use until the ticket has ended, and none after an error. After a `StoreTimeout` they
                may still be written.

        The ticket's error is `MissingObject` where it is not there, `DamagedObject` where it has
        another size.
        """

    def poll(self, tickets: Sequence[Ticket], seconds: float = 0.0) -> list[Ticket]:
        """Those of ``tickets`` that have ended; waits for one at most so long."""

    def remove(self, keys: Sequence[StoreKey]) -> None:
        """Forget objects; those that are not there are passed over.

        Raises:
            StoreFailed: the store cannot.
        """


def num_bytes(buffers: Buffers) -> int:
    """Of all buffers."""
    return sum(buffer.nbytes for buffer in buffers)


def parse_address(name: str, text: str) -> tuple[str, int]:
    """(host, port) of "host:port", the argument ``name``.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ValueError(f"{name}: expected host:port, got {text!r:.99}")
    return host, int(port)


class ThreadedStore:
    """A store over calls that wait: threads make them.

    A call that never returns costs its thread, and its ticket ends with `StoreTimeout`; such a
    thread does not keep the process from ending.

    Args:
        workers: threads.
        timeout: seconds, of a put or get from when it was begun, and of other calls.
    """

    def __init__(self, *, workers: int = 1, timeout: float = TIMEOUT) -> None:
        if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
            raise ValueError(f"timeout: expected seconds > 0, got {timeout!r}")
        self.timeout = float(timeout)
        self._ended = threading.Condition()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_open = True
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    # What a store does, in a thread.

    def _exists(self, keys: Sequence[StoreKey]) -> list[int | None]:
        raise NotImplementedError

    def _put(self, key: StoreKey, buffers: Buffers) -> None:
        raise NotImplementedError

    def _get(self, key: StoreKey, buffers: Buffers) -> None:
        raise NotImplementedError

    def _remove(self, keys: Sequence[StoreKey]) -> None:
        raise NotImplementedError

    # The protocol.

    def exists(self, keys: Sequence[StoreKey]) -> list[int | None]:
        """As of `Store`."""
        return self._wait("exists", lambda: self._exists(keys))

    def put(self, key: StoreKey, buffers: Buffers) -> Ticket:
        """As of `Store`."""
        if not num_bytes(buffers):
            raise ValueError(f"buffers: expected some bytes of {key.text}, got none")
        return self._begin(key, lambda: self._put(key, buffers))

    def get(self, key: StoreKey, buffers: Buffers) -> Ticket:
        """As of `Store`."""
        return self._begin(key, lambda: self._get(key, buffers))

    def poll(self, tickets: Sequence[Ticket], seconds: float = 0.0) -> list[Ticket]:
        """As of `Store`."""
        end = time.monotonic() + seconds
        with self._ended:
            while True:
                now = time.monotonic()
                for ticket in tickets:
                    if not ticket.done and now >= ticket.deadline:
                        ticket.done, ticket.error = True, self._timeout(ticket.key.text)
                ended = [ticket for ticket in tickets if ticket.done]
                if ended or not tickets or now >= end:
                    return ended
                self._ended.wait(min(end, *(ticket.deadline for ticket in tickets)) - now)

    def remove(self, keys: Sequence[StoreKey]) -> None:
        """As of `Store`."""
        self._wait("remove", lambda: self._remove(keys))

    def close(self) -> None:
        """Ends its threads. No call may follow."""
        if self._is_open:
            self._is_open = False
            for _ in self._threads:
                self._calls.put(None)
            for thread in self._threads:
                thread.join(timeout=1.0)  # one that is stuck stays so

    # Threads.

    def _timeout(self, what: str) -> StoreTimeout:
        return StoreTimeout(
            f"{what}: expected an answer of {type(self).__name__} in {self.timeout:g} s, got none"
        )

    def _give(self, call: Callable[[], None]) -> None:
        if not self._is_open:
            raise ValueError(f"expected an open {type(self).__name__}, got one that is closed")
        self._calls.put(call)

    def _begin(self, key: StoreKey, work: Callable[[], None]) -> Ticket:
        ticket = Ticket(key, deadline=time.monotonic() + self.timeout)

        def call() -> None:
            error = None
            if not ticket.done:  # else nobody waits any more
                error = _error_of(work)[1]
            with self._ended:
                if not ticket.done:
                    ticket.done, ticket.error = True, error
                    self._ended.notify_all()

        self._give(call)
        return ticket

    def _wait(self, name: str, work: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._give(lambda: answer.put(_error_of(work)))
        try:
            value, error = answer.get(timeout=self.timeout)
        except queue.Empty:
            raise self._timeout(name) from None
        if error is not None:
            raise error
        return value

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _error_of(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except TransferError as error:
        return None, error
    except Exception as cause:
        error = StoreFailed(f"{type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return None, error
