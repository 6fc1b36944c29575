"""Decode steps of a few batch sizes, captured once as CUDA graphs and replayed.

A step writes its integers into the buffers that the graph reads: one copy from pinned memory, and
the table entries that changed. The gathering of block tables is part of the graph. A batch is
padded to the next size; a padding row has length 0 and slot -1: it sees nothing and writes nothing.

A step with drafts runs through graphs of 1 + max_draft_tokens rows a sequence. Where a sequence has
fewer drafts, filler follows them: rows that no other row sees and that are written nowhere, as if
they were drafts that are taken back. With room for three drafts, of which the first sequence has
two, and one sequence of padding:

    row            0     1     2     3       4     5     6     7       8     9     10    11
    input          last  d1    d2    filler  last  d1    d2    d3      0     0     0     0
    position       40    41    42    43      7     8     9     10      (none)
    slot           168   169   170   -1      39    40    41    42      -1    -1    -1    -1
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quire.kvcore import KVCache, StepArrays, StepPlan
from quire.kvcore.device import AttnMetadata, BatchBuilder, Staging

from .config import EngineConfig
from .memory import free_memory

if TYPE_CHECKING:
    from ..parallel.group import Group
    from .memory import ModelCache

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on fixed buffers, and returns what does it again on their contents of then."""
Forward = Callable[[Tensor, Tensor, AttnMetadata], "Tensor | tuple[Tensor, Tensor]"]
"""(input_ids, positions, attn) -> logits [num_tokens, vocab_size], or (logits, hidden states)."""

WARM_UP_RUNS = 2
# Where captures take memory that is worth measuring.
MEASURED_ON = ("cuda",)


class Shape(NamedTuple):
    """What one graph holds: a number of sequences, and the rows of each."""

    num_seqs: int
    rows: int


