"""The same prompts on several ranks, and the bytes that these send each other."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
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
from .drive import Key, Run, run_workload

SUMS = 2  # of a layer at least: what attention gives, and what the MLP or the experts do
COUNTED = 64  # tokens


def run_on_ranks(
    built: BenchModel,
    directory: Path | None,
    workload: Workload,
    settings: EngineConfig,
    prompts: Mapping[Key, tuple[int, ...]],
    *,
    bytes_per_token: float,
) -> tuple[Run, dict[str, Any]]:
    """Runs a workload on several ranks of this machine.

    Args:
        directory: of the model's weights; None = they are written to a temporary one.
        settings: with the number of ranks.
        prompts: of another run.
        bytes_per_token: of the pool of one rank that has all of the model.

    Returns:
        (the run, {name: number} of what was sent: see `bench.prefill_decode.report`).
    """
    size = settings.tensor_parallel_size
    with ExitStack() as stack:
        if directory is None:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-"))
            save_checkpoint(built.model, made)
            directory = Path(made)
        llm = LLM(
            directory,
            engine=settings,
            device=built.model.device.type,
            dtype=built.model.dtype,
        )
        stack.callback(llm.close)
        concurrency = settings.max_num_seqs
        run = run_workload(
            llm.engine, workload, concurrency=concurrency, prompts=prompts, label=f"{size} ranks"
        )
        memory = llm.engine.memory
        counted = min(COUNTED, memory.max_model_len - 1)
        sent = bytes_sent(llm.engine, counted)
    gc.collect()
    config = built.model.config
    steps = [step.num_tokens for step in run.steps]
    each = counted * config.num_layers
    # Of what is summed, a ring sends all but one part twice: once to add it up, once the sum.
    sent_share = 2 * (size - 1) / size
    return run, {
        "size": size,
        "memory": memory.describe(),
        "tokens_per_step": sum(steps) / len(steps),
        "sum_bytes_per_layer_token": sent["sum"] / each,
        "least_bytes_per_layer_token": SUMS * config.hidden_size * built.model.dtype.itemsize,
        "gather_bytes_per_row": sent["gather"] / counted,
        "sent_share": sent_share,
        "capacity": bytes_per_token / memory.bytes_per_token,
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
