"""Decode steps of a few batch sizes, captured once as CUDA graphs and replayed.

A step writes its integers into the buffers that the graph reads, in one copy. A batch is padded to
the next size; a padding row has length 0 and slot -1: it sees nothing and writes nothing. Steps
with drafts have graphs of 1 + max_draft_tokens rows a sequence, filled up behind the drafts::

    input   last d1 d2 filler | last d1 d2 d3 | 0  0  0  0      2 drafts, 3 drafts, padding
    slot    168 169 170 -1    | 39  40 41 42  | -1 -1 -1 -1
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quire.kvcore import StepArrays, StepPlan
from quire.kvcore.device import AttnMetadata, BatchBuilder, Staging

from .config import EngineConfig

if TYPE_CHECKING:
    from ..parallel.group import Group
    from .runner import Forward

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on fixed buffers; returns a function that repeats it on their new contents."""

WARM_UP_RUNS = 2


class GraphShape(NamedTuple):
    """Number of sequences of a graph, and the rows of each."""

    num_seqs: int
    rows: int


@dataclass(frozen=True)
class _Graph:
    """A captured decode step of one shape."""

    data: Tensor  # [n] int64, the integers of a step, in the parts of `_split`
    out: list[Tensor | tuple[Tensor, Tensor]]
    work: Callable[[], None]  # keeps tensors alive that a replay knows by address
    replay: Callable[[], None]


