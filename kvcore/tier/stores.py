"""Choose the entries to copy to the host before they are evicted."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, itemgetter
from typing import Any, TypeGuard

from ..policies.base import Entry
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run, path_to, run_of

AHEAD = 128  # entries inspected in a call
REMEMBERED = 1024  # entries remembered beyond those in the cache
DEPTH, FIRST = attrgetter("depth"), itemgetter(0)


class Stores:
    """Find the entries next in line for eviction that have no copy in the host, until `watermark`
    pages are free or have a copy. Each is inspected once after each use, so that a host too small
    to keep a copy is not written over and over.
    """

    def __init__(self, watermark: int) -> None:
        self._watermark = watermark
        self._seen: dict[Entry, int] = {}  # last_used at the time of inspection

    def due(
        self, device: PrefixIndex, host: PrefixIndex, under_way: int
    ) -> dict[Run | ResumePoint, tuple[bytes, int]]:
        """Entries to copy now, in order of eviction: {entry: (keys, leading segments in the host)}.
        `under_way`: device pages that are being copied."""
        due: dict[Run | ResumePoint, tuple[bytes, int]] = {}
        if len(self._seen) > 4 * (device.num_segments + REMEMBERED):
            self._seen = {e: used for e, used in self._seen.items() if _is_cached(e)}
        lacks = self._watermark - device.pool.num_free - under_way
        policy: Any = device.policy
        for entry in policy.coming(AHEAD) if lacks > 0 else ():
            if not _is_cached(entry) or entry in device.pins:
                continue
            lacks -= entry.freed
            if self._seen.get(entry) != entry.last_used:
                self._seen[entry] = entry.last_used
                keys = chain_keys(entry)
                run, first = host.find(keys, entry.depth)
                if first < entry.depth or not _renew(host, run, entry.depth):
                    due[entry] = keys, first
            if lacks <= 0:
                break
        return due

    def inspect_again(self, entry: Run | ResumePoint) -> None:
        """`entry` was not copied, or only in part."""
        self._seen.pop(entry, None)

    def inspect_all_again(self) -> None:
        self._seen.clear()


def by_path(entries: Iterable[Run | ResumePoint]) -> list[list[Run | ResumePoint]]:
    """Group entries by path: shortest first in a path, paths in order of their first entry."""
    left = {entry: i for i, entry in enumerate(entries)}
    paths: list[tuple[int, list[Run | ResumePoint]]] = []
    for entry in sorted(left, key=DEPTH, reverse=True):
        if entry in left:
            nodes = {*path_to(run_at(entry))}
            path = [e for e in left if run_at(e) in nodes and e.depth <= entry.depth]
            paths.append((min([left.pop(e) for e in path]), sorted(path, key=DEPTH)))
    return [path for _, path in sorted(paths, key=FIRST)]


def run_at(entry: Run | ResumePoint) -> Run:
    run = entry.run if isinstance(entry, ResumePoint) else entry
    assert run is not None
    return run


def chain_keys(entry: Run | ResumePoint) -> bytes:
    return b"".join([node.keys for node in path_to(run_at(entry))])[: entry.depth * KEY_BYTES]


def _is_cached(entry: Entry) -> TypeGuard[Run | ResumePoint]:
    if isinstance(entry, ResumePoint):
        return entry.run is not None
    return isinstance(entry, Run) and entry.parent is not None


def _renew(index: PrefixIndex, run: Run, depth: int) -> bool:
    run = run_of(run, depth)
    entry = run.points.get(depth) if index.hybrid else run
    if entry is None:
        return False
    entry.last_used = index.tick
    if not isinstance(entry, ResumePoint):
        index.became_leaf(entry)
    elif entry not in index.pins:
        index.offer(entry)
    return True
