"""The same prompts on several ranks of this machine."""

from __future__ import annotations

import gc
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.models.engine.config import EngineConfig
from quire.models.llm import LLM

from ..common.hf_checkpoint import save_checkpoint
from ..common.workload import Workload
from .build import BenchModel
from .drive import WorkloadRun, run_workload


def run_on_ranks(
    built: BenchModel, workload: Workload, settings: EngineConfig, one: WorkloadRun
) -> tuple[WorkloadRun, dict[str, Any]]:
    """Run the prompts of ``one``, a run on one rank, on those that ``settings`` names.

    Returns:
        (the run, {name: number}: see `bench.prefill_decode.report`).
    """
    size, model = settings.tensor_parallel_size, built.model
    with ExitStack() as stack:
        directory = built.directory
        if directory is None:
            folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
            directory = Path(stack.enter_context(folder))
            save_checkpoint(model, directory)
        llm = LLM(directory, engine=settings, device=model.device.type, dtype=model.dtype)
        stack.callback(llm.close)
        label, concurrency = f"{size} ranks", settings.max_num_seqs
        run = run_workload(
            llm.engine, workload, concurrency=concurrency, prompts=one.prompts, label=label
        )
        memory = llm.engine.memory.describe()
    gc.collect()
    capacity = one.bytes_per_token / run.bytes_per_token
    return run, {"size": size, "memory": memory, "capacity": capacity}
