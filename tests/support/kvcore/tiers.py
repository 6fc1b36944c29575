"""Host memory for the stand-in engine, copies of pages to and from it, and what it holds as plain sets of keys."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from quire.kvcore import AllBlocksCleared, BlockStored, EventLog, Match
from quire.kvcore.invariants import check_index
from quire.kvcore.tier import Copies, Job, Tiers
from tests.support.kvcore.engine import POISON, Engine


class Written(np.ndarray):
    """Flags of pages, and whom to tell which of them are written."""

    def __setitem__(self, pages, is_poisoned):
        super().__setitem__(pages, is_poisoned)
        if is_poisoned is False:
            self.told(np.arange(len(self))[pages])


class Memory:
    """Rows of the device and the host of one engine.

    lossy: pages of the device that came from tiers which are, and those whose rows were computed over such.
    """

    def __init__(self, engine: Engine, tiers: Tiers) -> None:
        self.engine, self.tiers = engine, tiers
        layout = engine.kv.layout
        pairs = zip(tiers.layout.groups, layout.groups, strict=True)
        self.parts = [small.pages_per_block // g.pages_per_block for small, g in pairs]
        # Rows of a page of a tier: so many of each table.
        self.widths = [
            -(-r.shape[1] // self.parts[group]) for (group, _), r in zip(layout.tables, engine.rows, strict=True)
        ]  # fmt: skip
        self.are_lossy, self.lossy = tiers.host.lossy, set[int]()
        engine._poisoned = engine._poisoned.view(Written)
        engine._poisoned.told = lambda pages: self.lossy.difference_update(np.ravel(pages).tolist())
        n = tiers.host.index.pool.num_pages
        self.rows = {"device": engine.rows}
        self.rows["host"] = [np.full((n, width), POISON) for width in self.widths]

    def copy(self, job: Job, but: set[int] = frozenset()) -> None:
        """Run the copies of a job, but those to the target pages `but`."""
        tables = self.engine.kv.layout.tables
        origin, goal = ends_of(job)
        for c in job.copies:
            self._check_parts(c, job)
            keep = ~np.isin(c.targets, list(but))
            for t, (group, _) in enumerate(tables):
                if group == c.group:
                    for i in keep.nonzero()[0].tolist():
                        part = int(c.parts[i])
                        source = self._rows(origin, t, int(c.sources[i]), part)
                        target = self._rows(goal, t, int(c.targets[i]), part)
                        n = min(len(source), len(target))
                        target[:n] = source[:n]
                else:  # no rows of who had the pages before
                    self.rows[goal][t][c.targets[keep]] = POISON
            if goal == "device":
                self.engine._poisoned[c.targets[keep]] = False
                if self.are_lossy:
                    self.lossy.update(c.targets[keep].tolist())

    def _check_parts(self, c: Copies, job: Job) -> None:
        """Each page of a tier once; of a page of the device all parts, each once."""
        assert (c.targets > 0).all() and (c.sources > 0).all()
        parts, n = c.parts.tolist(), self.parts[c.group]
        assert set(parts) <= {*range(n)}
        for place, pages in zip(
            ends_of(job), (c.sources.tolist(), c.targets.tolist()), strict=True
        ):
            if place == "device":
                every = {(p, part) for p in set(pages) for part in range(n)}
                assert set(zip(pages, parts, strict=True)) == every and len(pages) == len(every)
            else:
                assert len(set(pages)) == len(pages)

    def _rows(self, place: str, t: int, page: int, part: int) -> np.ndarray:
        """Where a part of a page is, of table `t`."""
        rows = self.rows[place][t][page]
        if place != "device":
            return rows
        width = self.widths[t]
        return rows[part * width : (part + 1) * width]

    def contents(self, pages: list[int]) -> list[set[bytes]]:
        """Rows that pages of the device hold, of each table: those of the last part, which depend on all before it, of
        window blocks, and of dense ones that are a whole segment (others, of who parts in theirs, may be equal)."""
        tables = self.rows["device"]
        # What a page has of several tables is of those that had it before, too.
        sure = [p for p in pages if sum((rows[p] >= 0).any() for rows in tables) == 1]
        found = []
        for t, spec in enumerate(self.engine.specs):
            last = (tables[t].shape[1] - 1) // self.widths[t]
            rows = [self._padded("device", t, p, last) for p in sure]
            is_whole = spec.kind != "dense" or spec.block_size == self.engine.kv.alignment
            found.append({r.tobytes() for r in rows if is_whole and (r >= 0).any()})
        return found

    def _padded(self, place: str, t: int, page: int, part: int) -> np.ndarray:
        rows = self._rows(place, t, page, part)
        return np.append(rows, [POISON] * (self.widths[t] - len(rows)))

    def num_copies(self, contents: list[set[bytes]], copied: dict[Job, bool]) -> int:
        """Pages with these rows that tiers have, or that open jobs are to bring somewhere; `copied`: whether they have."""
        count = 0
        index = self.tiers.host.index
        held = {p for run in index.runs() for p in run.look().ravel().tolist()}
        points = [q for run in index.runs() for q in run.points.values()]
        held |= {p for q in points for p in q.pages.tolist()} - {0}
        for rows, wrong in zip(self.rows["host"], contents, strict=True):
            count += sum(rows[p].tobytes() in wrong for p in held)
        for job in self.tiers.jobs:
            for c in job.copies if not job.parts.is_void else ():
                place = ends_of(job)[copied[job]]
                pages = c.targets if copied[job] else c.sources
                for t, (group, _) in enumerate(self.engine.kv.layout.tables):
                    for page, part in zip(pages.tolist(), c.parts.tolist(), strict=True):
                        if group == c.group:
                            count += self._padded(place, t, page, part).tobytes() in contents[t]
        return count

    def taint(self, slot: int, start: int) -> None:
        """All dense rows of a request from token `start` on rest on lossy ones."""
        kv = self.engine.kv
        for table, spec in zip(self.engine.tables, self.engine.specs, strict=True):
            if spec.kind == "dense":
                end = int(kv.num_computed[slot]) // spec.block_size
                self.lossy.update(table[slot][start // spec.block_size : end].tolist())

    def lossy_tokens(self, match: Match) -> int:
        """Tokens of a hit from the first lossy row on that it is seen to have."""
        kv, a = self.engine.kv, self.engine.kv.alignment
        hit = (match.replay_to or match.num_tokens) // a
        keys = match.prompt.keys[: hit * 32]
        run, _ = kv.index.find(keys, hit)
        of_segments = kv.index.pages_between(run, 0, hit).tolist()
        found = [i for i, pages in enumerate(of_segments) if self.lossy & {*pages}]
        while run is not None and run.depth:
            if hit in run.points and self.lossy & {*run.points[hit].pages.tolist()}:
                found.append(hit - 1)
            run = run.parent
        return (hit - min(found)) * a if found else 0

    def poison_free_pages(self) -> None:
        free = self.tiers.host.index.pool.free_pages()
        for rows in self.rows["host"]:
            rows[free] = POISON

    def check(self) -> None:
        """Recount the host."""
        host, jobs = self.tiers.host, self.tiers.jobs
        check_index(host.index, [], [], [], Counter())
        queued = sum(len(c) for job in jobs if job.kind == "load" for c in job.copies)
        assert host.queued_bytes == queued * self.tiers.page_bytes


def ends_of(job: Job) -> tuple[str, str]:
    """Where the pages of a job come from, and where they go."""
    return ("device", "host") if job.kind == "store" else ("host", "device")


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


def longest(places: list[Contents], keys: list[bytes], most: int, span: int, hybrid: bool) -> int:
    """The longest boundary, in segments, that a prompt with these keys could resume at with what is anywhere."""
    dense = 0
    while dense < len(keys) and any(keys[dense] in p.segments for p in places):
        dense += 1
    n = min(dense, most)
    if not hybrid:
        return n
    has = [any(key in p.points for p in places) for key in keys]
    while n and not has[n - 1]:
        before = max((b for b in range(1, n) if has[b - 1]), default=0)
        chains = [chain for p in places for chain in p.points.values()]
        if any(n < len(chain) <= before + span and list(chain[:n]) == keys[:n] for chain in chains):
            break
        n -= 1
    return n