class DecodeGraphs:
    """Run steps in which every sequence decodes.

    Args:
        sizes: batch sizes to capture, ascending (`sizes_to_capture`).
        max_draft_tokens: above 0 there are graphs for steps with drafts too.
        group: ranks that replay the same shapes.

    Attributes:
        shapes: captured shapes, by their rows.
    """

    def __init__(
        self,
        forward: Forward,
        builder: BatchBuilder,
        *,
        sizes: Sequence[int],
        max_seq_len: int,
        device: torch.device,
        max_draft_tokens: int = 0,
        group: Group | None = None,
    ) -> None:
        rows = {1, 1 + max_draft_tokens}
        wanted = [GraphShape(size, r) for size in sizes for r in rows]
        self.shapes = sorted(wanted, key=lambda shape: (shape.num_seqs * shape.rows, shape))
        self._forward, self._group = forward, group
        self._builder = builder
        self._max_seq_len = max_seq_len
        self._device = device
        self._staging = Staging(device)
        self._capture = default_capture(device)
        self._graphs: dict[GraphShape, _Graph] = {}

    def capture(self) -> None:
        """Capture every shape that can be on all ranks; other steps use a larger one or none."""
        # The largest comes first: the others then find their memory in its.
        failed: dict[GraphShape, Exception] = {}
        for shape in reversed(self.shapes):
            try:
                self.add(shape)
            except Exception as error:
                failed[shape] = error
        if failed:
            names = ", ".join(f"{shape.num_seqs} x {shape.rows}" for shape in failed)
            error = next(iter(failed.values()))
            warnings.warn(
                f"decode graphs: {names} (sequences x rows) cannot be captured, and run without: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        dropped = [*failed]
        if self._group is not None:
            lists = self._group.channel.all_gather(dropped)
            dropped = [GraphShape(*shape) for shapes in lists for shape in shapes]
        self.shapes = [shape for shape in self.shapes if shape not in dropped]

    def shape_of(self, plan: StepPlan, num_rows: int) -> GraphShape | None:
        """The smallest captured shape for a step; None = none, as for one with a prefill chunk.

        num_rows: rows of the step whose logits are wanted.
        """
        counts, rows = plan.num_new_tokens, 1
        if num_rows < len(plan.positions):
            return None
        if len(plan.positions) > len(counts):
            rows = max((shape.rows for shape in self.shapes), default=0)
        if (plan.seq_lens - counts).max() + rows > self._max_seq_len or counts.max() > rows:
            return None
        fitting = (s for s in self.shapes if s.rows == rows and s.num_seqs >= len(counts))
        return next(fitting, None)

    def __call__(
        self, shape: GraphShape, plan: StepPlan | StepArrays, input_ids: np.ndarray
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Output of one decode step, valid until the next call; run between plan and commit.

        input_ids: [num_tokens] int32, or placeholders (`BatchBuilder`).
        """
        n, total, counts = len(plan.slots), len(plan.positions), plan.num_new_tokens
        graph = self._graphs[shape]
        data = np.zeros(len(graph.data), dtype=np.int64)
        tokens, seq_lens, slots = _split(data, shape)
        start = plan.seq_lens - counts
        tokens[1].reshape(shape)[:n] = start[:, None] + np.arange(shape.rows)
        seq_lens[:n], slots[:n] = start + shape.rows, plan.slots
        tokens[2:] = -1
        # Where the step's rows are among those of the graph.
        at = np.arange(total) + np.repeat(
            np.arange(n) * shape.rows - plan.cu_seqlens_q[:-1], counts
        )
        tokens[0, at], tokens[2:, at] = input_ids, plan.slot_mapping
        dense = at[-1] == total - 1
        sent = self._staging.send([data] if dense else [data, at])
        self._builder.update_tables()
        graph.data.copy_(sent[0], non_blocking=True)
        graph.replay()
        return tree_map(lambda x: x[:total] if dense else x[sent[1]], graph.out[0])

    def add(self, shape: GraphShape) -> None:
        """Capture one shape; raise the errors of its capture."""
        # Padding rows only, as a warm-up run must not write.
        num_tokens = shape.num_seqs * shape.rows
        size = (2 + self._builder.num_groups) * _even(num_tokens) + 2 * shape.num_seqs
        data = torch.zeros(size, dtype=torch.int64, device=self._device)
        tokens, seq_lens, slots = _split(data, shape)
        tokens[2:] = -1
        cu_seqlens_q = torch.arange(
            0, num_tokens + 1, shape.rows, dtype=torch.int32, device=self._device
        )
        out: list[Tensor | tuple[Tensor, Tensor]] = []
        forward, builder, max_seq_len = self._forward, self._builder, self._max_seq_len

        def work() -> None:
            attn = AttnMetadata(
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=seq_lens.to(torch.int32),
                block_tables=builder.gather(slots, max_seq_len),
                slot_mappings=tuple(tokens[2:].unbind(0)),
                max_seqlen_q=shape.rows,
                max_seq_len=max_seq_len,
                num_decodes=shape.num_seqs,
                request_slots=slots.to(torch.int32),
            )
            out[:] = [forward(builder.token_ids(tokens[0]), tokens[1], attn)]

        self._graphs[shape] = _Graph(data, out, work, self._capture(work))


def _even(count: int) -> int:
    """Width of a row of int64 after which the next starts at a multiple of 16 bytes."""
    return count + count % 2


def _split(data: Any, shape: GraphShape) -> tuple[Any, Any, Any]:
    """Views: tokens [2 + num_groups, num_tokens] (ids, positions, slot mappings); seq_lens
    [num_seqs]; the allocator's slots [num_seqs]."""
    num_tokens = shape.num_seqs * shape.rows
    tokens = data[: len(data) - 2 * shape.num_seqs].reshape(-1, _even(num_tokens))[:, :num_tokens]
    seq_lens, slots = data[len(data) - 2 * shape.num_seqs :].reshape(2, -1)
    return tokens, seq_lens, slots


def sizes_to_capture(config: EngineConfig, device: torch.device) -> list[int]:
    """Batch sizes that an engine decodes through graphs.

    1, 2, 4, 8, then multiples of 8 up to 64 and of 32 beyond, and the largest itself.

    Raises:
        NotImplementedError: ``config.decode_graphs`` is True and impl cannot be captured.
    """
    on_gpu = device.type == "cuda"
    possible = not (on_gpu and config.impl == "torch")
    if config.decode_graphs and not possible:
        raise NotImplementedError(
            f"decode_graphs: supported with impl='triton' on a GPU, got impl={config.impl!r}"
        )
    wanted = on_gpu if config.decode_graphs is None else config.decode_graphs
    if not (possible and wanted):
        return []
    largest = config.max_num_seqs
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest + 1, 32)]
    return [s for s in sizes if s < largest] + [largest]


class CudaCapture:
    """Capture work as CUDA graphs that share one pool of memory and one stream."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Not torch's own: that is on whichever device captured first. And on a stream of their own,
        # warm-up runs would leave cuBLAS another workspace for each size (32 MiB on Hopper).
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work``, then capture it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):  # compile kernels, allocate workspaces
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay


def default_capture(device: torch.device) -> Capture:
    """CUDA graphs on a GPU; on a CPU a replay does the work again."""
    return CudaCapture(device) if device.type == "cuda" else lambda work: work
