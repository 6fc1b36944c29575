"""Find host copies of device pages with wrong rows."""

from __future__ import annotations

import numpy as np

from ..arrays import NO_VALUES, Flags, Int32
from ..prefix.index import PrefixIndex
from .stores import chain_keys


def copies_of(is_wrong: Flags, device: PrefixIndex, host: PrefixIndex, tail_segments: int) -> Int32:
    """Host pages that may hold copies of the device pages `is_wrong` [num_pages], or depend on such
    copies.

    The host may hold a window block in other resume points than the device does. So the host's
    chain is cut before the first segment that a wrong block may belong to, `tail_segments` before a
    boundary: more is dropped than necessary, and no wrong row stays.
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
            pages += _pages_after(host, chain_keys(run), min(cuts))
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
