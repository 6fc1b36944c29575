"""Messages of a step: rank 0 sends them (`StepSender`), the other ranks run them (`follow`).

run       arrays of the plan, input ids, rows of the logits, graph    the model runs
observe   next ids, last rows, slots                                  the drafter sees that step
draft     table entries that changed, slots, lengths, greedy or not   the drafter runs
close     nothing
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from quire.kvcore import KVCache, StepArrays, StepPlan, WorkerTables, step_arrays

from ..engine.config import EngineConfig
from ..engine.device_drafter import DeviceDrafter
from ..engine.graphs import GraphShape
from ..engine.runner import ModelRunner
from ..engine.speculative import Drafter
from .group import Group
from .heartbeat import RankError

if TYPE_CHECKING:
    from .launch import Ranks

RUN, OBSERVE, DRAFT, CLOSE = "run", "observe", "draft", "close"
_EMPTY = StepArrays(*[np.zeros(0, dtype=np.int64)] * len(StepArrays._fields))


class StepSender:
    """Send the steps of an engine, which is on rank 0, to the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.group = ranks, ranks.group

    def attach(self, kv: KVCache, tables: WorkerTables, drafter: Any) -> None:
        """Called once by the engine, with its allocator and this rank's copy of the tables."""
        self._kv, self._tables = kv, tables
        if isinstance(drafter, DeviceDrafter):
            drafter.sender = self

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of all ranks. After an error no further one can run.

        Raises:
            RankError: another rank died, failed or is stuck, now or before.
        """
        if ended := self.ranks.ended:
            raise RankError(ended)
        heartbeat = self.ranks.heartbeat
        with self.ranks.failing():
            if heartbeat.verdict:
                raise RankError(heartbeat.verdict)
            heartbeat.is_stepping = True
            try:
                yield
            finally:
                heartbeat.is_stepping = False

    def run(
        self, plan: StepPlan, input_ids: np.ndarray, rows: np.ndarray, shape: GraphShape | None
    ) -> StepArrays:
        """Make the other ranks run the model, as `ModelRunner.run`; return this rank's arrays."""
        arrays = step_arrays(self._kv, plan)
        self._send(RUN, arrays, input_ids, rows, shape)
        self._tables.update(arrays)
        return arrays

    def observe(self, next_ids: np.ndarray, last_rows: np.ndarray, slots: np.ndarray) -> None:
        self._send(OBSERVE, next_ids, last_rows, slots)

    def draft(self, slots: np.ndarray, seq_lens: np.ndarray, is_greedy: bool) -> None:
        index, pages = self._kv.take_deltas()
        changes = _EMPTY._replace(table_indices=index, table_pages=pages)
        self._send(DRAFT, changes, slots, seq_lens, is_greedy)
        self._tables.update(changes)

    def close(self) -> None:
        if not self.ranks.ended:
            with suppress(dist.DistError):  # of a store that is gone
                self._send(CLOSE)
            self.ranks.close()

    def _send(self, *message: Any) -> None:
        self.group.channel.send(pickle.dumps(message, protocol=5))
        self.group.calls["step"] += 1


@torch.inference_mode()
def follow(group: Group, model: nn.Module, config: EngineConfig, drafter: Drafter | None) -> None:
    """Run the steps of rank 0 on another rank until it closes."""
    runner = ModelRunner(model, config, drafter)
    sampled = runner.builder.sampled
    hidden = batch = None
    with torch.cuda.device_of(runner.builder.tables):
        while (message := pickle.loads(group.channel.receive()))[0] != CLOSE:
            group.calls["step"] += 1
            kind, *arguments = message
            if kind == RUN:
                arrays, input_ids, rows, shape = arguments
                runner.tables.update(arrays)
                _, hidden, batch = runner.run(arrays, input_ids, rows, shape)
                if runner.is_async:  # the next input ids
                    group.from_first(sampled[: len(rows)])
            elif kind == OBSERVE:
                drafter.observe(batch, hidden, *arguments)
            else:
                changes, slots, seq_lens, is_greedy = arguments
                runner.tables.update(changes)
                drafts = drafter.follow(slots, seq_lens, is_greedy)
                sampled[: drafts.numel()] = drafts.flatten()
