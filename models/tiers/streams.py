"""Where copies run: beside the model on a GPU, on a CPU in the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

TO_HOST, TO_DEVICE = "to_host", "to_device"
DIRECTIONS = (TO_HOST, TO_DEVICE)


class CopyFailed(RuntimeError):
    """What a step was to read did not come; ``__cause__`` is the exception behind it."""


class Copying:
    """Copies of a stream, in parts.

    A GPU's stream has them all. On a CPU each is made when somebody waits for it.

    Args:
        copies: that are not made.
        events: on a GPU: before the first part, and behind each.
        keep: what has to live as long.

    Attributes:
        error: what one of them raised.
    """

    def __init__(
        self, copies: Sequence[Callable[[], Any]], events: Sequence[Any] = (), keep: Any = None
    ) -> None:
        self._left: list[Callable[[], Any] | None] = [*copies]
        self._events, self._keep, self._seconds = events, keep, 0.0
        self.error: Exception | None = None

    def arrive(self, part: int) -> None:
        """What the current stream is given next comes behind a part; on a CPU it is made now."""
        if self._events:
            torch.cuda.current_stream().wait_event(self._events[1 + part])
            return
        if self.error is not None:
            raise self.error
        copy, self._left[part] = self._left[part], None
        if copy is not None:
            start = perf_counter()
            try:
                copy()
            except Exception as error:
                self.error = error
                raise
            self._seconds += perf_counter() - start

    def arrive_all(self) -> None:
        """As `arrive`, of all parts."""
        if self._events:
            self.arrive(len(self._events) - 2)  # a stream makes one after the other
        for part in range(len(self._left)):
            self.arrive(part)

    def done(self) -> bool:
        """Whether they have ended."""
        if self._events:
            return bool(self._events[-1].query())
        return self.error is not None or not any(self._left)

    def result(self) -> None:
        """Wait for their end.

        Raises:
            Exception: what a copy raised.
        """
        if self.error is not None:
            raise self.error
        if self._events:
            self._events[-1].synchronize()
        else:
            self.arrive_all()

    @property
    def seconds(self) -> float:
        """That they took, once they have ended."""
        if self._events:
            return self._events[0].elapsed_time(self._events[-1]) / 1e3
        return self._seconds


class CopyStreams:
    """A stream for each direction, as a link moves both at once; on a CPU none.

    What is begun comes behind all that the current stream, the model's, was given before: a step
    that runs still may read the pages that a load fills, and writes those that a store takes.
    Nothing of the model waits for copies of `begin`: their pages are nobody's, or only read, until
    the host has seen them end. Those of `begin_ahead` count as ended at once, on both sides: the
    model comes behind them by `arrive`, and so does all that is begun later.

    Args:
        device: of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._streams = {d: torch.cuda.Stream(device) for d in DIRECTIONS} if on_gpu else {}
        self._ahead: list[Copying] = []

    def begin(self, direction: str, copy: Callable[[], Any]) -> Copying:
        """Begins copies in a direction.

        Args:
            copy: gives them to the current stream; what it returns lives until they have ended.
        """
        if not self._streams:
            for one in self._ahead:
                with suppress(Exception):  # whoever waits for it sees it
                    one.arrive_all()
            made = Copying([copy])
            made.arrive_all()
            return made
        return self._queue(direction, [copy])

    def begin_ahead(self, copies: Sequence[Callable[[], Any]]) -> Copying:
        """Begins copies to the device, part by part, whose pages somebody may use from now on.

        Args:
            copies: as of `begin`; a part for each page tensor, or one for all.
        """
        made = self._queue(TO_DEVICE, copies) if self._streams else Copying(copies)
        self._ahead.append(made)
        return made

    def _queue(self, direction: str, copies: Sequence[Callable[[], Any]]) -> Copying:
        stream, keep = self._streams[direction], []
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if direction == TO_HOST:  # of pages that came ahead, to rows that they came from
                for one in self._ahead:
                    one.arrive_all()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(copies) + 1)]
            events[0].record()
            for copy, event in zip(copies, events[1:], strict=True):
                keep.append(copy())
                event.record()
        return Copying([], events, keep)

    def arrive(self, tensor: int) -> None:
        """What the current stream is given next comes behind what `begin_ahead` brings to a page
        tensor.

        Raises:
            CopyFailed: it did not come, and does not until `forget_ended`.
        """
        for one in self._ahead:
            self._expect(one, tensor)

    def arrive_all(self) -> None:
        """As `arrive`, of all page tensors."""
        for one in self._ahead:
            self._expect(one, None)

    def _expect(self, one: Copying, part: int | None) -> None:
        try:
            if part is None:
                one.arrive_all()
            else:
                one.arrive(part)
        except Exception as error:
            raise CopyFailed("pages that a step reads did not come") from error

    def forget_ended(self, *, failed: bool = False) -> None:
        """Copies that have ended are waited for no more; those that failed only with `failed`."""
        self._ahead = [c for c in self._ahead if not c.done() or (c.error and not failed)]


def behind_loads(run: Callable[..., Any], streams: CopyStreams, by_tensor: bool) -> Any:
    """A forward pass behind the copies that it runs ahead of.

    Args:
        by_tensor: whether its layers see to that themselves.
    """

    def behind(*args: Any, **options: Any) -> Any:
        if not by_tensor:
            streams.arrive_all()
        out = run(*args, **options)
        streams.arrive_all()  # a drafter's layers read pages, too
        return out

    return behind
