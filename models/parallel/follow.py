"""The loop of each rank above 0: receive a step, run the model, forget the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.kvcore.device import Batch

from ..engine.config import EngineConfig
from ..engine.parts import ModelRunner, make_runner
from ..engine.speculative import Drafter, ModelDrafter
from .group import Group
from .steps import CLOSE, DRAFT, OBSERVE, RUN, Message, unpack


@torch.inference_mode()
def follow(group: Group, model: nn.Module, config: EngineConfig, drafter: Drafter | None) -> None:
    """Run the steps of rank 0 until it closes.

    Args:
        model, config, drafter: as of `quire.models.engine.engine.Engine`.
    """
    runner = make_runner(model, config, drafter)
    observes, step = isinstance(drafter, ModelDrafter), None
    with torch.cuda.device_of(runner.builder.tables):
        while (message := unpack(group.channel.receive())).kind != CLOSE:
            group.calls["step"] += 1
            runner.tables.update(message.step)
            if message.kind == RUN:
                step = _run(runner, message, observes)
                if runner.is_async:  # the next input ids
                    group.from_first(runner.builder.sampled[: len(message.rows)])
            elif message.kind == OBSERVE:
                batch, (_, hidden) = step
                drafter.observe(batch, hidden, message.ids, message.rows, message.step.slots)
            elif message.kind == DRAFT:
                slots, seq_lens = message.step.slots, message.step.seq_lens
                drafts = drafter.follow(slots, seq_lens, bool(message.rows[0]))
                runner.builder.sampled[: drafts.numel()] = drafts.flatten()


def _run(runner: ModelRunner, message: Message, observes: bool) -> tuple[Batch | None, Any]:
    """The batch, and what the model returns."""
    batch = None
    if message.graph is None or observes:
        batch = runner.builder.build(message.step, message.ids, message.rows)
    if message.graph is not None:
        return batch, runner.graphs(message.graph, message.step, message.ids)
    return batch, runner.run(batch.input_ids, batch.positions, batch.attn, batch.logits_rows)
