"""Host memory for the stand-in engine, copies of pages to and from it, and what it holds as plain sets of keys."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from quire.kvcore import AllBlocksCleared, BlockStored, EventLog
from quire.kvcore.invariants import check_index
from quire.kvcore.tier import Job, Tiers
from tests.support.kvcore.engine import POISON, Engine


class Memory:
    """Rows of the host of one engine: of each table as many as the device has in a page."""

    def __init__(self, engine: Engine, tiers: Tiers) -> None:
        self.engine, self.tiers = engine, tiers
        n = tiers.index.pool.num_pages
        self.rows = [np.full((n, rows.shape[1]), POISON) for rows in engine.rows]

    def copy(self, job: Job, num_pages: int | None = None) -> None:
        """Run the copies of a job, or the first `num_pages` of them."""
        sources, targets = job.sources[:num_pages], job.targets[:num_pages]
        assert (sources > 0).all() and (targets > 0).all()
        assert len({*targets.tolist()}) == len(targets)
        for device, host in zip(self.engine.rows, self.rows, strict=True):
            if job.kind == "store":
                host[targets] = device[sources]
            else:
                device[targets] = host[sources]
        if job.kind == "load":
            self.engine._poisoned[targets] = False

    def poison_free_pages(self) -> None:
        free = self.tiers.index.pool.free_pages()
        for rows in self.rows:
            rows[free] = POISON

    def pages_with(self, wrong: list[int]) -> int:
        """Pages that the host's entries have with the rows that pages `wrong` of the device hold: of states, and of blocks
        that are a whole segment (others, of who parts later in that segment, may be equal)."""
        runs = list(self.tiers.index.runs())
        held = {p for run in runs for p in run.look().ravel().tolist()}
        held |= {p for run in runs for q in run.points.values() for p in q.pages.tolist()} - {0}
        count = 0
        wrong, held = _sure(self.engine.rows, wrong), _sure(self.rows, held)
        for t, spec in enumerate(self.engine.specs):
            if spec.kind == "state" or spec.block_size == self.engine.kv.alignment:
                found = (self.engine.rows[t][p] for p in wrong)
                contents = {rows.tobytes() for rows in found if (rows >= 0).any()}
                count += sum(self.rows[t][p].tobytes() in contents for p in held)
        return count

    def check(self) -> None:
        """Recount the host."""
        check_index(self.tiers.index, [], [], [], Counter())


def _sure(tables, pages) -> list[int]:
    """Pages that have rows of one table: what a page has of several is of those that had it before, too."""
    return [p for p in pages if sum((rows[p] >= 0).any() for rows in tables) == 1]


class Contents:
    """What an index holds, read off its runs: keys of segments, and chains of keys of resume points."""

    def __init__(self, index) -> None:
        self.segments: set[bytes] = set()
        self.points: dict[bytes, tuple[bytes, ...]] = {}
        chains = {id(index.root): ()}
        for run in index.runs():
            keys = tuple(bytes(run.keys[i : i + 32]) for i in range(0, len(run.keys), 32))
            chain = chains[id(run.parent)] + keys
            chains[id(run)] = chain
            self.segments.update(keys)
            for depth in run.points:
                self.points[chain[depth - 1]] = chain[:depth]

    def longest(self, keys: list[bytes], most: int, span: int, hybrid: bool) -> int:
        """The longest boundary, in segments, that a prompt with these keys could resume at."""
        n = 0
        while n < min(most, len(keys)) and keys[n] in self.segments:
            n += 1
        if not hybrid:
            return n
        while n and keys[n - 1] not in self.points:
            before = max((b for b in range(1, n) if keys[b - 1] in self.points), default=0)
            chains = self.points.values()
            if any(n < len(c) <= before + span and list(c[:n]) == keys[:n] for c in chains):
                break
            n -= 1
        return n


class EventReader:
    """What events say is where, as a reader outside knows it: by medium, keys of segments and of resume points.

    Attributes:
        segments: keys by medium.
        points: keys by medium and (kind, groups), of the boundaries whose tails are stored.
    """

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.segments: defaultdict[str, set[bytes]] = defaultdict(set)
        self.points: defaultdict[tuple, set[bytes]] = defaultdict(set)

    def read(self) -> None:
        """Take the events that came; each must fit what those before said."""
        for event in self.log.take()[1]:
            if isinstance(event, AllBlocksCleared):
                self.segments.clear()
                self.points.clear()
                continue
            is_dense = event.kind == "dense"
            if is_dense:
                known, hashes = self.segments[event.medium], set(event.block_hashes)
            else:
                known = self.points[event.medium, event.kind, event.groups]
                hashes = set(event.block_hashes[-1:])
            if isinstance(event, BlockStored):
                assert not known & hashes, "stored twice"
                before = event.parent
                assert not is_dense or before is None or before in known, "its parent comes later"
                known |= hashes
            else:
                assert hashes <= known, "removed, and was not there"
                known -= hashes

    def check(self, media: dict[str, Contents], has_dense: bool) -> None:
        """It is what indexes hold, exactly."""
        self.read()
        for medium, contents in media.items():
            if has_dense:
                assert self.segments[medium] == contents.segments, medium
            for (where, *_), points in self.points.items():
                assert where != medium or points == contents.points.keys(), medium
