"""The same prompts on several ranks, and the bytes that these send each other."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.models.engine.config import EngineConfig
from quire.models.llm import LLM
from quire.models.parallel.lockstep import LockstepEngine

from ..common.hf_checkpoint import save_checkpoint
from ..common.workload import Workload
from .build import BenchModel
from .drive import Key, Run, run_workload

SUMS = 2  # of a layer at least: what attention gives, and what the MLP or the experts do
COUNTED = 64  # tokens


def run_on_ranks(
    built: BenchModel,
    directory: Path | None,
    workload: Workload,
    settings: EngineConfig,
    size: int,
    prompts: Mapping[Key, tuple[int, ...]],
) -> tuple[Run, dict[str, Any]]:
    """Runs a workload on several ranks of this machine.

    Args:
        directory: of the model's weights; None = they are written to a temporary one.
        prompts: of another run.

    Returns:
        (the run, {name: number} of what was sent: see `bench.prefill_decode.report`).
    """
    with ExitStack() as stack:
        if directory is None:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-"))
            save_checkpoint(built.model, made)
            directory = Path(made)
        llm = LLM(
            directory,
            engine=replace(settings, tensor_parallel_size=size),
            device=built.model.device.type,
            dtype=built.model.dtype,
        )
        stack.callback(llm.close)
        concurrency = settings.max_num_seqs
        run = run_workload(
            llm.engine, workload, concurrency=concurrency, prompts=prompts, label=f"{size} ranks"
        )
        sent = llm.engine.everywhere(bytes_sent, COUNTED)
        describe = llm.engine.memory.describe()
    gc.collect()
    config = built.model.config
    steps = [step.num_tokens for step in run.steps]
    least = SUMS * config.hidden_size * built.model.dtype.itemsize
    return run, {
        "size": size,
        "memory": describe,
        "tokens_per_step": sum(steps) / len(steps),
        "sum_bytes_per_layer_token": sent["sum"] / COUNTED / config.num_layers,
        "least_bytes_per_layer_token": least,
        "gather_bytes_per_row": sent["gather"] / COUNTED,
        # Of what is summed, a ring sends all but one part twice: once to add it up, once the sum.
        "sent_share": 2 * (size - 1) / size,
    }


def bytes_sent(engine: LockstepEngine, num_tokens: int) -> dict[str, int]:
    """Bytes of each kind of message in a forward pass that gives logits of all rows."""
    before = engine.group.sent.copy()
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=engine.model.device)
    engine.model.full_forward(ids)
    return dict(engine.group.sent - before)
