"""Times and numbers of steps: the clock of a step, its report, and sums over steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .outputs import OutputDelta, RequestOutput

if TYPE_CHECKING:
    from .scheduler import Step

PARTS = ("schedule", "allocator", "draft", "tensors", "model", "sample", "wait", "deliver")
"""Parts of a step:

schedule    choice of requests and of their new tokens
allocator   calls of `quire.kvcore`: match, admit, plan, commit, release
draft       a drafter that is no part of the model
tensors     the plan as tensors, and changed table entries
model       forward passes, also those of a drafter that is a part of the model
sample      from logits to ids on the device
wait        for the ids. A GPU only starts model and sample; the host waits for both here
deliver     drafts verified, outputs handed to requests, the report
"""
SCHEDULE, ALLOCATOR, DRAFT, TENSORS, MODEL, SAMPLE, WAIT, DELIVER = range(len(PARTS))
MODEL_MATH = (MODEL, SAMPLE, WAIT)
LAUNCHES = (TENSORS, MODEL, SAMPLE)  # parts that give the device work


class StepClock:
    """Split the time of a step into `PARTS`, and measure the device's idle time between steps.

    A GPU is idle between two events of its stream, a CPU between two readings of the host's clock.

    Attributes:
        wall, cpu: [len(PARTS)] seconds since `start`; cpu: of the calling thread alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._now: Callable[[], Any] = _recorded_event if self._on_gpu else perf_counter
        self._device_end: Any = None
        self._gaps: deque[tuple[Any, Any]] = deque()
        self.start()

    def start(self) -> None:
        """Set all parts to zero, and begin the first one."""
        self.wall, self.cpu = [0.0] * len(PARTS), [0.0] * len(PARTS)
        self._part = SCHEDULE
        self._wall_at, self._cpu_at = perf_counter(), thread_time()

    def switch(self, part: int) -> int:
        """End the running part and begin another; return the one that ran."""
        wall, cpu, before = perf_counter(), thread_time(), self._part
        self.wall[before] += wall - self._wall_at
        self.cpu[before] += cpu - self._cpu_at
        self._wall_at, self._cpu_at, self._part = wall, cpu, part
        if part in LAUNCHES:
            if self._device_end is not None:
                self._gaps.append((self._device_end, self._now()))
                self._device_end = None
        elif before in LAUNCHES:
            self._device_end = self._now()
        return before

    def forget_device(self) -> None:
        """Do not count the time from here to the next step."""
        self._device_end = None

    def stop(self) -> tuple[float, np.ndarray]:
        """End the running part; return idle seconds that became known since the last call, and
        `wall` and `cpu` [2, len(PARTS)].
        """
        self.switch(self._part)
        seconds = 0.0
        while self._gaps and (not self._on_gpu or self._gaps[0][1].query()):
            end, begin = self._gaps.popleft()
            seconds += end.elapsed_time(begin) / 1e3 if self._on_gpu else begin - end
        return seconds, np.array([self.wall, self.cpu])


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def outside_model(seconds: np.ndarray) -> np.ndarray:
    """Share of time outside the model's arithmetic: [..., len(PARTS)] seconds -> [...]."""
    total = seconds.sum(axis=-1)
    return 1.0 - seconds[..., MODEL_MATH].sum(axis=-1) / np.maximum(total, 1e-12)


class _Times:
    """Sums of ``wall`` [len(PARTS)] seconds."""

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
        """Seconds of all parts."""
        return float(self.wall.sum())


_NO_SEQUENCES = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class StepReport(_Times):
    """Numbers of the step whose tokens came to the host; zeros of a call that delivered none.

    With `EngineConfig.async_scheduling` the call before launched that step, so its times are of two
    calls: up to the launch of that one, and from the wait on of this one.

    Attributes:
        idle: seconds without work for the device before a step, as far as they became known.
        wall, cpu: [len(PARTS)] seconds of each of `PARTS`, and of CPU of the engine's thread.
        finished: requests that ended in it.
        deltas: its additions to streamed requests.
        q_lens, seq_lens: [num_seqs], new tokens of each sequence, and its KV tokens including them
            (and rejected drafts).
        num_preempted: requests preempted for it.
        num_generated, num_drafts, num_accepted: tokens of output; drafts verified, and accepted.
    """

    idle: float
    wall: np.ndarray
    cpu: np.ndarray
    finished: list[RequestOutput]
    deltas: list[OutputDelta]
    q_lens: np.ndarray = field(default_factory=lambda: _NO_SEQUENCES)
    seq_lens: np.ndarray = field(default_factory=lambda: _NO_SEQUENCES)
    num_preempted: int = 0
    num_generated: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def num_tokens(self) -> int:
        """New tokens computed."""
        return int(self.q_lens.sum())

    @property
    def num_decodes(self) -> int:
        """Sequences with one new token."""
        return int((self.q_lens == 1).sum())

    @property
    def num_prefills(self) -> int:
        """Sequences with more new tokens."""
        return len(self.q_lens) - self.num_decodes


@dataclass
class EngineTotals(_Times):
    """Sums over all steps; times in seconds.

    Attributes:
        idle, wall, cpu: as in `StepReport`.
        hashing: time of `Engine.add_request`, outside of steps, to hash prompts and look them up.
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

    def report(
        self,
        step: Step | None,
        ahead: Step | None,
        times: tuple[float, np.ndarray],
        finished: list[RequestOutput],
        deltas: list[OutputDelta],
        num_generated: int,
    ) -> StepReport:
        """Report a call of `Engine.step`, and add its numbers to the sums.

        Args:
            step: the one whose tokens the call delivered; None = it delivered none.
            ahead: the one that it launched for the next call to deliver; None = there is none.
            times: from `StepClock.stop`.
        """
        idle, seconds = times
        if ahead is not None:
            ahead.launch_seconds = np.where(np.arange(len(PARTS)) < WAIT, seconds, 0.0)
            seconds = seconds - ahead.launch_seconds
        if step is not None:
            seconds = seconds + step.launch_seconds
        wall, cpu = seconds
        self.idle, self.wall, self.cpu = self.idle + idle, self.wall + wall, self.cpu + cpu
        self.num_generated_tokens += num_generated
        if step is None:
            return StepReport(idle, wall, cpu, finished, deltas, num_generated=num_generated)
        num_drafts = sum(step.num_drafts)
        self.num_steps += 1
        self.num_tokens += len(step.input_ids)
        self.num_preempted += step.num_preempted
        self.num_drafts += num_drafts
        self.num_accepted += step.num_accepted
        return StepReport(
            idle,
            wall,
            cpu,
            finished,
            deltas,
            q_lens=step.plan.num_new_tokens,
            seq_lens=step.plan.seq_lens,
            num_preempted=step.num_preempted,
            num_generated=num_generated,
            num_drafts=num_drafts,
            num_accepted=step.num_accepted,
        )
