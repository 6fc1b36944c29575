"""The index of a tier, made of the records that a journal kept."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import numpy as np

from ..arrays import NO_VALUES, Int32
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run
from .records import Record


def restore(
    index: PrefixIndex, records: Iterable[Record], pages_per_point: int
) -> tuple[list[Record], list[Record]]:
    """Fill `index`, which is empty.

    Args:
        records: each segment after its parent, each resume point after its segment.

    Returns:
        (records that are entries now, those that fit nowhere: their parent is missing, or their
        pages are not of this pool, or are somebody else's, or too few).
    """
    kept: list[Record] = []
    lost: list[Record] = []
    segments: dict[bytes, Record] = {}
    points: dict[bytes, Record] = {}
    below: dict[bytes, list[Record]] = {}
    dense: set[int] = set()
    tails: set[int] = set()
    last = index.pool.num_pages - 1
    for record in records:
        pages, known = record.pages, segments.get(record.parent)
        is_right = len(record.key) == KEY_BYTES and all(0 <= page <= last for page in pages)
        if record.kind == "segment":
            depth = 1 if not record.parent else 0 if known is None else known.depth + 1
            own = set(pages)
            is_right = (
                is_right
                and depth == record.depth
                and len(own) == len(pages) == index.pages_per_segment
                and not (0 in own or own & dense or own & tails or record.key in segments)
            )
            if is_right:
                segments[record.key] = record
                below.setdefault(record.parent, []).append(record)
                dense |= own
        else:
            known, own = segments.get(record.key), set(pages) - {0}
            is_right = (
                is_right
                and index.hybrid
                and known is not None
                and known.depth == record.depth
                and len(pages) == pages_per_point
                and not (own & dense or record.key in points)
            )
            if is_right:
                points[record.key] = record
                tails |= own
        (kept if is_right else lost).append(record)
    index.pool.claim(np.array(sorted(dense | tails), dtype=np.int32))
    ends = _make_runs(index, below)
    for key, record in points.items():
        run = ends[key]
        held: Int32 = np.array(record.pages, dtype=np.int32)
        run.points[record.depth] = point = ResumePoint(run, record.depth, held, index.tick)
        insort(run.depths, record.depth)
        index.pool.hold(held)
        index.num_points += 1
        index.offer(point)
    for run in list(index.runs()):
        index.became_leaf(run)
    return kept, lost


def _make_runs(index: PrefixIndex, below: dict[bytes, list[Record]]) -> dict[bytes, Run]:
    """Make runs of segments, by their parents; returns the run of each segment."""
    runs: dict[bytes, Run] = {}
    starts = [(index.root, record) for record in below.get(b"", ())]
    while starts:
        parent, record = starts.pop()
        chain = [record]
        while len(after := below.get(chain[-1].key, [])) == 1:
            chain += after
        keys = b"".join(r.key for r in chain)
        pages = np.concatenate([NO_VALUES, *(np.array(r.pages, dtype=np.int32) for r in chain)])
        shape = len(chain), index.pages_per_segment
        run = Run(parent, parent.depth, keys, pages.astype(np.int32).reshape(shape))
        parent.children[chain[0].key] = run
        runs.update(dict.fromkeys((r.key for r in chain), run))
        index.num_segments += len(chain)
        starts += [(run, record) for record in after]
    return runs
