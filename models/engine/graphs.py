"""Decode steps of a few batch sizes, captured once as CUDA graphs and replayed.

A step writes its integers into the buffers that the graph reads: one copy from pinned memory, and
the table entries that changed. The gathering of block tables is part of the graph. A batch is
padded to the next size; a padding row has length 0 and slot -1: it sees nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.kvcore import StepPlan

from .batch import AttnMetadata, BatchBuilder, Staging

if TYPE_CHECKING:
    from .config import EngineConfig

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on fixed buffers, and returns what does it again on their contents of then."""
Forward = Callable[[Tensor, Tensor, AttnMetadata], Tensor]
"""(input_ids, positions, attn) -> logits [num_seqs, vocab_size]."""

WARM_UP_RUNS = 2


@dataclass(frozen=True)
class _Graph:
    """A captured decode step of one batch size.

    Attributes:
        rows: [4 + num_tables, size] int64: input ids, positions, lengths, allocator slots, and slot
            mappings.
        work: what was captured. A replay knows the tensors that it reads by address only: this
            keeps them.
    """

    rows: Tensor
    logits: list[Tensor]
    work: Callable[[], None]
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs steps in which every sequence has one new token.

    Args:
        forward: the model.
        builder: whose tables the graphs read.
        sizes: batches to capture, ascending (`sizes_to_capture`).
        max_seq_len: the longest sequence.
        capture: default: CUDA graphs on a GPU, and on a CPU the same work called again.
    """

    def __init__(
        self,
        forward: Forward,
        builder: BatchBuilder,
        *,
        sizes: Sequence[int],
        max_seq_len: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self._builder = builder
        self._max_seq_len = max_seq_len
        self._device = device
        self._staging = Staging(device)
        self._capture = capture or (CudaCapture(device) if device.type == "cuda" else call_again)
        self._graphs: dict[int, _Graph] = {}

    def __call__(self, plan: StepPlan, input_ids: np.ndarray) -> Tensor:
        """Logits of one decode step, to be called between the plan and its commit.

        Args:
            plan: with one new token for each sequence.
            input_ids: [num_seqs] int32.

        Returns:
            [num_seqs, vocab_size] fp32, valid until the next call.
        """
        n = len(plan.slots)
        size = next(s for s in self.sizes if s >= n)
        rows = np.zeros((4 + len(plan.slot_mapping), size), dtype=np.int64)
        rows[0, :n], rows[1, :n], rows[2, :n], rows[3, :n] = (
            input_ids,
            plan.positions,
            plan.seq_lens,
            plan.slots,
        )
        rows[4:, :n], rows[4:, n:] = plan.slot_mapping, -1
        self._builder.update_tables()
        if size not in self._graphs:
            self._graphs[size] = self._make(size, len(rows))
        graph = self._graphs[size]
        graph.rows.copy_(self._staging.send([rows])[0], non_blocking=True)
        graph.replay()
        return graph.logits[0][:n]

    def _make(self, size: int, num_rows: int) -> _Graph:
        # Padding rows all through: what a warm-up run must not do is write.
        rows = torch.zeros(num_rows, size, dtype=torch.int64, device=self._device)
        rows[4:] = -1
        cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=self._device)
        logits: list[Tensor] = []

        def work() -> None:
            slots = rows[3]
            tables = self._builder.tables
            attn = AttnMetadata(
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=rows[2].to(torch.int32),
                block_tables=tuple(
                    tables[:, first : first + width].index_select(0, slots)
                    for first, width in self._builder.columns
                ),
                slot_mappings=tuple(rows[4:].unbind(0)),
                max_seqlen_q=1,
                max_seq_len=self._max_seq_len,
                num_decodes=size,
                request_slots=slots.to(torch.int32),
            )
            logits[:] = [self._forward(rows[0], rows[1], attn)]

        return _Graph(rows, logits, work, self._capture(work))


def sizes_to_capture(
    config: EngineConfig, device: torch.device, *, drafter_in_model: bool
) -> list[int]:
    """Batch sizes that an engine decodes through graphs; none where it does not.

    Args:
        drafter_in_model: whether a drafter reads the model's hidden states, which no graph returns.

    Raises:
        NotImplementedError: ``config.decode_graphs`` asks for what cannot be.
    """
    on_gpu = device.type == "cuda"
    possible = not drafter_in_model and not (on_gpu and config.impl == "torch")
    if config.decode_graphs and not possible:
        raise NotImplementedError(
            "decode_graphs: supported with impl='triton' on a GPU, and no drafter in the model"
        )
    wanted = on_gpu if config.decode_graphs is None else config.decode_graphs
    return batch_sizes(config.max_num_seqs) if possible and wanted else []


def batch_sizes(largest: int) -> list[int]:
    """Sizes to capture.

    1, 2, 4, 8, then multiples of 8 up to 64 and of 32 beyond, and the largest itself.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest + 1, 32)]
    return [s for s in sizes if s < largest] + [largest]


class CudaCapture:
    """Captures work as CUDA graphs that share one pool of memory and one stream.

    Only one of them runs at a time.

    Args:
        device: of the work, and the current one of every call.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Not torch's own: that is on whichever device captured first. And on a stream of their own,
        # warm-up runs would leave cuBLAS another workspace for each size (32 MiB on Hopper).
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs ``work`` a few times, then captures it.

        So kernels are compiled and libraries have their workspaces before.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay


def call_again(work: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a capture where there is no GPU.

    A replay does the work anew, on the same buffers.
    """
    return work
