"""Steps of a life that are planned ahead: the device runs its queue later, in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kvcore import StepPlan
from tests.support.kvcore.device import Request


@dataclass
class Launch:
    """What a launch takes along: the plan, and tables and row contents as of now.

    Attributes:
        tables, rows: of each request, its row of each table, and what the step writes by position.
        copies: state copies after the step.
    """

    plan: StepPlan
    requests: list[Request]
    starts: list[int]
    ends: list[int]
    tables: list[list[np.ndarray]]
    rows: list[list[np.ndarray]]
    copies: np.ndarray


class Ahead:
    """A part of `shadow.Life`."""

    def ahead(self) -> None:
        """Steps are reserved, laid out and advanced before the first one runs; tokens are known last."""
        queue: list[Launch] = []
        for _ in range(self.rng.randint(2, 4)):
            counts, accepted = self.choose()
            launch = self._launch(counts, accepted) if counts else None
            if launch is None:
                for r in counts:
                    r.text.cut(r.computed)
                break
            queue.append(launch)
            if self.rng.random() < 0.3:
                self.evict()
            if self.rng.random() < 0.3:
                self.match(self.new_text())
        for launch in queue:
            self._run_late(launch)
        last = {r: r.computed for r in self.requests}
        for launch in queue:
            for r, start, end in zip(launch.requests, launch.starts, launch.ends, strict=True):
                r.computed = end
                self.call("publish", r.slot, end, self.lend(r.text.tokens[start:end]))
                self.promises.advance(r)
        for r, computed in last.items():
            r.computed = computed

    def _launch(self, counts: dict[Request, int], accepted: dict[Request, int]) -> Launch | None:
        device, requests = self.device, list(counts)
        slots, starts = [r.slot for r in requests], [r.computed for r in requests]
        plan = self._reserved(counts)
        if plan is None:
            self.call("advance", slots, starts)
            return None
        tables = [[device.table(t)[r.slot].copy() for t in device.groups] for r in requests]
        rows = [[device.written(t, r).copy() for t in device.groups] for r in requests]
        ends = [r.computed + accepted[r] for r in requests]
        copies = self.call("advance", self.lend(slots), self.lend(ends))
        for r, end in zip(requests, ends, strict=True):
            r.computed = end
            r.text.cut(end)
        self.calls["ahead"] += 1
        return Launch(plan, requests, starts, ends, tables, rows, copies)

    def _run_late(self, launch: Launch) -> None:
        device, plan, now = self.device, launch.plan, [r.computed for r in launch.requests]
        device.copy(plan.copies)
        for i, r in enumerate(launch.requests):
            r.computed = launch.starts[i]
            device.check(
                r, plan.state_pages[:, i] if len(plan.state_pages) else None, launch.tables[i]
            )
        device.write(plan, launch.requests, launch.rows)
        for i, r in enumerate(launch.requests):
            device.write_waiting(r, launch.ends[i], launch.tables[i])
        device.copy(launch.copies)
        for r, computed in zip(launch.requests, now, strict=True):
            r.computed = computed
