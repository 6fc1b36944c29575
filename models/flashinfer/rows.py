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


class GatherPlan(NamedTuple):
    """`Gathered` before it is on the device: arrays of int64, and the rows of the copies."""

    pages: Any
    rows: Any
    kept_at: Any
    new_at: Any
    copies: Rows


class Sequences:
    """Some sequences of a step that follow each other, in one cache group.

    To be asked between the plan and its commit.

    Args:
        kv: the allocator.
        plan: of the step.
        group: a dense or window group with one table.
        first, last: of the step's sequences.
    """

    def __init__(self, kv: KVCache, plan: StepPlan, group: int, first: int, last: int) -> None:
        spec = kv.layout.groups[group]
        self._block_size, self._window = spec.block_size, spec.sliding_window
        self._context: PagedRows = paged_rows(kv, group, plan.slots[first:last])
        self._ends = plan.seq_lens[first:last].astype(np.int64)
        self._starts = self._ends - plan.num_new_tokens[first:last]
        self._cu = plan.cu_seqlens_q[first : last + 1] - plan.cu_seqlens_q[first]
        tokens = slice(int(plan.cu_seqlens_q[first]), int(plan.cu_seqlens_q[last]))
        self._slots = plan.slot_mapping[kv.table_index(group), tokens]

    @property
    def are_kept(self) -> bool:
        """Whether all new rows will be in pages; those of a window need not."""
        return bool((self._slots >= 0).all())

    def paged(self) -> Rows:
        """Pages of all keys, the step's own too."""
        assert self.are_kept
        size, context = self._block_size, self._context
        started = -(-self._starts // size)
        num_started = -(-self._ends // size) - started
        num_kept = np.diff(context.indptr).astype(np.int64)
        indptr = _starts_of(num_kept + num_started)
        indices = np.empty(int(indptr[-1]), dtype=np.int32)
        kept = ragged_arange(indptr[:-1], num_kept)[1]
        new = ragged_arange(indptr[:-1] + num_kept, num_started)[1]
        rows, blocks = ragged_arange(started, num_started)
        indices[kept] = context.indices
        indices[new] = self._slots[self._cu[rows] + blocks * size - self._starts[rows]] // size
        return as_rows(indptr, indices, (self._ends - 1) % size + 1)

    def gather(self) -> GatherPlan:
        """How to copy the keys that queries see in a window, each sequence from a page of its own.

        The context is read from pages, the step's own rows are not.
        """
        assert self._window is not None
        context, size = self._context, self._block_size
        low = np.maximum(self._starts - (self._window - 1), context.first_tokens)
        low = np.minimum(low, self._starts)
        lengths = self._ends - low
        indptr = _starts_of(-(-lengths // GATHERED_BLOCK))
        base = indptr[:-1] * GATHERED_BLOCK - low  # of a position, in the copies
        rows, positions = ragged_arange(low, self._starts - low)
        blocks = positions // size - context.first_tokens[rows] // size
        pages = context.indices[context.indptr[rows] + blocks].astype(np.int64)
        kept_at = base[rows] + positions
        new_rows, new_positions = ragged_arange(self._starts, self._ends - self._starts)
        indices = np.arange(indptr[-1])
        copies = as_rows(indptr, indices, (lengths - 1) % GATHERED_BLOCK + 1)
        new_at = base[new_rows] + new_positions
        return GatherPlan(pages, positions % size, kept_at, new_at, copies)


def as_rows(indptr: Any, indices: Any, last_page_len: Any) -> Rows:
    """`Rows` on the host, of arrays of integers."""
    return Rows(*(as_int32(array) for array in (indptr, indices, last_page_len)))


def as_int32(array: Any) -> torch.Tensor:
    """An array of integers as a tensor on the host."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))


def _starts_of(counts: Any) -> Any:
    """[n + 1] int64 prefix sums of counts [n]."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
