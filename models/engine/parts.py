"""The parts of an engine, made in the order in which they need each other.

First what of the memory each gets: graphs, then the pool, then the allocator of its pages. Of
several ranks each has a `ModelRunner`, and rank 0 alone the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quire.kernels.common.checks import expect_impl
from quire.kvcore import KVCache, WorkerTables
from quire.kvcore.device import BatchBuilder

from ..parallel.group import Group
from .config import MEMORY_SETTINGS, EngineConfig
from .graphs import DecodeGraphs, Forward, forward_pass, graph_bytes, sizes_to_capture
from .memory import MemoryPlan, make_allocator, model_cache, plan_memory
from .report import IdleClock, StepClock
from .sampler import Sampler
from .scheduler import Scheduler
from .speculative import Drafter, ModelDrafter
from .tiering import EngineTiers, make_tiers
from .warm_up import warm_up


@dataclass(frozen=True)
class ModelRunner:
    """What runs the steps of a model on one device.

    Attributes:
        memory: how the pool was sized.
        kv: the allocator; None on all ranks but rank 0.
        tables: the block tables that `builder` reads: the allocator, or a rank's copy.
        pool: the page tensors.
        tiers: what is behind them; None = nothing.
        run: the model over its pages.
        graphs: None where steps are not replayed.
        is_async: whether the tokens of a step are read while the next one runs.
    """

    memory: MemoryPlan
    kv: KVCache | None
    tables: KVCache | WorkerTables
    pool: Any
    tiers: EngineTiers | None
    builder: BatchBuilder
    run: Forward
    graphs: DecodeGraphs | None
    is_async: bool


@dataclass(frozen=True)
class EngineParts:
    """What the steps of an engine go through.

    Attributes:
        clock, idle: time of the host, and of the device.
    """

    clock: StepClock
    idle: IdleClock
    runner: ModelRunner
    scheduler: Scheduler
    sampler: Sampler


def make_parts(model: nn.Module, config: EngineConfig, drafter: Drafter | None) -> EngineParts:
    """All parts; a drafter that is a part of the model is attached to them.

    Raises:
        ValueError, NotImplementedError: as `quire.models.engine.engine.Engine`.
    """
    try:
        return _make(model, config, make_runner(model, config, drafter))
    except (MemoryError, RecursionError) as error:
        settings = ", ".join(f"{name}={getattr(config, name)}" for name in MEMORY_SETTINGS)
        raise ValueError(
            f"config: expected an engine that fits the memory, got {settings}: "
            f"{type(error).__name__}: {error}"
        ) from error


def make_runner(model: nn.Module, config: EngineConfig, drafter: Drafter | None) -> ModelRunner:
    """The model with its pages; of several ranks each calls this at the same time.

    Raises:
        ValueError, NotImplementedError: as `quire.models.engine.engine.Engine`.
    """
    device, on_gpu = model.device, model.device.type == "cuda"
    group: Group | None = getattr(model, "group", None)
    size = 1 if group is None else group.size
    if config.tensor_parallel_size != size:
        raise ValueError(
            f"tensor_parallel_size: expected {size}, the ranks of this model, got "
            f"{config.tensor_parallel_size}; quire.models.LLM builds models of several ranks"
        )
    impl = config.impl
    expect_impl(impl, device.type)
    if hasattr(model, "expect_impl"):
        model.expect_impl(impl or ("triton" if on_gpu else "torch"))
    num_drafts = drafter.max_draft_tokens if drafter else 0
    hidden = isinstance(drafter, ModelDrafter)
    cache = model_cache(
        model,
        base_block_size=config.base_block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        max_requests=config.max_num_seqs,
        max_draft_tokens=num_drafts,
        drafter_layers=hidden,
    )
    sizes = sizes_to_capture(config, device)
    memory = plan_memory(
        model,
        cache,
        config,
        max_draft_tokens=num_drafts,
        graph_bytes=graph_bytes(model, cache, config, sizes, num_drafts, hidden=hidden),
    )
    if group is not None:  # what is free differs
        num_pages = min(group.channel.all_say(memory.num_pages))
        alike = replace(config, num_pages=num_pages, cache_bytes=None, memory_fraction=None)
        memory = plan_memory(model, cache, alike, max_draft_tokens=num_drafts)
    kv = tables = None
    if group is None or group.rank == 0:
        kv = tables = make_allocator(model, memory, config)
    if group is not None:
        tables = WorkerTables(
            memory.groups,
            max_requests=config.max_num_seqs,
            max_model_len=memory.max_model_len,
            max_draft_tokens=num_drafts,
        )
    pool = cache.allocate(memory.num_pages)
    tiers = None
    if config.host_cache_gib is not None:
        tiers = make_tiers(kv, pool, memory, config, device)
    # Drafts are guessed from tokens that the host knows.
    wanted = on_gpu if config.async_scheduling is None else config.async_scheduling
    is_async = wanted and drafter is None
    # Of each request its newest token, or the drafts behind it.
    unknown = num_drafts if hidden else int(is_async)
    builder = BatchBuilder(tables, device, max_placeholders=config.max_num_seqs * unknown)
    run, graphs = forward_pass(model, pool, impl, hidden=hidden), None
    if isinstance(drafter, ModelDrafter):
        drafter.attach(pool, builder, max_requests=config.max_num_seqs, impl=impl)
    if sizes:
        graphs = DecodeGraphs(
            run,
            builder,
            sizes=sizes,
            max_seq_len=memory.max_model_len,
            max_draft_tokens=num_drafts,
            device=device,
            group=group,
        )
        with torch.inference_mode(), torch.cuda.device_of(builder.tables):
            graphs.capture()
            if isinstance(drafter, ModelDrafter):
                drafter.capture(sizes, memory.max_model_len, graphs.capture_work)
            if on_gpu or config.impl == "triton":
                warm_up(run, builder, config, memory.max_model_len, device)
    return ModelRunner(memory, kv, tables, pool, tiers, builder, run, graphs, is_async)


def _make(model: nn.Module, config: EngineConfig, runner: ModelRunner) -> EngineParts:
    clock = StepClock()
    scheduler = Scheduler(
        runner.kv,
        clock,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        policy=config.policy,
        tiers=runner.tiers,
    )
    sampler = Sampler(
        model.config.vocab_size,
        config.max_num_seqs,
        model.device,
        runner.builder.sampled,
        rejection_sample_method=config.rejection_sample_method,
        impl=config.impl,
    )
    return EngineParts(clock, IdleClock(model.device), runner, scheduler, sampler)
