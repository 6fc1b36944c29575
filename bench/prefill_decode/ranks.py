"""The same prompts on several ranks, and the bytes that these send each other."""

from __future__ import annotations

import gc
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.models.engine.config import EngineConfig
from quire.models.engine.engine import Engine
from quire.models.engine.request import SamplingParams
from quire.models.llm import LLM

from ..common.hf_checkpoint import save_checkpoint
from ..common.workload import Workload
from .build import BenchModel
from .drive import Run, run_workload

SUMS = 2  # of a layer at least: what attention gives, and what the MLP or the experts do
COUNTED = 64  # tokens


def run_on_ranks(
    built: BenchModel, workload: Workload, settings: EngineConfig, one: Run
) -> tuple[Run, dict[str, Any]]:
    """Runs the prompts of ``one``, a run on one rank, on several ranks of this machine.

    Args:
        settings: with the number of ranks.

    Returns:
        (the run, {name: number} of what was sent: see `bench.prefill_decode.report`).
    """
    size, model = settings.tensor_parallel_size, built.model
    with ExitStack() as stack:
        directory = built.directory
        if directory is None:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-"))
            )
            save_checkpoint(model, directory)
        llm = LLM(directory, engine=settings, device=model.device.type, dtype=model.dtype)
        stack.callback(llm.close)
        run = run_workload(
            llm.engine,
            workload,
            concurrency=settings.max_num_seqs,
            prompts=one.prompts,
            label=f"{size} ranks",
        )
        memory = llm.engine.memory
        counted = min(COUNTED, memory.max_model_len - 1)
        sent = bytes_sent(llm.engine, counted)
    gc.collect()
    return run, {
        "size": size,
        "memory": memory.describe(),
        "tokens_per_step": sum(step.num_tokens for step in run.steps) / len(run.steps),
        "sum_bytes_per_layer_token": sent["sum"] / (counted * model.config.num_layers),
        "least_bytes_per_layer_token": SUMS * model.config.hidden_size * model.dtype.itemsize,
        "gather_bytes_per_row": sent["gather"] / counted,
        # Of what is summed, a ring sends all but one part twice: once to add it up, once the sum.
        "sent_share": 2 * (size - 1) / size,
        "capacity": one.bytes_per_token / run.bytes_per_token,
    }


def bytes_sent(engine: Engine, num_tokens: int) -> dict[str, int]:
    """Bytes of each kind of message in so many decode steps of one request."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    engine.add_request([engine.model.config.vocab_size - 1], params)
    sent, graphs = engine.model.group.sent, engine.runner.graphs
    engine.runner.graphs = None  # counted eagerly
    before, computed = sent.copy(), 0
    while engine.has_work:
        report = engine.step()
        assert report is not None
        computed += report.num_tokens
    assert computed == num_tokens, (computed, num_tokens)
    engine.runner.graphs = graphs
    return sent - before
