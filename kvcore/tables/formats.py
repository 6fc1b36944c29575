"""Table formats that other kernels read: compressed and linear rows of pages.

FlashInfer takes compressed rows, vLLM and FlashAttention linear ones. Both describe the tokens that
are computed, for two readers:

* between a plan and its commit (or before the plan): the context of the step's queries, which take
  the step's own rows from elsewhere;
* after the commit of a step of one token a request: the query of that token, which takes its own
  row from the page too.

The queries of a chunk cannot read all of their rows from the pages of a window group: only those
that later queries see were written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Int32, Int64, as_ints, ragged_arange
from ..spec import NULL_BLOCK

if TYPE_CHECKING:
    from ..cache import KVCache


@dataclass(frozen=True)
class PagedRows:
    """Pages of several requests one after another.

    Attributes:
        indptr: [n + 1] int32, where each request's pages start in `indices`.
        indices: [m] int32 page ids in token order.
        last_page_len: [n] int32 tokens in the last page, 1..block_size; 0 for a request without
            pages.
        first_tokens: [n] int64 position of the first row of the first page: of a window group the
            blocks before are gone.
    """

    indptr: Int32
    indices: Int32
    last_page_len: Int32
    first_tokens: Int64


def paged_rows(cache: KVCache, group: int, slots: Any, part: int = 0) -> PagedRows:
    """Pages that a query at the newest token of each request, or at the next, may read, in
    compressed rows.

    Of a window group the first page may hold nothing that the reader sees: a kernel masks by
    position all the same.

    Args:
        cache: the allocator.
        group, part: a dense or window group, and which of its pages_per_block pages.
        slots: [n] ints, from `KVCache.admit`.

    Raises:
        ValueError: an unknown slot, group or part, or a state group.

    Source: FlashInfer's paged KV layout (``indptr``, ``indices``, ``last_page_len``).
    """
    slots, lengths, first, table, size = _visible(cache, group, slots, part)
    stop = -(-lengths // size)
    rows, blocks = ragged_arange(first, stop - first)
    indptr = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(stop - first, out=indptr[1:])
    pages = table[slots[rows], blocks % table.shape[1]]
    last = np.where(stop > first, (lengths - 1) % size + 1, 0).astype(np.int32)
    return PagedRows(indptr, pages, last, first * size)


def linear_table(cache: KVCache, group: int, slots: Any, part: int = 0) -> Int32:
    """Pages by block number, the null page where a block is out of the window.

    Args:
        cache, group, slots, part: as in `paged_rows`.

    Returns:
        [n, blocks of the longest request] int32.

    Raises:
        ValueError: as `paged_rows`.
    """
    slots, lengths, first, table, size = _visible(cache, group, slots, part)
    stop = -(-lengths // size)
    rows, blocks = ragged_arange(first, stop - first)
    linear = np.zeros((len(slots), int(stop.max(initial=0))), dtype=np.int32)
    linear[rows, blocks] = table[slots[rows], blocks % table.shape[1]]
    return linear


def _visible(
    cache: KVCache, group: int, slots: Any, part: int
) -> tuple[Int64, Int64, Int64, Int32, int]:
    """Checked slots, their computed tokens, the first block that the newest token or the next sees,
    the table and its block size."""
    table = cache.table(group, part)
    spec = cache.layout.groups[group]
    if spec.kind == "state":
        raise ValueError(f"group: expected a dense or window group, got state group {spec.name!r}")
    slots = as_ints("slots", slots)
    if len(slots):
        cache.sequences.check(slots)
    lengths = cache.num_computed[slots]
    first = np.zeros_like(lengths)
    if spec.sliding_window is not None:
        first = np.maximum(0, lengths - spec.sliding_window) // spec.block_size
        # A replay has no rows before its start.
        first = np.maximum(first, cache._chains.replays.start[slots] // spec.block_size)
        # The next query sees one row less: a chunk and a hit leave no page for that row alone.
        # A replay that has not begun has no row at all.
        inside = first * spec.block_size < lengths
        first += inside & (table[slots, first % table.shape[1]] == NULL_BLOCK)
    return slots, lengths, first, table, spec.block_size
