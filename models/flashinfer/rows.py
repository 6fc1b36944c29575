"""Compressed rows of a step's keys: from the integers of `quire.kvcore`, for each cache group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from quire.kvcore import paged_rows
from quire.kvcore.arrays import ragged_arange

from .step import GATHERED_BLOCK
from .wrappers import Rows

if TYPE_CHECKING:
    from quire.kvcore import KVCache, PagedRows, StepPlan


class StartedBlocks(NamedTuple):
    """Blocks that sequences start in a step.

    Attributes:
        ends: [num_seqs + 1] int32, prefix sums of their number.
        counts: [num_seqs] int64.
        tokens: the first token of each, among those of the sequences.
        last_page_len: [num_seqs] int32 tensor, rows in the last block after the step.
    """

    ends: Any
    counts: Any
    tokens: Any
    last_page_len: torch.Tensor


class Sequences:
    """Some sequences of a step that follow each other: what is the same in all cache groups.

    Args:
        plan: of the step.
        first, last: of its sequences.

    Attributes:
        slots: [num_seqs] the allocator's slots.
        tokens: of the step's tokens, those of these sequences.
        starts, ends: [num_seqs] int64, positions of the first new token and behind the last.
    """

    def __init__(self, plan: StepPlan, first: int, last: int) -> None:
        self.slots = plan.slots[first:last]
        self.tokens = slice(int(plan.cu_seqlens_q[first]), int(plan.cu_seqlens_q[last]))
        self.ends = plan.seq_lens[first:last].astype(np.int64)
        self.starts = self.ends - plan.num_new_tokens[first:last]
        self._cu = plan.cu_seqlens_q[first:last] - plan.cu_seqlens_q[first]
        self._started: dict[int, StartedBlocks] = {}

    def started(self, block_size: int) -> StartedBlocks:
        """Blocks of this size that they start."""
        if block_size not in self._started:
            first = -(-self.starts // block_size)
            counts = -(-self.ends // block_size) - first
            rows, blocks = ragged_arange(first, counts)
            self._started[block_size] = StartedBlocks(
                starts_of(counts).astype(np.int32),
                counts,
                self._cu[rows] + blocks * block_size - self.starts[rows],
                as_int32((self.ends - 1) % block_size + 1),
            )
        return self._started[block_size]


class GatherPlan(NamedTuple):
    """`Gathered` before it is on the device: arrays of int64, and the rows of the copies."""

    pages: Any
    rows: Any
    kept_at: Any
    new_at: Any
    copies: Rows


class GroupKeys:
    """Where the keys of sequences are, in one cache group.

    To be asked between the plan and its commit.

    Args:
        kv: the allocator.
        plan: of the step.
        group: a dense or window group with one table.
        sequences: of the step.

    Attributes:
        context: pages of the keys before the step.
        new_slots: [num_tokens] int64, where the step's own are written; -1 = nowhere.
    """

    def __init__(self, kv: KVCache, plan: StepPlan, group: int, sequences: Sequences) -> None:
        self.spec = kv.layout.groups[group]
        self.context: PagedRows = paged_rows(kv, group, sequences.slots)
        self.new_slots = plan.slot_mapping[kv.table_index(group), sequences.tokens]
        self._sequences = sequences

    @property
    def are_kept(self) -> bool:
        """Whether all new rows will be in pages; those of a window need not."""
        return bool(self.new_slots.min() >= 0)

    def paged(self) -> Rows:
        """Pages of all keys, the step's own too."""
        assert self.are_kept
        started, context = self._sequences.started(self.spec.block_size), self.context
        indices, indptr = context.indices, context.indptr
        if len(started.tokens):
            pages = self.new_slots[started.tokens] // self.spec.block_size
            indices = np.insert(indices, indptr[1:].repeat(started.counts), pages)
            indptr = indptr + started.ends
        return Rows(as_int32(indptr), as_int32(indices), started.last_page_len)

    def kept(self) -> tuple[Any, Any, Any, Any]:
        """Keys before the step that its queries see.

        Returns:
            ([num_seqs] position of each sequence's first, [num_kept] sequences, positions and pages
            of all), int64.
        """
        context, starts, size = self.context, self._sequences.starts, self.spec.block_size
        low = context.first_tokens
        if self.spec.sliding_window is not None:
            low = np.maximum(low, starts - (self.spec.sliding_window - 1))
        low = np.minimum(low, starts)
        rows, positions = ragged_arange(low, starts - low)
        blocks = positions // size - context.first_tokens[rows] // size
        pages = context.indices[context.indptr[rows] + blocks].astype(np.int64)
        return low, rows, positions, pages

    def gather(self) -> GatherPlan:
        """How to copy the keys that queries see in a window, each sequence from a page of its own.

        The context is read from pages, the step's own rows are not.
        """
        low, rows, positions, pages = self.kept()
        starts, ends = self._sequences.starts, self._sequences.ends
        lengths = ends - low
        indptr = starts_of(-(-lengths // GATHERED_BLOCK))
        base = indptr[:-1] * GATHERED_BLOCK - low  # of a position, in the copies
        kept_at = base[rows] + positions
        new_rows, new_positions = ragged_arange(starts, ends - starts)
        indices = np.arange(indptr[-1])
        copies = as_rows(indptr, indices, (lengths - 1) % GATHERED_BLOCK + 1)
        new_at = base[new_rows] + new_positions
        return GatherPlan(pages, positions % self.spec.block_size, kept_at, new_at, copies)


def as_rows(indptr: Any, indices: Any, last_page_len: Any) -> Rows:
    """`Rows` on the host, of arrays of integers."""
    return Rows(*(as_int32(array) for array in (indptr, indices, last_page_len)))


def as_int32(array: Any) -> torch.Tensor:
    """An array of integers as a tensor on the host."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))


def starts_of(counts: Any) -> Any:
    """[n + 1] int64 prefix sums of counts [n]."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
