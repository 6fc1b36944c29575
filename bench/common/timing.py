"""Times of calls on a device: replays of a CUDA graph on a GPU, a host clock on a CPU; medians, and
the spread beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import numpy as np
import torch

# A graph holds this many calls, so that the events around it weigh little; fewer where they take
# longer than GRAPH_SECONDS.
MIN_CALLS = 8
GRAPH_SECONDS = 5e-3
MIN_REPLAYS, MAX_REPLAYS = 5, 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, 20th and 80th percentile, over ``replays`` replays of ``calls``
    calls.
    """

    p50: float
    p20: float
    p80: float
    replays: int
    calls: int


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, *, seconds: float = 0.3
) -> Timing:
    """The time of one of ``calls``, which run in turn; each does the same work on memory of its
    own.

    On a GPU they are captured in one CUDA graph, so no launch work of the host is in the result.

    Args:
        seconds: to spend on replays, about.

    Raises:
        What a call raises, and RuntimeError from the capture of a call that synchronises.
    """
    if device.type != "cuda":
        return _time_on_host(calls, seconds)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize(device)
        start = perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize(device)
        once = perf_counter() - start
    rounds = max(1, min(-(-MIN_CALLS // len(calls)), int(GRAPH_SECONDS / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize(device)
    start = perf_counter()
    graph.replay()
    torch.cuda.synchronize(device)
    once = perf_counter() - start
    replays = int(min(MAX_REPLAYS, max(MIN_REPLAYS, seconds / once)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize(device)
    each = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    return _timing(each, rounds * len(calls))


def _time_on_host(calls: Sequence[Callable[[], object]], seconds: float) -> Timing:
    for call in calls:
        call()
    each: list[float] = []
    while len(each) < MIN_REPLAYS or (sum(each) < seconds and len(each) < MAX_REPLAYS):
        start = perf_counter()
        for call in calls:
            call()
        each.append(perf_counter() - start)
    return _timing(each, len(calls))


def _timing(seconds: Sequence[float], calls: int) -> Timing:
    p20, p50, p80 = np.percentile(np.array(seconds) / calls, [20, 50, 80])
    return Timing(float(p50), float(p20), float(p80), len(seconds), calls)
