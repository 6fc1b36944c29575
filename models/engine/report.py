"""What an engine says of its steps: one in numbers, where its time went, and sums over steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

from .outputs import OutputDelta, RequestOutput

PARTS = ("schedule", "allocator", "draft", "tensors", "model", "sample", "wait", "deliver")
"""What a step consists of:

schedule    which requests run, and with how many tokens
allocator   calls of `quire.kvcore`: match, admit, plan, commit, release
draft       guesses of a drafter that is no part of the model
tensors     the plan as tensors, and table entries that changed
model       forward passes, those of a drafter that is a part of the model included
sample      from logits to ids on the device
wait        for ids on their way to the host: nothing on a CPU, where model and sample take until
            they are done; on a GPU these only start the work, and the host waits here
deliver     drafts verified; tokens, text and outputs handed to requests; the report
"""
SCHEDULE, ALLOCATOR, DRAFT, TENSORS, MODEL, SAMPLE, WAIT, DELIVER = range(len(PARTS))
MODEL_MATH = (MODEL, SAMPLE, WAIT)


class StepClock:
    """Splits the time of a step into `PARTS`.

    One of them runs at any time, so they add up to the whole step.

    Attributes:
        wall, cpu: [len(PARTS)] seconds since `start`; cpu: of the calling thread alone, which
            waiting for others does not add to.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """All parts at zero; the first one runs."""
        self.wall, self.cpu = [0.0] * len(PARTS), [0.0] * len(PARTS)
        self._part = SCHEDULE
        self._wall_at, self._cpu_at = perf_counter(), thread_time()

    def switch(self, part: int) -> int:
        """Ends the running part and begins another. Returns the one that ran."""
        wall, cpu, before = perf_counter(), thread_time(), self._part
        self.wall[before] += wall - self._wall_at
        self.cpu[before] += cpu - self._cpu_at
        self._wall_at, self._cpu_at, self._part = wall, cpu, part
        return before


class IdleClock:
    """Measures how long the device has nothing to do between one step and the next.

    A GPU's time is that between two events in its stream: the end of a step's sampling, and the
    start of the next step, wherever the host is then. On a CPU the host is the device: there it is
    the host's time between the two.

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._end: Any = None
        self._gaps: deque[tuple[Any, Any]] = deque()

    def begin(self) -> None:
        """A step starts: what follows is its work."""
        if self._end is not None:
            self._gaps.append((self._end, self._now()))
            self._end = None

    def end(self) -> None:
        """All work of a step is given to the device."""
        self._end = self._now()

    def stop(self) -> None:
        """There is no next step: the time from here on is nobody's."""
        self._end = None

    def take(self) -> float:
        """Seconds that are known since the last call; a GPU's once it has started the step."""
        seconds = 0.0
        while self._gaps and (not self._on_gpu or self._gaps[0][1].query()):
            end, begin = self._gaps.popleft()
            seconds += end.elapsed_time(begin) / 1e3 if self._on_gpu else begin - end
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def outside_model(seconds: np.ndarray) -> np.ndarray:
    """Share of time in parts that are not the model's arithmetic.

    Args:
        seconds: [..., len(PARTS)].

    Returns:
        [...].
    """
    total = seconds.sum(axis=-1)
    return 1.0 - seconds[..., MODEL_MATH].sum(axis=-1) / np.maximum(total, 1e-12)


class _Split:
    """Sums of a split; for classes with ``wall`` [len(PARTS)] seconds."""

    wall: np.ndarray

    @property
    def allocator(self) -> float:
        """Seconds in kvcore."""
        return float(self.wall[ALLOCATOR])

    @property
    def model(self) -> float:
        """Seconds in forward passes and sampling, up to the ids on the host."""
        return float(self.wall[[*MODEL_MATH]].sum())

    @property
    def total(self) -> float:
        """Seconds of everything."""
        return float(self.wall.sum())

    @property
    def rest(self) -> float:
        """Seconds neither in the allocator nor in the model: scheduling, tensors, bookkeeping."""
        return self.total - self.allocator - self.model


@dataclass(frozen=True)
class StepReport(_Split):
    """One step in numbers: that whose tokens came to the host.

    With `EngineConfig.async_scheduling` it was launched by the call before. The times are those of
    this call, which launches the next one, and waits.

    Attributes:
        q_lens, seq_lens: per sequence [num_seqs], its new tokens and its KV tokens including them
            (and drafts that were rejected).
        num_tokens: new tokens computed.
        num_decodes, num_prefills: sequences with one new token, and with more.
        num_generated, num_drafts, num_accepted: tokens of output; drafts verified, and those of
            them that stayed.
        idle: seconds in which the device had nothing to do before a step (`IdleClock`), as far as
            they became known.
        wall, cpu: [len(PARTS)] seconds of each of `PARTS`, and seconds of CPU of the engine's
            thread.
        finished: requests that ended in it.
        deltas: what it added to requests that are streamed.
    """

    q_lens: np.ndarray
    seq_lens: np.ndarray
    num_tokens: int
    num_decodes: int
    num_prefills: int
    num_preempted: int
    num_generated: int
    num_drafts: int
    num_accepted: int
    idle: float
    wall: np.ndarray
    cpu: np.ndarray
    finished: list[RequestOutput]
    deltas: list[OutputDelta]

    @classmethod
    def of(
        cls,
        clock: StepClock,
        finished: list[RequestOutput],
        deltas: list[OutputDelta],
        idle: float,
        **numbers: Any,
    ) -> StepReport:
        """A report of what a clock has measured.

        Args:
            clock: of the step.
            finished, deltas, idle: as in the report.
            numbers: the other fields; those not given are 0, or empty.
        """
        nothing = np.zeros(0, dtype=np.int64)
        return cls(
            **{"q_lens": nothing, "seq_lens": nothing, **dict.fromkeys(_COUNTS, 0), **numbers},
            wall=np.array(clock.wall),
            cpu=np.array(clock.cpu),
            finished=finished,
            deltas=deltas,
            idle=idle,
        )


_COUNTS = tuple(one.name for one in fields(StepReport) if one.name.startswith("num_"))


@dataclass
class EngineTotals(_Split):
    """Sums over all steps since the start or since somebody replaced the object; times in seconds.

    Attributes:
        idle, wall, cpu: as in `StepReport`.
        hashing: time in which `Engine.add_request` hashed prompts and looked them up, outside of
            steps.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_generated_tokens: int = 0
    num_preempted: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    idle: float = 0.0
    wall: np.ndarray = field(default_factory=lambda: np.zeros(len(PARTS)))
    cpu: np.ndarray = field(default_factory=lambda: np.zeros(len(PARTS)))
    hashing: float = 0.0

    def add(self, report: StepReport) -> None:
        """Adds one step."""
        self.num_steps += report.num_tokens > 0
        self.num_tokens += report.num_tokens
        self.num_generated_tokens += report.num_generated
        self.num_preempted += report.num_preempted
        self.num_drafts += report.num_drafts
        self.num_accepted += report.num_accepted
        self.idle += report.idle
        self.wall += report.wall
        self.cpu += report.cpu
