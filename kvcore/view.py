"""What can be read of a cache: sizes, slots and block tables."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from .arrays import NO_ROWS, NO_VALUES, Int32, Int64
from .pages import PagePool
from .prefix.index import PrefixIndex
from .prefix.requests import Sequences
from .spec import Layout
from .tables.groups import Tables


class CacheView:
    """The part of `KVCache` that changes nothing but the list of `take_deltas`.

    Attributes:
        layout: the groups, and what follows from them.
        alignment: tokens of a segment: hits are multiples of it.
        pool: the pages.
        index: what is cached.
        sequences: the running requests.
        counters: since the start, see `stats`.
    """

    layout: Layout
    alignment: int
    pool: PagePool
    index: PrefixIndex
    sequences: Sequences
    counters: dict[str, int]
    _tables: Tables

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self.pool.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.pool.num_free

    @property
    def num_evictable_pages(self) -> int:
        """Pages that hold only cached content no running request needs."""
        return self.index.num_evictable

    @property
    def num_free_slots(self) -> int:
        """Requests that can still be admitted."""
        return self.sequences.num_free

    @property
    def num_computed(self) -> Int64:
        """[max_requests] int64 tokens of each slot's request whose rows are valid; read-only."""
        return self.sequences.lengths

    @property
    def tables(self) -> Int32:
        """[max_requests, columns] int32: all block tables side by side; not to be written to."""
        return self._tables.array

    def table(self, group: int, part: int = 0) -> Int32:
        """Block table of `group`: [max_requests, width] int32 view; column = block % width.

        A group with pages_per_block > 1 has a table for each part of its blocks. A state group's
        table names the live page of each request in column 0.

        Between `plan` and `commit` it describes the context before the step. Entries at or past a
        request's length, and of a window group those behind its window, are not to be read. A view,
        not to be written to.
        """
        offset, width = self.layout.columns(group, part)
        return self.tables[:, offset : offset + width]

    def table_index(self, group: int, part: int = 0) -> int:
        """Row of `StepPlan.slot_mapping` that belongs to `table(group, part)`."""
        return self.layout.table(group, part)

    def slot_of(self, request_id: Hashable) -> int:
        """Slot of an admitted request.

        Raises:
            ValueError: the id is unknown.
        """
        return self.sequences.slot_of(request_id)

    def take_deltas(self) -> tuple[Int64, Int32]:
        """Table entries that changed since the last call, for a copy of `tables` on a device.

        Returns:
            (flat indices into `tables` [m] int64, values [m] int32), later changes of an entry
            last.

        Raises:
            ValueError: the cache was made without track_deltas.
        """
        deltas = self._tables.deltas
        if deltas is None:
            raise ValueError(
                "track_deltas: expected True at construction to take deltas, got False"
            )
        if not deltas:
            return NO_ROWS, NO_VALUES
        indices, pages = zip(*deltas, strict=True)
        deltas.clear()
        return np.concatenate(indices), np.concatenate(pages)
