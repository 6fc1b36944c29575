"""The recount of everything that a cache counts: pages, holders, locks and pins, from scratch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from .arrays import NO_ROWS, Int32, Int64
from .prefix.index import PrefixIndex
from .prefix.tree import Run, path_to
from .tables.rows import SNAPSHOT

if TYPE_CHECKING:
    from .cache import KVCache


def check_invariants(cache: KVCache) -> None:
    """Recount pages, holders and locks of `cache` from scratch; AssertionError if any is wrong."""
    index, a = cache.index, cache.alignment
    owners: list[Int32 | Int64] = []
    users: list[Int32 | Int64] = []
    locks: Counter[int] = Counter()
    for slot in np.flatnonzero(cache.sequences.active).tolist():
        computed, cached = int(cache.num_computed[slot]), int(cache._chains.cached[slot])
        replaying = computed < int(cache._chains.replays.stop[slot])
        assert cached <= computed or replaying or cache._linear is not None
        assert cached % a == 0
        lowest = min(computed, cache._lowest(slot))
        run = cache._chains.runs[slot]
        waits = cache._known[slot] >= 0 and cache._linear is None
        assert run.depth * a == cached or (waits and run.depth * a < cached), (
            "a request's prefix ends at the end of its run"
        )
        cached = run.depth * a
        for node in path_to(run):
            locks[id(node)] += 1
        owners += cache._chains.duplicates.get(slot, [])
        if cache._linear is not None:
            own, live = cache._linear.held(slot, cached)
            owners.append(np.array(own, dtype=np.int64))
            users.append(np.array(live, dtype=np.int64))
            continue
        path_pages = np.concatenate([index.root.look(), *(r.look() for r in path_to(run))])
        for table in cache._tables.windows:
            c = table.cls
            users.append(table.table[slot].ravel())
            low = max(
                int(cache._chains.replays.start[slot]), lowest - (c.spec.sliding_window or 1) + 1
            )
            low = max(0, low) // c.block_size
            visible = np.arange(low, -(-computed // c.block_size))
            live = table.table[slot][:, visible % c.width]
            assert (live != 0).all(), "a block inside the window has no page"
        for table in cache._tables.blocks:
            size, newest = table.cls.block_size, computed // table.cls.block_size
            if computed % size and (table.is_window or not replaying):
                offset = cache._tables.offset[table.cls.tables, slot]
                pages = table.read(slot, np.array([newest]))[:, 0]
                assert (offset == (pages - newest) * size).all(), "offset of an open block"
        snapshot_at = int(cache._tables.snapshot_at[slot])
        assert snapshot_at <= computed and snapshot_at % a == 0, "a snapshot of what was taken back"
        for state in cache._tables.states:
            users.append(state.table[slot].ravel())
            assert not snapshot_at or state.table[slot, :, SNAPSHOT].all(), "a snapshot on no page"
        for table in cache._tables.dense:
            c = table.cls
            row = table.table[slot, :, : -(-max(cached, computed) // c.block_size)]
            assert (row != 0).all(), "a computed dense block has no page"
            whole = cached // c.block_size
            owners.append(row[:, whole:].ravel())
            part = path_pages[:, c.segment_offset :][:, : c.num_tables * c.per_segment]
            part = part.reshape(-1, c.num_tables, c.per_segment).transpose(1, 0, 2)
            differs = part.reshape(c.num_tables, -1) != row[:, :whole]
            duplicates = np.concatenate([NO_ROWS, *cache._chains.duplicates.get(slot, ())])
            assert np.isin(row[:, :whole][differs], duplicates).all(), "a page of neither"
    owners += [np.array([*held.values()], np.int64) for held in cache._reserved.pages.values()]
    points = cache._chains.waiting.values()
    waiting: list[Int32 | Int64] = [pages for some in points for *_, pages in some]
    users += waiting
    check_index(index, owners, users, waiting, locks)
    if cache._event_writer is not None:
        writer = cache._event_writer
        assert len(writer.tokens) == index.num_segments, "tokens of what is not cached"
        assert writer.identities.keys() <= writer.tokens.keys(), "identities of what is not cached"


def check_index(
    index: PrefixIndex,
    owners: list[Int32 | Int64],
    users: list[Int32 | Int64],
    holds: list[Int32 | Int64],
    locks: Counter[int],
) -> None:
    """Recount `index` and its pool.

    Args:
        owners, users, holds: pages owned, read and held outside of the index, once for each time.
        locks: running requests below each run, by its id.
    """
    pool = index.pool
    owners = [pool.free_pages(), *owners]
    users, holds, locks = users[:], holds[:], locks.copy()
    for end in index.transfers:
        owners.append(end.taken)
        users.append(end.used)
        for node in path_to(end.run):
            locks[id(node)] += 1
    pins: Counter[int] = Counter()
    segments = locked = points = pinned = 0
    for entry in index.pins:
        pinned_run = entry if isinstance(entry, Run) else entry.run
        assert pinned_run is not None and pinned_run.parent is not None, "a pin of what is gone"
        assert pinned_run.depth == entry.depth
        for node in path_to(pinned_run):
            pins[id(node)] += 1
    for run in index.runs():
        segments += run.length
        locked += run.length if run.locks else 0
        assert run.locks == locks[id(run)], "locks count the running requests below"
        assert run.pins == pins[id(run)], "pins count the pinned entries below"
        pinned += run.length if run.pins else 0
        assert run.length > 0 and run.parent is not None and run.start == run.parent.depth
        assert run.parent.children[run.segment_key(0)] is run
        assert len(run.keys) == 32 * run.length
        assert run.locks or run.source is None, "the source of a run has left"
        owners.append(run.look().ravel())
        assert run.depths == sorted(run.points) and all(
            run.start < d <= run.depth for d in run.depths
        )
        for point in run.points.values():
            points += 1
            assert point.run is run
            holds.append(point.pages)
    used, held = _count(users, pool.num_pages), _count(holds, pool.num_pages)
    used[0] = held[0] = 0  # empty entries
    owned = _count(owners, pool.num_pages) + ((used > 0) | (held > 0))
    assert owned[0] == 0, "the null page has an owner"
    assert (owned[1:] > 0).all(), f"{np.count_nonzero(owned[1:] == 0)} pages leaked"
    assert (owned[1:] == 1).all(), "a page has two owners"
    assert segments == index.num_segments and locked == index.num_locked_segments
    assert points == index.num_points and pinned == index.pins.num_segments
    assert np.count_nonzero((held > 0) & (used == 0)) == pool.num_held_only
    assert (used[1:] == pool.users[1:]).all() and (held[1:] == pool.holds[1:]).all()


def _count(pages: list[Int32 | Int64], num_pages: int) -> Int64:
    counts: Int64 = np.bincount(
        np.concatenate([np.empty(0, dtype=np.int32), *pages]), minlength=num_pages
    )
    return counts