@dataclass(frozen=True)
class _Graph:
    """A captured decode step of one shape.

    Attributes:
        data: [n] int64, what a step fills; `_split` has its parts.
        out: what the model gave.
        work: what was captured. A replay knows the tensors that it reads by address only: this
            keeps them.
    """

    data: Tensor
    out: list[Tensor | tuple[Tensor, Tensor]]
    work: Callable[[], None]
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs steps in which every sequence decodes.

    Args:
        forward: the model.
        builder: whose tables the graphs read.
        sizes: batches to capture, ascending (`sizes_to_capture`).
        max_seq_len: the longest sequence.
        max_draft_tokens: of a step; above 0 there are graphs for steps with drafts too.
        capture: default: that of the device (`default_capture`).
        group: ranks that replay the same shapes.

    Attributes:
        shapes: those that can be replayed, in ascending order of their rows.
        capture_work: what captures; others' graphs may share their memory with these.
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
        capture: Capture | None = None,
        group: Group | None = None,
    ) -> None:
        rows = {1, 1 + max_draft_tokens}
        wanted = [Shape(size, r) for size in sizes for r in rows]
        self.shapes = sorted(wanted, key=lambda shape: (shape.num_seqs * shape.rows, shape))
        self._forward, self._group = forward, group
        self._builder = builder
        self._max_seq_len = max_seq_len
        self._device = device
        self._staging = Staging(device)
        self.capture_work = capture or default_capture(device)
        self._graphs: dict[Shape, _Graph] = {}

    def capture(self) -> None:
        """Captures every shape, the largest first: the others then find their memory in its.

        A shape that cannot be captured is left out, with one warning for all of them: its steps use
        a larger one, or none.
        """
        self.shapes = capture_each(self.shapes, self.add, "decode graphs", self._group)

    def shape_of(self, plan: StepPlan) -> Shape | None:
        """The smallest captured shape that holds a step; None if there is none.

        Args:
            plan: of a step in which every sequence decodes: one new token, and drafts.
        """
        counts = plan.num_new_tokens
        rows = (
            1
            if len(plan.positions) == len(counts)
            else max(s.rows for s in self.shapes or [Shape(0, 0)])
        )
        if (plan.seq_lens - counts).max() + rows > self._max_seq_len or counts.max() > rows:
            return None
        fitting = (s for s in self.shapes if s.rows == rows and s.num_seqs >= len(counts))
        return next(fitting, None)

    def __call__(
        self, shape: Shape, plan: StepPlan | StepArrays, input_ids: np.ndarray
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs one step, to be called between the plan and its commit.

        Args:
            shape: of `shape_of`.
            plan: of a step in which every sequence decodes.
            input_ids: [num_tokens] int32, or placeholders (`BatchBuilder`).

        Returns:
            Logits [num_tokens, vocab_size] fp32, or what else the model returns of them, valid
            until the next call.
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

    def add(self, shape: Shape) -> None:
        """Captures one shape; raises what its capture raises."""
        # Padding rows all through: what a warm-up run must not do is write.
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

        self._graphs[shape] = _Graph(data, out, work, self.capture_work(work))


def capture_each(
    shapes: Sequence[Shape], add: Callable[[Shape], None], what: str, group: Group | None = None
) -> list[Shape]:
    """Captures the largest shape first; one warning names those that cannot be.

    Args:
        shapes: ascending.
        add: captures one.
        what: begins the warning.
        group: ranks that capture the same; None = this one alone.

    Returns:
        Those that are captured, on all ranks, ascending.
    """
    failed = {}
    for shape in reversed(shapes):
        try:
            add(shape)
        except Exception as error:
            failed[shape] = error
    if failed:
        names = ", ".join(f"{shape.num_seqs} x {shape.rows}" for shape in failed)
        error = next(iter(failed.values()))
        warnings.warn(
            f"{what}: {names} (sequences x rows) cannot be captured, and run without: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
    if group is not None:
        told = group.channel.all_say([*failed])
        failed = {Shape(*shape) for shapes_of_rank in told for shape in shapes_of_rank}
    return [shape for shape in shapes if shape not in failed]


def _even(count: int) -> int:
    """Rows of so many int64 start at 16 bytes, as kernels are compiled for."""
    return count + count % 2


def _split(data: Any, shape: Shape) -> tuple[Any, Any, Any]:
    """Parts of a graph's integers, views of a tensor or an array.

    Returns:
        (tokens [2 + num_tables, num_tokens]: ids, positions and slot mappings; seq_lens [num_seqs];
        the allocator's slots [num_seqs]).
    """
    num_tokens = shape.num_seqs * shape.rows
    tokens = data[: len(data) - 2 * shape.num_seqs].reshape(-1, _even(num_tokens))[:, :num_tokens]
    seq_lens, slots = data[len(data) - 2 * shape.num_seqs :].reshape(2, -1)
    return tokens, seq_lens, slots


def sizes_to_capture(config: EngineConfig, device: torch.device) -> list[int]:
    """Batch sizes that an engine decodes through graphs; none where it does not.

    Raises:
        NotImplementedError: ``config.decode_graphs`` asks for what cannot be.
    """
    on_gpu = device.type == "cuda"
    possible = not (on_gpu and config.impl == "torch")
    if config.decode_graphs and not possible:
        raise NotImplementedError(
            f"decode_graphs: supported with impl='triton' on a GPU, got impl={config.impl!r}"
        )
    wanted = on_gpu if config.decode_graphs is None else config.decode_graphs
    return batch_sizes(config.max_num_seqs) if possible and wanted else []


def graph_bytes(
    model: nn.Module,
    cache: ModelCache,
    config: EngineConfig,
    sizes: Sequence[int],
    max_draft_tokens: int,
    *,
    hidden: bool,
) -> int:
    """Bytes that the graphs of an engine will take, of memory that its pool is then not given.

    The largest two are captured over a pool of two pages, and dropped: the memory of the largest
    serves all, and what the second adds each of the others adds. 0 where the size of the pool does
    not depend on free memory, and where they cannot be captured.

    Args:
        sizes: of `sizes_to_capture`.
        hidden: as in `forward_pass`.
    """
    named = config.num_pages is not None or config.cache_bytes is not None
    if not sizes or named or model.device.type not in MEASURED_ON:
        return 0
    kv = KVCache(
        cache.groups,
        num_pages=2,
        max_requests=config.max_num_seqs,
        max_model_len=config.max_model_len or model.config.max_position_embeddings,
        max_draft_tokens=max_draft_tokens,
        track_deltas=True,
    )
    builder = BatchBuilder(kv, model.device)
    graphs = DecodeGraphs(
        forward_pass(model, cache.allocate(kv.pool.num_pages), config.impl, hidden=hidden),
        builder,
        sizes=sizes,
        max_seq_len=kv.max_model_len,
        max_draft_tokens=max_draft_tokens,
        device=model.device,
    )
    free = [free_memory(model.device)]
    try:
        with torch.inference_mode(), torch.cuda.device_of(builder.tables):
            for shape in graphs.shapes[::-1][:2]:
                graphs.add(shape)
                free.append(free_memory(model.device))
    except Exception:
        return 0  # `DecodeGraphs.capture` says so
    used = [max(0, before - after) for before, after in pairwise(free)]
    chains = len(sizes) if hidden else 0  # of a `ModelDrafter`
    return used[0] + used[-1] * (len(graphs.shapes) - 1 + chains)


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


def default_capture(device: torch.device) -> Capture:
    """CUDA graphs on a GPU; on a CPU the same work called again."""
    return CudaCapture(device) if device.type == "cuda" else call_again


def call_again(work: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a capture where there is no GPU.

    A replay does the work anew, on the same buffers.
    """
    return work


def forward_pass(model: nn.Module, pool: Any, impl: str | None, *, hidden: bool) -> Forward:
    """The model over its pages, as a function that keeps no engine alive.

    Args:
        hidden: whether it returns hidden states beside the logits.
    """
    more = {"return_hidden": True} if hidden else {}

    def run(
        input_ids: Tensor,
        positions: Tensor,
        attn: AttnMetadata,
        logits_rows: Tensor | None = None,
    ) -> Any:
        return model(input_ids, positions, attn, pool, logits_rows=logits_rows, impl=impl, **more)

    return run
