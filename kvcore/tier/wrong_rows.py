"""Find in the host what pages of the device hold: for rows that turned out wrong."""

from __future__ import annotations

import numpy as np

from ..arrays import NO_VALUES, Flags, Int32
from ..prefix.index import PrefixIndex
from .stores import chain_keys


def copies_of(is_wanted: Flags, device: PrefixIndex, host: PrefixIndex, reach: int) -> Int32:
    """Pages of the host's entries that may have copies of what cached pages of the device hold, or
    are found only through these.

    Which entries of the host hold a window block is not recorded, and the host may have it in
    another resume point than the device. So the host's chain is cut before the first segment that
    a wrong block may be of: more goes than has to, and nothing wrong stays.

    Args:
        is_wanted: [num_pages] those pages of the device.
        reach: segments before a boundary of which its resume point has rows.
    """
    pages: list[Int32] = [NO_VALUES]
    for run in device.runs():
        wrong = np.flatnonzero(is_wanted[run.look()].any(axis=1))
        cuts = [run.start + int(i) for i in wrong[:1]]
        cuts += [
            max(0, depth - reach)
            for depth, point in run.points.items()
            if is_wanted[point.pages].any()
        ]
        if cuts:
            pages += _pages_after(host, chain_keys(run), min(cuts))
    return np.concatenate(pages)


def _pages_after(index: PrefixIndex, keys: bytes, cut: int) -> list[Int32]:
    """Pages of all entries that start with the first `cut` segments of a chain and its next one."""
    run, depth = index.find(keys, cut + 1)
    if depth <= cut:
        return []
    pages, runs = list[Int32](), [run]
    for node in runs:  # which grows
        pages.append(node.pages[max(0, cut - node.start) :].ravel())
        pages += [node.points[boundary].pages for boundary in node.depths if boundary > cut]
        runs.extend(node.children.values())
    return pages
