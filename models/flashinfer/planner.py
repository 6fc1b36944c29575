"""Plans of FlashInfer's wrappers, once a step for each cache group: all of a group's layers have
the same heads, window and pages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.common.flashinfer import import_flashinfer
from quire.kvcore.device import Staging

from ..layers.kv_cache import E4M3
from .rows import GroupKeys, Sequences, as_int32, as_rows
from .step import GATHERED_BLOCK, Gathered, GroupStep, PreparedStep
from .support import expect_supported
from .wrappers import (
    Rows,
    Shape,
    decode_wrapper,
    make_workspace,
    plan_decode,
    plan_prefill,
    prefill_wrapper,
)

if TYPE_CHECKING:
    from quire.kvcore import GroupSpec, KVCache, StepPlan

    from ..engine.config import EngineConfig


class FlashInfer:
    """FlashInfer for one engine.

    Args:
        model, config: of the engine.

    Raises:
        NotImplementedError: what it cannot serve, or that it is not installed.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        expect_supported(model, config)
        self.package = import_flashinfer()
        self.device = model.device
        self.workspace = make_workspace(model.device)
        self._model, self._dtype = model.config, model.dtype
        self._kv_dtype = model.dtype if config.kv_cache_dtype == "auto" else E4M3

    def shape(self, group: GroupSpec) -> Shape:
        """Of the layers of a cache group."""
        heads = self._model.full if group.kind == "dense" else self._model.sliding
        return Shape(
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            group.block_size,
            heads.sliding_window,
            self._model.softmax_scale,
            self._dtype,
            self._kv_dtype,
        )

    def planner(self, kv: KVCache) -> StepPlanner:
        """Of an allocator."""
        return StepPlanner(self, kv)


class StepPlanner:
    """Prepares steps, each until the next one: an `AttentionPlanner`.

    Sequences of one new token go through decode wrappers, those behind the first longer one through
    prefill wrappers.

    Args:
        flashinfer: of the engine.
        kv: the allocator.
    """

    def __init__(self, flashinfer: FlashInfer, kv: KVCache) -> None:
        self.kv = kv
        self.shapes = [flashinfer.shape(group) for group in kv.layout.groups]
        self._flashinfer = flashinfer
        self._staging = Staging(flashinfer.device)
        self._decodes: list[Any] = [None] * len(self.shapes)
        self._prefills: list[Any] = [None] * len(self.shapes)
        on_gpu = flashinfer.device.type == "cuda"
        self._copied = torch.cuda.Event() if on_gpu else None

    def step(self, plan: StepPlan) -> PreparedStep:
        """Plans for an eager step, to be called between the plan and its commit."""
        counts = plan.num_new_tokens
        is_longer = counts > 1
        n = len(counts)
        num_decodes = int(is_longer.argmax()) if is_longer.any() else n
        cu_seqlens_q = as_int32(plan.cu_seqlens_q[num_decodes:] - num_decodes)
        short, long = Sequences(plan, 0, num_decodes), Sequences(plan, num_decodes, n)
        self.wait()
        groups = []
        for g in range(len(self.shapes)):
            decode = prefill = gathered = None
            if num_decodes:
                decode = self._decode(g, GroupKeys(self.kv, plan, g, short).paged())
            if num_decodes < n:
                keys = GroupKeys(self.kv, plan, g, long)
                if keys.are_kept:
                    prefill = self._prefill(g, cu_seqlens_q, keys.paged())
                else:
                    *arrays, copies = keys.gather()
                    prefill = self._prefill(g, cu_seqlens_q, copies, gathered=True)
                    num_pages = len(copies.indices)
                    gathered = Gathered(*self._staging.send(arrays), num_decodes, num_pages)
            groups.append(GroupStep(decode, prefill, gathered))
        self.note_copies()
        return PreparedStep(num_decodes, tuple(groups))

    def padding(self, num_decodes: int, num_tokens: int) -> PreparedStep:
        """Plans for a step of padding, every key in the null page: all kernels are loaded.

        Args:
            num_decodes: sequences of one token.
            num_tokens: of the sequence behind them.
        """
        cu_seqlens_q = as_int32([0, num_tokens])
        self.wait()
        groups = []
        for g, shape in enumerate(self.shapes):
            decode = self._decode(g, padded(None, num_decodes)) if num_decodes else None
            # The last plan is the one that runs.
            for gathered in (False,) if shape.sliding_window is None else (True, False):
                size = GATHERED_BLOCK if gathered else shape.block_size
                num_pages = -(-num_tokens // size)
                last = [num_tokens - (num_pages - 1) * size]
                rows = as_rows([0, num_pages], np.zeros(num_pages), last)
                prefill = self._prefill(g, cu_seqlens_q, rows, gathered=gathered)
            groups.append(GroupStep(decode, prefill))
        self.note_copies()
        return PreparedStep(num_decodes, tuple(groups))

    def fixed(self, num_seqs: int, rows: int) -> FixedStep:
        """For a graph of a decode step.

        Args:
            num_seqs: sequences.
            rows: of each.

        Raises:
            NotImplementedError: several rows.
        """
        if rows > 1:
            raise NotImplementedError(
                "with impl='flashinfer', graphs are of sequences of one row: a draft that is "
                "missing has no place among the keys"
            )
        return FixedStep(self, num_seqs)

    def make_decode(self, group: int, fixed: Rows | None = None) -> Any:
        """A decode wrapper for the layers of a group."""
        return decode_wrapper(
            self._flashinfer.package,
            self._flashinfer.workspace,
            head_dim=self.shapes[group].head_dim,
            fixed=fixed,
        )

    def buffers(self, group: int, num_seqs: int) -> Rows:
        """Of a graph: room for the longest rows of so many sequences."""
        # Of a window, the ring and the block that is started.
        num_pages = num_seqs * (self.kv.layout.columns(group)[1] + 1)

        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._flashinfer.device)

        return Rows(zeros(num_seqs + 1), zeros(num_pages), zeros(num_seqs))

    def wait(self) -> None:
        """Waits until the device has what earlier plans sent: wrappers send from pinned memory,
        which the next plan writes to."""
        if self._copied is not None:
            self._copied.synchronize()

    def note_copies(self) -> None:
        """What was sent until now `wait` waits for."""
        if self._copied is not None:
            self._copied.record()

    def _decode(self, group: int, rows: Rows) -> Any:
        wrapper = self._decodes[group] = self._decodes[group] or self.make_decode(group)
        plan_decode(wrapper, self.shapes[group], rows)
        return wrapper

    def _prefill(
        self, group: int, cu_seqlens_q: Tensor, rows: Rows, *, gathered: bool = False
    ) -> Any:
        wrapper = self._prefills[group]
        if wrapper is None:
            flashinfer = self._flashinfer
            wrapper = prefill_wrapper(flashinfer.package, flashinfer.workspace)
            self._prefills[group] = wrapper
        shape = self.shapes[group]
        if gathered:
            shape = replace(shape, block_size=GATHERED_BLOCK, kv_dtype=shape.dtype)
        plan_prefill(wrapper, shape, cu_seqlens_q, rows)
        return wrapper


