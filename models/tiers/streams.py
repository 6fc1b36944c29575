"""Where copies run: beside the model on a GPU, at once on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

TO_HOST, TO_DEVICE = "to_host", "to_device"
DIRECTIONS = (TO_HOST, TO_DEVICE)


class Pending(Protocol):
    """Work under way; a `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether it has ended."""

    def result(self) -> Any:
        """Waits for its end, and raises what it raised."""


class Copying:
    """Copies of a stream; on a CPU they have ended.

    Args:
        begin, end: events around them; None on a CPU.
        keep: what has to live as long.
        seconds: that they took on a CPU.
    """

    def __init__(self, begin: Any, end: Any, keep: Any, seconds: float) -> None:
        self._begin, self._end, self._keep, self._seconds = begin, end, keep, seconds

    def done(self) -> bool:
        """Whether they have ended."""
        return self._end is None or bool(self._end.query())

    def result(self) -> None:
        """Waits for their end."""
        if self._end is not None:
            self._end.synchronize()

    @property
    def seconds(self) -> float:
        """That they took, once they have ended."""
        return self._seconds if self._end is None else self._begin.elapsed_time(self._end) / 1e3


class CopyStreams:
    """A stream for each direction, as a link moves both at once; on a CPU none.

    What is begun comes behind all that the current stream, the model's, was given before: a step
    that runs still may read the pages that a load fills, and writes those that a store takes.
    Nothing of the model waits for copies: their pages are nobody's, or only read, until the host
    has seen them end.

    Args:
        device: of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._streams = {d: torch.cuda.Stream(device) for d in DIRECTIONS} if on_gpu else {}

    def begin(self, direction: str, copy: Callable[[], Any]) -> Copying:
        """Begins copies in a direction.

        Args:
            copy: gives them to the current stream; what it returns lives until they have ended.
        """
        stream = self._streams.get(direction)
        if stream is None:
            start = perf_counter()
            copy()
            return Copying(None, None, None, perf_counter() - start)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            keep = copy()
            end.record()
        return Copying(begin, end, keep, 0.0)
