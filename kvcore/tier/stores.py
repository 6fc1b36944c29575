"""Which entries of the device to copy to the host before they are evicted."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, itemgetter
from typing import Any, TypeGuard

from ..policies.base import Entry
from ..prefix.index import PrefixIndex
from ..prefix.keys import KEY_BYTES
from ..prefix.tree import ResumePoint, Run, path_to, run_of

AHEAD = 128  # entries that are looked at in a call
DEPTH, FIRST = attrgetter("depth"), itemgetter(0)
REMEMBERED = 1024  # entries besides those that are cached


class Stores:
    """Finds the entries that eviction takes next and that the host lacks.

    To copy all that is computed would fill the link for little; to copy what is being evicted would
    hold a step up. So entries are copied shortly before their turn, until `watermark` pages are
    free or have a copy.

    An entry is looked at once after each of its uses: what the host has lost again meanwhile, as it
    is too small, is not copied over and over.
    """

    def __init__(self, watermark: int) -> None:
        self._watermark = watermark
        self._seen: dict[Entry, int] = {}  # when each was used last, as it was looked at

    def due(
        self, device: PrefixIndex, host: PrefixIndex, under_way: int
    ) -> dict[Run | ResumePoint, tuple[bytes, int]]:
        """Entries to copy now, in the order in which they would go.

        Args:
            under_way: pages of the device that are being copied.

        Returns:
            Of each entry the keys of its chain, and how many of these segments the host has.
        """
        due: dict[Run | ResumePoint, tuple[bytes, int]] = {}
        if len(self._seen) > 4 * (device.num_segments + REMEMBERED):
            self._seen = {e: used for e, used in self._seen.items() if _is_there(e)}
        lacks = self._watermark - device.pool.num_available - under_way
        policy: Any = device.policy
        for entry in policy.coming(AHEAD) if lacks > 0 else ():
            if not _is_there(entry) or entry in device.pins:
                continue
            lacks -= entry.freed
            if self._seen.get(entry) != entry.last_used:
                self._seen[entry] = entry.last_used
                keys = chain_keys(entry)
                there, first = host.find(keys, entry.depth)
                if first < entry.depth or not _renew(host, there, entry.depth):
                    due[entry] = keys, first
            if lacks <= 0:
                break
        return due

    def again(self, entry: Run | ResumePoint) -> None:
        """`entry` was not copied, or not to its end: it is due once more."""
        self._seen.pop(entry, None)


def by_path(entries: Iterable[Run | ResumePoint]) -> list[list[Run | ResumePoint]]:
    """Entries by the path that they are on, the shortest first; the path first of which an entry
    comes first."""
    left = {entry: i for i, entry in enumerate(entries)}
    paths: list[tuple[int, list[Run | ResumePoint]]] = []
    for entry in sorted(left, key=DEPTH, reverse=True):
        if entry in left:
            nodes = {*path_to(run_at(entry))}
            path = [e for e in left if run_at(e) in nodes and e.depth <= entry.depth]
            paths.append((min([left.pop(e) for e in path]), sorted(path, key=DEPTH)))
    return [path for _, path in sorted(paths, key=FIRST)]


def run_at(entry: Run | ResumePoint) -> Run:
    """The run that has the last segment of an entry."""
    run = entry.run if isinstance(entry, ResumePoint) else entry
    assert run is not None
    return run


def chain_keys(entry: Run | ResumePoint) -> bytes:
    """Keys of the segments up to an entry."""
    return b"".join([node.keys for node in path_to(run_at(entry))])[: entry.depth * KEY_BYTES]


def _is_there(entry: Entry) -> TypeGuard[Run | ResumePoint]:
    """Whether `entry` is still one of its index."""
    if isinstance(entry, ResumePoint):
        return entry.run is not None
    return isinstance(entry, Run) and entry.parent is not None


def _renew(index: PrefixIndex, run: Run, depth: int) -> bool:
    """Whether there is an entry at boundary `depth` on the path to `run`; it counts as used now."""
    run = run_of(run, depth)
    entry = run.points.get(depth) if index.hybrid else run
    if entry is None:
        return False
    entry.last_used = index.tick
    if isinstance(entry, ResumePoint):
        if entry not in index.pins:
            index.offer(entry)
    else:
        index.became_leaf(entry)
    return True
