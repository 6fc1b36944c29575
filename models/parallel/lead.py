"""Rank 0's side of a step: it makes the other ranks run the model on the same arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.kvcore import KVCache, StepArrays, StepPlan, WorkerTables, step_arrays

from ..engine.graphs import Shape
from ..engine.speculative import ModelDrafter
from .heartbeat import RankError
from .steps import CLOSE, DRAFT, OBSERVE, RUN, Message, pack

if TYPE_CHECKING:
    from .launch import Ranks


class Lead:
    """Sends the steps of an engine to the other ranks.

    Args:
        ranks: all ranks, of which this is rank 0.

    Attributes:
        group: of the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.group = ranks, ranks.group

    def attach(self, kv: KVCache, tables: WorkerTables, drafter: Any) -> None:
        """Called once by the engine, with its allocator and this rank's copy of the tables.

        Raises:
            NotImplementedError: a drafter that the other ranks cannot run.
        """
        self._kv, self._tables = kv, tables
        if isinstance(drafter, ModelDrafter):
            if not hasattr(drafter, "follow"):
                raise NotImplementedError(
                    "drafter: supported with tensor_parallel_size > 1 are MTPDrafter and drafters "
                    f"that read tokens alone, such as NGramDrafter; got {type(drafter).__name__}"
                )
            drafter.lead = self

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
        self, plan: StepPlan, input_ids: np.ndarray, rows: np.ndarray, graph: Shape | None
    ) -> StepArrays:
        """Make all ranks run the model; to be called between a plan and its commit.

        Args:
            input_ids, rows: as of `quire.kvcore.device.BatchBuilder.build`.
            graph: the shape to replay; None = no graph.

        Returns:
            What this rank runs.
        """
        step = step_arrays(self._kv, plan)
        self._send(Message(RUN, graph, step, input_ids, rows))
        return step

    def observe(self, next_ids: np.ndarray, last_rows: np.ndarray, slots: np.ndarray) -> None:
        """Make the other ranks call `ModelDrafter.observe` for the step that ran last."""
        self._send(
            Message(OBSERVE, step=_EMPTY._replace(slots=slots), ids=next_ids, rows=last_rows)
        )

    def draft(self, slots: np.ndarray, seq_lens: np.ndarray, is_greedy: bool) -> None:
        """Make the other ranks compute the same drafts."""
        index, pages = self._kv.take_deltas()
        step = _EMPTY._replace(
            slots=slots, seq_lens=seq_lens, table_indices=index, table_pages=pages
        )
        self._send(Message(DRAFT, step=step, rows=np.array([is_greedy], dtype=np.int64)))

    def close(self) -> None:
        """End all ranks. No step may follow."""
        if not self.ranks.ended:
            with suppress(ConnectionError):  # one that died meanwhile
                self.group.channel.send(pack(Message(CLOSE)))
            self.ranks.close()

    def _send(self, message: Message) -> None:
        self.group.channel.send(pack(message))
        self.group.calls["step"] += 1
        self._tables.update(message.step)


_EMPTY = Message(RUN).step
