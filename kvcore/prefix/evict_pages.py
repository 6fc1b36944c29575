"""Find and evict the entries that hold certain pages, and their copies in a host."""

from __future__ import annotations

import numpy as np

from ..arrays import NO_VALUES, Flags, Int32
from .index import PrefixIndex
from .tree import ResumePoint, Run, path_to, split


def evict_pages(index: PrefixIndex, is_wanted: Flags) -> None:
    """Evict entries with pages that `is_wanted` [num_pages], and entries found only through them,
    except segments on the path of a running request.
    """
    ends = _ends_before(index, is_wanted)
    for entry in [e for e in index.pins if _is_hit(e, ends, is_wanted)]:
        index.pins.remove(entry)
        ends = {}  # runs may have been merged
    ends = ends or _ends_before(index, is_wanted)
    for run in index.runs():
        for depth in run.depths[::-1]:
            if _is_hit(run.points[depth], ends, is_wanted):
                index.drop_point(run.points[depth])
    parents = []
    highest = {run: end for run, end in ends.items() if run.parent not in ends}
    for run, end in highest.items():
        if end > run.start:
            split(run, end)
        assert run.parent is not None
        parents.append(run.parent)
        index.remove(run)
    for parent in parents:  # merging earlier could join runs that stay with runs that go
        index.became_leaf(parent)
        index.merge(parent)


def _ends_before(index: PrefixIndex, is_wanted: Flags) -> dict[Run, int]:
    """Runs that lose segments, parents first, and the boundary up to which each stays."""
    ends: dict[Run, int] = {}
    for run in index.runs():
        if run.parent in ends:
            ends[run] = run.start
        elif not run.locks:
            wanted = np.flatnonzero(is_wanted[run.pages].any(axis=1))
            if wanted.size:
                ends[run] = run.start + int(wanted[0])
    return ends


def _is_hit(entry: Run | ResumePoint, ends: dict[Run, int], is_wanted: Flags) -> bool:
    """`entry` loses pages of its own or segments before it; `ends` from `_ends_before`."""
    run = entry
    if isinstance(entry, ResumePoint):
        if is_wanted[entry.pages].any():
            return True
        assert entry.run is not None
        run = entry.run
    assert isinstance(run, Run)
    return entry.depth > ends.get(run, entry.depth)


def copies_of(is_wrong: Flags, device: PrefixIndex, host: PrefixIndex, tail_segments: int) -> Int32:
    """Host pages that may hold copies of the device pages `is_wrong` [num_pages], or depend on
    them. The host may hold a window block in other resume points than the device. So its chain is
    cut before the first segment that the block may belong to: `tail_segments` before a boundary.
    """
    pages: list[Int32] = [NO_VALUES]
    for run in device.runs():
        wrong = np.flatnonzero(is_wrong[run.look()].any(axis=1))
        cuts = [run.start + int(i) for i in wrong[:1]]
        cuts += [
            max(0, depth - tail_segments)
            for depth, point in run.points.items()
            if is_wrong[point.pages].any()
        ]
        if cuts:
            keys = b"".join([node.keys for node in path_to(run)])
            pages += _pages_after(host, keys, min(cuts))
    return np.concatenate(pages)


def _pages_after(index: PrefixIndex, keys: bytes, cut: int) -> list[Int32]:
    """Pages of segment `cut` of a chain and of everything below it."""
    run, depth = index.find(keys, cut + 1)
    if depth <= cut:
        return []
    pages, runs = list[Int32](), [run]
    for node in runs:  # grows while iterating
        pages.append(node.pages[max(0, cut - node.start) :].ravel())
        pages += [node.points[boundary].pages for boundary in node.depths if boundary > cut]
        runs.extend(node.children.values())
    return pages
