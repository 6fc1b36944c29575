"""The parts of an engine, made in the order in which they need each other.

First what of the memory each gets: graphs, then the pool, then the allocator of its pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quire.kernels.common.impls import expect_impl
from quire.kvcore import KVCache
from quire.kvcore.device import BatchBuilder

from ..flashinfer.planner import FlashInfer
from ..parallel.group import Group
from .config import FLASHINFER, MEMORY_SETTINGS, EngineConfig
from .graphs import DecodeGraphs, Forward, forward_pass, graph_bytes, sizes_to_capture
from .memory import MemoryPlan, make_allocator, model_cache, plan_memory
from .report import IdleClock, StepClock
from .sampler import Sampler
from .scheduler import Scheduler
from .speculative import Drafter, ModelDrafter
from .tiering import EngineTiers, make_tiers
from .warm_up import warm_up


@dataclass(frozen=True)
class EngineParts:
    """What the steps of an engine go through.

    Attributes:
        clock, idle: time of the host, and of the device.
        memory: how the pool was sized.
        kv, pool: the allocator, and the page tensors.
        tiers: what is behind them; None = nothing.
        run: the model over its pages.
        graphs: None where steps are not replayed.
        is_async: whether the tokens of a step are read while the next one runs.
    """

    clock: StepClock
    idle: IdleClock
    memory: MemoryPlan
    kv: KVCache
    pool: Any
    tiers: EngineTiers | None
    scheduler: Scheduler
    builder: BatchBuilder
    sampler: Sampler
    run: Forward
    graphs: DecodeGraphs | None
    is_async: bool


def make_parts(model: nn.Module, config: EngineConfig, drafter: Drafter | None) -> EngineParts:
    """All parts; a drafter that is a part of the model is attached to them.

    Raises:
        ValueError, NotImplementedError: as `quire.models.engine.engine.Engine`.
    """
    try:
        return _make(model, config, drafter)
    except (MemoryError, RecursionError) as error:
        settings = ", ".join(f"{name}={getattr(config, name)}" for name in MEMORY_SETTINGS)
        raise ValueError(
            f"config: expected an engine that fits the memory, got {settings}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _make(model: nn.Module, config: EngineConfig, drafter: Drafter | None) -> EngineParts:
    device, on_gpu = model.device, model.device.type == "cuda"
    group: Group | None = getattr(model, "group", None)
    size = 1 if group is None else group.size
    if config.tensor_parallel_size != size:
        raise ValueError(
            f"tensor_parallel_size: expected {size}, the ranks of this model, got "
            f"{config.tensor_parallel_size}; quire.models.LLM builds models of several ranks"
        )
    split = 1 if group is None or not group.split_context else size
    if config.context_parallel_size != split:
        raise ValueError(
            f"context_parallel_size: expected {split}, as the ranks of this model share the "
            f"context, got {config.context_parallel_size}"
        )
    if split > 1 and config.impl == FLASHINFER:
        raise ValueError("impl: expected kernels of quire for a context that ranks share")
    impl = None if config.impl == FLASHINFER else config.impl
    expect_impl(impl, device.type)
    if hasattr(model, "expect_impl"):
        model.expect_impl(impl or ("triton" if on_gpu else "torch"))
    planner = FlashInfer(model, config).planner if config.impl == FLASHINFER else None
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
        graph_bytes=graph_bytes(
            model, cache, config, sizes, num_drafts, hidden=hidden, make_planner=planner
        ),
    )
    if group is not None:  # what is free differs
        num_pages = min(group.all_say(memory.num_pages))
        alike = replace(config, num_pages=num_pages, cache_bytes=None, memory_fraction=None)
        memory = plan_memory(model, cache, alike, max_draft_tokens=num_drafts)
    kv, clock = make_allocator(model, memory, config), StepClock()
    pool = cache.allocate(memory.num_pages)
    tiers = None
    if config.host_cache_gib is not None:
        tiers = make_tiers(kv, pool, memory, config, device)
    scheduler = Scheduler(
        kv,
        clock,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        policy=config.policy,
        tiers=tiers,
    )
    # Drafts are guessed from tokens that the host knows.
    wanted = on_gpu if config.async_scheduling is None else config.async_scheduling
    is_async = wanted and drafter is None
    # Of each request its newest token, or the drafts behind it.
    unknown = num_drafts if hidden else int(is_async)
    builder = BatchBuilder(kv, device, planner, max_placeholders=config.max_num_seqs * unknown)
    sampler = Sampler(
        model.config.vocab_size,
        config.max_num_seqs,
        device,
        builder.sampled,
        rejection_sample_method=config.rejection_sample_method,
        impl=impl,
        group=group,
    )
    run, graphs = forward_pass(model, pool, config.impl, hidden=hidden), None
    if isinstance(drafter, ModelDrafter):
        drafter.attach(pool, builder, max_requests=config.max_num_seqs, impl=config.impl)
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
    return EngineParts(
        clock=clock,
        idle=IdleClock(device),
        memory=memory,
        kv=kv,
        pool=pool,
        tiers=tiers,
        scheduler=scheduler,
        builder=builder,
        sampler=sampler,
        run=run,
        graphs=graphs,
        is_async=is_async,
    )
