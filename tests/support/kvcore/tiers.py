"""Host memory for the stand-in engine, copies of pages to and from it, and what it holds as plain sets of keys."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from quire.kvcore import AllBlocksCleared, BlockStored, EventLog
from quire.kvcore.invariants import check_index
from quire.kvcore.tier import Job, Tiers
from tests.support.kvcore.device import POISON
from tests.support.kvcore.engine import Engine


class Memory:
    """Memory of the host of one engine, page by page as the device has it."""

    def __init__(self, engine: Engine, tiers: Tiers) -> None:
        self.engine, self.tiers = engine, tiers
        shape = tiers.index.pool.num_pages, engine.device.memory.shape[1]
        self.rows = np.full(shape, POISON)

    def copy(self, job: Job, num_pages: int | None = None) -> None:
        """Run the copies of a job, or the first `num_pages` of them."""
        sources, targets = job.sources[:num_pages], job.targets[:num_pages]
        if job.kind == "store":
            self.rows[targets] = self.engine.device.memory[sources]
        else:
            self.engine.device.memory[targets] = self.rows[sources]

    def poison_free_pages(self) -> None:
        self.rows[self.tiers.index.pool.free_pages()] = POISON

    def check(self) -> None:
        """Recount the host."""
        check_index(self.tiers.index, [], [], [], Counter())


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
