"""The model on one device: its pages, block tables and graphs. Each rank has one.

Memory is given out in order: the pool, then graphs and the other buffers of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.common.checks import expect_impl
from quire.kvcore import KVCache, StepArrays, StepPlan, WorkerTables
from quire.kvcore.device import AttnMetadata, Batch, BatchBuilder

from .config import EngineConfig
from .device_drafter import DeviceDrafter
from .graphs import DecodeGraphs, GraphShape, sizes_to_capture
from .host_tier import HostTier
from .memory import MemoryPlan, model_cache, plan_memory
from .report import MODEL, StepClock
from .speculative import Drafter

# Tokens, or a length, below which all steps take the same kernels.
SHORTEST_WARM_UP = 64


class ModelRunner:
    """The model with its pages. On several ranks each makes one at the same time.

    Attributes:
        clock: time of the running step.
        memory: the size of the pool.
        kv: the allocator; None on all ranks but rank 0.
        tables: the block tables that `builder` reads: the allocator, or a rank's copy.
        pool: the page tensors.
        host_tier: the host tier; None = none.
        builder: makes the tensors of a step.
        graphs: decode graphs; None = none.
        is_async: True if the tokens of a step are read while the next one runs.

    Raises:
        ValueError, NotImplementedError: as `quire.models.engine.engine.Engine`.
    """

    def __init__(self, model: nn.Module, config: EngineConfig, drafter: Drafter | None) -> None:
        device, group = model.device, getattr(model, "group", None)
        on_gpu = device.type == "cuda"
        num_ranks = 1 if group is None else group.size
        if config.tensor_parallel_size != num_ranks:
            raise ValueError(
                f"tensor_parallel_size: expected {num_ranks}, the ranks of this model, got "
                f"{config.tensor_parallel_size}; quire.models.LLM builds models of several ranks"
            )
        self.impl = config.impl
        expect_impl(self.impl, device.type)
        if hasattr(model, "expect_impl"):
            model.expect_impl(self.impl or ("triton" if on_gpu else "torch"))

        num_drafts = 0 if drafter is None else drafter.max_draft_tokens
        self.has_hidden = isinstance(drafter, DeviceDrafter)
        cache = model_cache(
            model,
            kv_cache_dtype=config.kv_cache_dtype,
            max_requests=config.max_num_seqs,
            max_draft_tokens=num_drafts,
            drafter_layers=self.has_hidden,
        )
        sizes = sizes_to_capture(config, device)

        self.memory = plan_memory(model, cache, config, max_draft_tokens=num_drafts)
        if group is not None:  # all ranks have the pages of the one with the least memory
            num_pages = min(group.channel.all_gather(self.memory.num_pages))
            alike = replace(config, num_pages=num_pages, memory_fraction=None)
            self.memory = plan_memory(model, cache, alike, max_draft_tokens=num_drafts)
        memory, is_first = self.memory, group is None or group.rank == 0
        self.kv = _make_kv(model, memory, config) if is_first else None
        self.tables = self.kv
        if num_ranks > 1:
            self.tables = WorkerTables(
                memory.groups,
                max_requests=config.max_num_seqs,
                max_model_len=memory.max_model_len,
                max_draft_tokens=num_drafts,
            )
        self.pool = cache.allocate(memory.num_pages)
        self.host_tier = None
        if config.host_cache_gib is not None:
            self.host_tier = HostTier(self.kv, self.pool, memory, config, device)

        self.clock = StepClock(device)
        # With drafts, the host plans a step once it knows how many drafts of the last one hold.
        wants_async = on_gpu if config.async_scheduling is None else config.async_scheduling
        self.is_async = wants_async and drafter is None
        # Of each request its newest token, or the drafts behind it.
        placeholders = num_drafts if self.has_hidden else int(self.is_async)
        self.builder = BatchBuilder(
            self.tables, device, max_placeholders=config.max_num_seqs * placeholders
        )
        # `Decoder.forward`, or that of DeepSeek-V4, over its pages; it keeps no engine alive.
        options = {"return_hidden": True} if self.has_hidden else {}
        self.forward: Forward = partial(model, pool=self.pool, impl=self.impl, **options)
        if self.has_hidden:
            drafter.attach(
                self.pool, self.builder, max_requests=config.max_num_seqs, impl=self.impl
            )
        self.graphs = None
        if sizes:
            self.graphs = DecodeGraphs(
                self.forward,
                self.builder,
                sizes=sizes,
                max_seq_len=memory.max_model_len,
                max_draft_tokens=num_drafts,
                device=device,
                group=group,
            )
            with torch.inference_mode(), torch.cuda.device_of(self.builder.tables):
                self.graphs.capture()
                if on_gpu or config.impl == "triton":
                    warm_up(self.forward, self.builder, config, memory.max_model_len)

    def run(
        self,
        plan: StepPlan | StepArrays,
        input_ids: np.ndarray,
        rows: np.ndarray,
        shape: GraphShape | None,
    ) -> tuple[Tensor, Tensor | None, Batch | None]:
        """Run the model, between the plan of a step and its commit; a GPU is not waited for.

        Args:
            input_ids, rows: as in `quire.kvcore.device.BatchBuilder.build`.
            shape: graph to replay; None = no graph.

        Returns:
            (logits [num_rows, vocab_size], hidden states, batch); without a `DeviceDrafter` the
            hidden states are None.
        """
        batch = None
        if shape is None or self.has_hidden:
            batch = self.builder.build(plan, input_ids, rows)
        self.clock.switch(MODEL)
        if shape is not None:
            out = self.graphs(shape, plan, input_ids)
        else:
            out = self.forward(
                batch.input_ids, batch.positions, batch.attn, logits_rows=batch.logits_rows
            )
        return (*out, batch) if self.has_hidden else (out, None, batch)


def _make_kv(model: nn.Module, memory: MemoryPlan, config: EngineConfig) -> KVCache:
    return KVCache(
        memory.groups,
        num_pages=memory.num_pages,
        max_requests=config.max_num_seqs,
        max_model_len=memory.max_model_len,
        retention=config.retention,
        enable_caching=config.enable_caching,
        max_draft_tokens=memory.max_draft_tokens,
        replay_tokens=model.config.replay_tokens if config.replay else None,
        track_deltas=True,
    )


Forward = Callable[..., "Tensor | tuple[Tensor, Tensor]"]
"""(input_ids, positions, attn, *, logits_rows=None) -> logits, or (logits, hidden states)."""


def warm_up(
    forward: Forward, builder: BatchBuilder, config: EngineConfig, max_seq_len: int
) -> None:
    """Run steps of padding, so that no later step compiles a kernel.

    Prompts alone and beside decodes, of short and of long sequences: kernels depend on that, and on
    powers of two of tokens and lengths. Padding has no pages: no row is written or read.
    """
    most = config.max_num_batched_tokens
    for num_decodes in {0, min(1, config.max_num_seqs - 1), min(config.max_num_seqs, most) - 1}:
        if num_decodes < most:
            num_tokens = min(max_seq_len, most - num_decodes)
            for longest in (1, max_seq_len):
                _run_padding(forward, builder, num_decodes, num_tokens, longest)
    size = SHORTEST_WARM_UP
    while size < max(most, max_seq_len):
        longest = min(size, max_seq_len)
        _run_padding(forward, builder, 0, min(longest, most), longest)
        size *= 2


def _run_padding(
    forward: Forward, builder: BatchBuilder, num_decodes: int, num_tokens: int, max_seq_len: int
) -> None:
    num_seqs, total, device = num_decodes + 1, num_decodes + num_tokens, builder.tables.device
    slots = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    tokens = torch.zeros(total, dtype=torch.int64, device=device)
    cu_seqlens_q = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    cu_seqlens_q[-1] = total
    attn = AttnMetadata(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=torch.zeros(num_seqs, dtype=torch.int32, device=device),
        block_tables=builder.gather(slots, max_seq_len),
        slot_mappings=(tokens - 1,) * builder.num_groups,
        max_seqlen_q=num_tokens,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        request_slots=slots.to(torch.int32),
    )
    forward(tokens, tokens.clone(), attn, logits_rows=cu_seqlens_q[1:].long() - 1)
