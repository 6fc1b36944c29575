"""The fused block table, and changes to the row of one request: a hit, a rollback, a release."""

from __future__ import annotations

import numpy as np

from ..arrays import Int32, Int64
from ..pages import PagePool
from ..spec import NULL_BLOCK, GroupClass, Layout

LIVE, SNAPSHOT = 0, 1  # columns of a state table


class ClassTables:
    """The tables of one class (kind, block size, window): a view of the fused table.

    Attributes:
        is_window: True for rings of a window.
        table: [max_requests, num_tables, width] int32 view.
        first: [num_tables] int64 first column of each table.
        size, width, per_segment, tail, reach: those of `cls`, as arrays without dimensions (see
            `arrays.ONE`).
        no_pages: [num_tables, 0] int64.
    """

    def __init__(self, cls: GroupClass, array: Int32) -> None:
        self.cls, self.is_window = cls, cls.spec.kind == "window"
        columns = array[:, cls.offset : cls.offset + cls.num_columns]
        self.table = columns.reshape(len(array), cls.num_tables, cls.width)
        assert np.shares_memory(self.table, array)
        self.first: Int64 = cls.offset + np.arange(cls.num_tables) * cls.width
        self.size: Int64 = np.array(cls.block_size)
        self.per_segment: Int64 = np.array(cls.per_segment)
        self.tail: Int64 = np.array(cls.tail)
        self.reach: Int64 = np.array(cls.reach)
        self.no_pages: Int64 = np.empty((cls.num_tables, 0), dtype=np.int64)
        self._flat = array.reshape(-1)
        self._row: Int64 = np.array(array.shape[1])
        self.width: Int64 = np.array(cls.width)

    def indices_of_blocks(self, slots: Int64, blocks: Int64) -> Int64:
        """Flat indices in the fused table of `blocks` [m, j] of `slots` [m]: [m, num_tables, j]."""
        columns = (slots * self._row)[:, None] + blocks % self.width
        indices: Int64 = columns[:, None, :] + self.first[:, None]
        return indices

    def indices_of_block(self, slots: Int64, blocks: Int64 | int) -> Int64:
        """Flat indices of a block [m], or one, of each of `slots` [m]: [num_tables, m]."""
        indices: Int64 = slots * self._row + blocks % self.width + self.first[:, None]
        return indices

    def read(self, slot: int, blocks: Int64) -> Int32:
        """Pages of `blocks` [j] of one request, 0 before the sequence: [num_tables, j]."""
        pages: Int32 = np.where(blocks < 0, 0, self.table[slot][:, blocks % self.cls.width])
        return pages

    def write(self, slot: int, blocks: Int64, pages: Int32) -> Int64:
        """Set `blocks` [j] of one request to `pages` [num_tables, j]; returns the flat indices."""
        indices: Int64 = self.indices_of_blocks(np.array([slot]), blocks[None, :])[0]
        self._flat[indices] = pages
        return indices


