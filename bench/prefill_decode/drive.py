"""Run a workload on an engine: a fixed number of conversations at once, each turn after the answer
of the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter, process_time

import numpy as np

from quire.models.engine.engine import Engine, StepReport
from quire.models.engine.outputs import RequestOutput
from quire.models.engine.request import SamplingParams
from quire.models.progress import tqdm

from ..common.workload import Workload

Key = tuple[int, int]  # (session, turn), both from 0


@dataclass(frozen=True)
class WorkloadRun:
    """Outputs, steps, times and pages of a run.

    Attributes:
        outputs: of every request, in order of (session, turn); groups: `Turn.group` of each.
        steps: every step's report.
        seconds, cpu_seconds: wall time from the first request to the last token, and time of this
            process on all cores meanwhile.
        hashing: seconds spent hashing prompts.
        peak_pages_in_use, peak_pages_cached: most pages that running requests held at the end of a
            step, and most that held anything at all.
        stats: counters of the cache at the end.
        num_pages, bytes_per_token, describe: of the engine's cache; the last one in words.
        moved: bytes that went to host memory and back, where there is a host tier.
    """

    outputs: dict[Key, RequestOutput]
    groups: dict[Key, int]
    steps: list[StepReport]
    seconds: float
    cpu_seconds: float
    hashing: float
    peak_pages_in_use: int
    peak_pages_cached: int
    stats: dict[str, int]
    num_pages: int
    bytes_per_token: float
    describe: str
    moved: dict[str, int] = field(default_factory=dict)

    @property
    def prompts(self) -> dict[Key, tuple[int, ...]]:
        return {key: output.prompt_token_ids for key, output in self.outputs.items()}


def run_workload(
    engine: Engine,
    workload: Workload,
    *,
    concurrency: int,
    prompts: Mapping[Key, tuple[int, ...]] | None = None,
    label: str = "",
) -> WorkloadRun:
    """Generate all turns of all sessions; the output of a turn is part of the next prompt.

    Conversations that wait for their next turn stand in one queue. The order depends on lengths
    alone, never on time.

    Args:
        concurrency: requests in the engine at once.
        prompts: used in place of what was generated: the work of another run.

    Raises:
        RequestError: one of the requests failed.
    """
    queue = deque((s, 0) for s in range(len(workload.sessions)))
    history: dict[int, tuple[int, ...]] = {}
    outputs: dict[Key, RequestOutput] = {}
    flying: dict[str, Key] = {}
    steps: list[StepReport] = []
    in_use = cached = 0
    hashing_before = engine.totals.hashing
    start, cpu_start = perf_counter(), process_time()
    with tqdm(total=workload.num_requests, desc=label, unit="request", disable=None) as bar:
        while queue or flying:
            while queue and len(flying) < concurrency:
                session, number = key = queue.popleft()
                turn = workload.sessions[session][number]
                prompt = (*history.get(session, ()), *turn.token_ids)
                params = SamplingParams(max_tokens=turn.max_tokens, ignore_eos=True)
                request = np.array(prompt if prompts is None else prompts[key])
                flying[engine.add_request(request, params)] = key
            report = engine.step()
            assert report is not None, "unfinished requests always make a step"
            if report.num_tokens:  # the first call may only launch
                steps.append(report)
            stats = engine.kv.stats()
            in_use = max(in_use, stats["pages_in_use"])
            cached = max(cached, engine.kv.num_pages - 1 - stats["free_pages"])
            for output in report.finished:
                if output.error is not None:
                    raise output.error
                session, number = key = flying.pop(output.request_id)
                outputs[key] = output
                history[session] = output.prompt_token_ids + output.token_ids
                if number + 1 < len(workload.sessions[session]):
                    queue.append((session, number + 1))
                bar.update()
    seconds, cpu_seconds = perf_counter() - start, process_time() - cpu_start
    return WorkloadRun(
        outputs=dict(sorted(outputs.items())),
        groups={(s, t): workload.sessions[s][t].group for s, t in sorted(outputs)},
        steps=steps,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        hashing=engine.totals.hashing - hashing_before,
        peak_pages_in_use=in_use,
        peak_pages_cached=cached,
        stats=engine.kv.stats(),
        num_pages=engine.kv.num_pages,
        bytes_per_token=engine.memory.bytes_per_token,
        describe=engine.kv.describe(),
        moved={} if engine.host_tier is None else engine.host_tier.copier.num_bytes,
    )