class FixedStep:
    """A decode step of a fixed number of sequences, whose wrappers read fixed buffers.

    FlashInfer plans on the host, so a plan is no part of a graph: it is made before each replay.

    Attributes:
        step: what layers attend through.
    """

    def __init__(self, planner: StepPlanner, num_seqs: int) -> None:
        self._planner, self._num_seqs = planner, num_seqs
        groups = range(len(planner.shapes))
        wrappers = [planner.make_decode(g, planner.buffers(g, num_seqs)) for g in groups]
        self.step = PreparedStep(num_seqs, tuple(GroupStep(wrapper) for wrapper in wrappers))
        self.plan(None)

    def plan(self, plan: StepPlan | None) -> None:
        """Plans for a step, to be called between the plan and its commit, or for padding alone."""
        planner = self._planner
        sequences = None if plan is None else Sequences(plan, 0, len(plan.slots))
        planner.wait()
        for g, (group, shape) in enumerate(zip(self.step.groups, planner.shapes, strict=True)):
            rows = None
            if plan is not None:
                rows = GroupKeys(planner.kv, plan, g, sequences).paged()
            plan_decode(group.decode, shape, padded(rows, self._num_seqs))
        planner.note_copies()


def padded(rows: Rows | None, num_seqs: int) -> Rows:
    """Rows with sequences behind them that have one key, in the null page.

    Args:
        rows: None = padding alone.
        num_seqs: of the result.
    """
    if rows is None:
        rows = as_rows([0], [], [])
    missing = num_seqs - len(rows.last_page_len)
    if not missing:
        return rows
    ones, pages = as_int32(np.ones(missing)), as_int32(np.zeros(missing))
    indptr = rows.indptr[-1] + as_int32(np.arange(1, missing + 1))
    return Rows(
        torch.cat((rows.indptr, indptr)),
        torch.cat((rows.indices, pages)),
        torch.cat((rows.last_page_len, ones)),
    )