class Tables:
    """Block tables of all groups, side by side in one array: a row a request.

    Attributes:
        array: [max_requests, num_columns] int32, all tables side by side.
        offset: [num_groups, max_requests] int64: position p of a request's open block has the slot
            (page * block_size + row) ``offset + p``.
        snapshot_at: [max_requests] int64 boundary of the newest state snapshot, 0 for none.
        dense, windows, states: the classes of each kind. blocks: dense and windows.
        deltas: (flat indices, pages) changed since `KVCache.take_deltas`; None: not tracked.
    """

    def __init__(
        self, layout: Layout, max_requests: int, pool: PagePool, track_deltas: bool
    ) -> None:
        self.layout, self.pool = layout, pool
        self.array: Int32 = np.zeros((max_requests, layout.num_columns), dtype=np.int32)
        self.offset: Int64 = np.zeros((len(layout.groups), max_requests), dtype=np.int64)
        self.snapshot_at: Int64 = np.zeros(max_requests, dtype=np.int64)
        by_kind: dict[str, list[ClassTables]] = {"dense": [], "window": [], "state": []}
        for c in layout.classes:
            by_kind[c.spec.kind].append(ClassTables(c, self.array))
        self.dense, self.windows, self.states = by_kind.values()
        self.blocks = self.dense + self.windows
        self.deltas: list[tuple[Int64, Int32]] | None = [] if track_deltas else None

    def has_states(self, slot: int) -> bool:
        """The states of a request have live pages, or there are none."""
        states = self.states  # which get them in the same step
        return not states or states[0].table.item(slot, 0, LIVE) != NULL_BLOCK

    def load(self, slot: int, boundary: int, pages: Int32) -> None:
        """Start a request at `boundary` with the `pages` [pages_per_point] of a resume point."""
        self.pool.use_held(pages)
        for table in self.windows:
            c = table.cls
            blocks = boundary // c.block_size - np.arange(c.tail, 0, -1)
            valid = blocks >= 0
            part = c.tails(pages)[:, valid]
            self.note(table.write(slot, blocks[valid], part), part)
        for state in self.states:
            state.table[slot, :, SNAPSHOT] = state.cls.tails(pages)[:, 0]
        self.snapshot_at[slot] = boundary

    def load_nothing(self, slot: int) -> None:
        """Start a request whose windows have no rows: copies of its tables get page 0, too."""
        for table in self.windows:
            indices = table.indices_of_blocks(np.array([slot]), np.arange(table.cls.width)[None, :])
            self.note(indices, np.zeros(indices.shape, dtype=np.int32))

    def tail(self, slot: int, boundary: int) -> Int32:
        """Pages of the tail of `boundary` from the rings of `slot`: [pages_per_point]."""
        tail: Int32 = np.zeros(self.layout.pages_per_point, dtype=np.int32)
        for table in self.windows:
            c = table.cls
            blocks = boundary // c.block_size - np.arange(c.tail, 0, -1)
            c.tails(tail)[:] = table.read(slot, blocks)
        for state in self.states:
            state.cls.tails(tail)[:, 0] = state.table[slot, :, SNAPSHOT]
        return tail

    def segment_pages(self, slot: int, first: int, end: int) -> Int32:
        """Dense pages of segments [first, end) of a request: [end - first, pages_per_segment]."""
        pages = np.empty((end - first, self.layout.pages_per_segment), dtype=np.int32)
        for table in self.dense:
            c = table.cls
            part = table.table[slot, :, first * c.per_segment : end * c.per_segment]
            part = part.reshape(c.num_tables, end - first, c.per_segment).transpose(1, 0, 2)
            columns = slice(c.segment_offset, c.segment_offset + c.num_tables * c.per_segment)
            pages[:, columns] = part.reshape(end - first, -1)
        return pages

    def fill_dense(self, slot: int, first: int, pages: Int32) -> None:
        """Set the dense blocks of segments from `first` on to `pages` [n, pages_per_segment]."""
        for table in self.dense:
            c = table.cls
            part = pages[:, c.segment_offset : c.segment_offset + c.num_tables * c.per_segment]
            part = part.reshape(len(pages), c.num_tables, c.per_segment).transpose(1, 0, 2)
            part = part.reshape(c.num_tables, -1)
            blocks = first * c.per_segment + np.arange(part.shape[1])
            self.note(table.write(slot, blocks, part), part)

    def shrink(self, slot: int, old: int, new: int) -> None:
        """Forget the tokens [new, old) of a request; they are in no cached segment."""
        if self.snapshot_at[slot] > new:  # its page holds the state of tokens that are taken back
            self.snapshot_at[slot] = 0
        for table in self.blocks:
            size = table.cls.block_size
            blocks = np.arange(-(-new // size), -(-old // size))
            if len(blocks):
                pages = table.read(slot, blocks)
                if table.is_window:
                    self.pool.unuse(pages.ravel())
                else:
                    self.pool.put(pages.ravel())
                table.write(slot, blocks, np.zeros_like(pages))
            self.open(table, np.array([slot]), np.array([new]))

    def open(self, table: ClassTables, slots: Int64, end: Int64) -> None:
        """Note where the rows of the newest block of `slots` [m] are, which have `end` tokens."""
        newest = (end - 1) // table.size
        pages = self.array.reshape(-1)[table.indices_of_block(slots, newest)]
        self.offset[table.cls.tables[:, None], slots] = (pages - newest) * table.size

    def release(self, slot: int, cached: int, computed: int) -> None:
        """Empty the row of a request, whose tokens past `cached` are its own."""
        for table in self.dense:
            size = table.cls.block_size
            own = table.table[slot, :, cached // size : -(-computed // size)]
            self.pool.put(own.ravel())
            table.table[slot, :, : -(-max(cached, computed) // size)] = 0
        for table in self.windows + self.states:
            pages = table.table[slot].ravel()
            self.pool.unuse(pages[pages.nonzero()])
            table.table[slot] = 0
        self.snapshot_at[slot] = 0

    def note(self, indices: Int64, pages: Int32 | Int64) -> None:
        """Add flat indices of changed table cells, and their pages, to the deltas if tracked."""
        if self.deltas is not None and pages.size:
            self.deltas.append((indices.ravel(), pages.ravel().astype(np.int32)))
