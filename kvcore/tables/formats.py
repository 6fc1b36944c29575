"""Table formats of other kernels: FlashInfer's compressed rows of pages, and linear tables.

A table covers the tokens that its next query reads from pages:

called with                   tokens described       for
slots, before a step          computed ones          its queries; its own rows are elsewhere
slots, after its commit       computed ones          the last query of steps of one token
its plan, before its commit   those and the step's   engines that write rows to pages first
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import as_ints, refusal
from ..arrays import Int32, Int64, ragged_arange
from ..plan import StepPlan
from ..spec import NULL_BLOCK

if TYPE_CHECKING:
    from ..cache import KVCache


@dataclass(frozen=True)
class PagedRows:
    """Pages of several requests one after another.

    Attributes:
        indptr: [n + 1] int32 start of each request's pages in `indices`.
        indices: [m] int32 page ids in token order.
        last_page_len: [n] int32 tokens in the last page; 0 for a request without pages.
        first_tokens: [n] int64 position of the first row of the first page, as earlier blocks of a
            window group are gone.
    """

    indptr: Int32
    indices: Int32
    last_page_len: Int32
    first_tokens: Int64


def paged_rows(cache: KVCache, group: int, slots: Any) -> PagedRows:
    """Pages that a query at the newest token of each request, or at the next, may read, in
    compressed rows. The kernel masks windows by position: a first page may hold no visible row.

    Args:
        group: a dense or window group.
        slots: [n] ints, from `KVCache.admit`; or a `StepPlan` that is not committed, whose rows all
            have pages in this group (``reads="pages"``, or one token a request).

    Raises:
        ValueError: another slot or group, or another plan.

    Source: FlashInfer's paged KV layout (``indptr``, ``indices``, ``last_page_len``).
    """
    linear, lengths, first, size = _linear(cache, group, slots)
    stop = -(-lengths // size)
    rows, blocks = ragged_arange(first, stop - first)
    indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(stop - first, out=indptr[1:])
    last = np.where(stop > first, (lengths - 1) % size + 1, 0).astype(np.int32)
    return PagedRows(indptr, linear[rows, blocks], last, first * size)


def linear_table(cache: KVCache, group: int, slots: Any) -> Int32:
    """[n, blocks of the longest request] int32 pages by block number, the null page where a block
    is out of the window. Arguments and errors are those of `paged_rows`.
    """
    return _linear(cache, group, slots)[0]


def _linear(cache: KVCache, group: int, slots: Any) -> tuple[Int32, Int64, Int64, int]:
    plan = slots if isinstance(slots, StepPlan) else None
    start = None if plan is None else plan.seq_lens - plan.num_new_tokens
    slots, lengths, first, table, size = _visible(
        cache, group, slots if plan is None else plan.slots, start
    )
    stop = -(-lengths // size)
    rows, blocks = ragged_arange(first, stop - first)
    if plan is not None:
        if np.count_nonzero(lengths != plan.seq_lens - plan.num_new_tokens):
            raise refusal("slots", "a plan that is not committed yet", "an older one")
        lengths = plan.seq_lens.astype(np.int64)
    linear = np.zeros((len(slots), int((-(-lengths // size)).max(initial=0))), dtype=np.int32)
    linear[rows, blocks] = table[slots[rows], blocks % table.shape[1]]
    if plan is not None:
        of_token = np.arange(len(slots)).repeat(plan.num_new_tokens)
        where = plan.slot_mapping[group]
        if plan.replay_rows.size:  # dense groups hold these rows already
            again = plan.replay_slots[group]
            where = where.copy()
            where[plan.replay_rows] = np.maximum(where[plan.replay_rows], again)
        missing = np.count_nonzero(where < 0)
        if missing:
            name = cache.layout.groups[group].name
            got = f"one with {missing} that have none: make the cache with reads='pages'"
            raise refusal("slots", f"a plan whose rows of group {name!r} all have pages", got)
        linear[of_token, plan.positions // size] = where // size
    return linear, lengths, first, size


def _visible(
    cache: KVCache, group: int, slots: Any, start: Int64 | None = None
) -> tuple[Int64, Int64, Int64, Int32, int]:
    """Checked slots, their computed tokens, the first block that the newest token or the next (or
    the query at `start` [n]) sees, the table and its block size.
    """
    if not hasattr(cache, "num_computed"):
        raise refusal("cache", "a KVCache", repr(cache))
    table = cache.table(group)
    spec = cache.layout.groups[group]
    if spec.kind == "state":
        raise refusal("group", "a dense or window group", f"state group {spec.name!r}")
    slots = as_ints("slots", slots)
    if len(slots):
        cache.sequences.check(slots)
    lengths = cache.num_computed[slots]
    first = np.zeros_like(lengths)
    if spec.sliding_window is not None:
        oldest = lengths - spec.sliding_window if start is None else start - spec.sliding_window + 1
        first = np.maximum(0, oldest) // spec.block_size
        # A replay has no rows before its start.
        first = np.maximum(first, cache._chains.replays.start[slots] // spec.block_size)
        # Only the newest token sees the oldest row. If that row alone is in its block, a chunk or a
        # hit leaves it no page: begin one block later. (A replay that has not begun has no rows.)
        inside = first * spec.block_size < lengths
        first += inside & (table[slots, first % table.shape[1]] == NULL_BLOCK)
    return slots, lengths, first, table, spec.block_size
