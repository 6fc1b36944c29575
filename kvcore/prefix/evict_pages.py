"""Evict the entries that hold certain pages."""

from __future__ import annotations

import numpy as np

from ..arrays import Flags
from .index import PrefixIndex
from .tree import ResumePoint, Run, split


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
