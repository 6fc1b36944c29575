"""Times of calls on a device: replays of a CUDA graph on a GPU, a host clock on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

QUANTILES = (0.5, 0.2, 0.8, 0.0)
GPU_REPLAYS = 10  # of a graph, by Triton
MIN_ROUNDS, MAX_ROUNDS = 5, 200  # on a CPU


class Timing(NamedTuple):
    """Seconds of one call: median, 20th and 80th percentile, and least."""

    p50: float
    p20: float
    p80: float
    least: float


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, *, seconds: float = 0.3
) -> Timing:
    """The time of one of ``calls``, which run in turn; each does the same work on memory of its
    own.

    On a GPU they are captured in one CUDA graph, so no launch work of the host is in the result.

    Args:
        seconds: to spend, about.

    Raises:
        What a call raises, and RuntimeError from the capture of a call that synchronises.
    """

    def every() -> None:
        for call in calls:
            call()

    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        with torch.cuda.device(device):
            ms = do_bench_cudagraph(every, rep=1e3 * seconds / GPU_REPLAYS, quantiles=QUANTILES)
        return Timing(*(each / 1e3 / len(calls) for each in ms))
    every()
    rounds: list[float] = []
    while len(rounds) < MIN_ROUNDS or (sum(rounds) < seconds and len(rounds) < MAX_ROUNDS):
        start = perf_counter()
        every()
        rounds.append(perf_counter() - start)
    return Timing(*(float(each) for each in np.quantile(rounds, QUANTILES) / len(calls)))


def time_checked(
    calls: Sequence[Callable[[], Any]], expected: Any, device: torch.device, seconds: float
) -> Timing | str:
    """`time_calls`, or what is wrong with the first result, before or after it is timed.

    After many runs a race shows, or scratch that an earlier call left in another state.

    Args:
        expected: an object with ``wrong(*result of a call)``, a message or None.
    """
    if (wrong := expected.wrong(*calls[0]())) is not None:
        return wrong
    timing = time_calls(calls, device, seconds=seconds)
    return timing if (wrong := expected.wrong(*calls[0]())) is None else wrong
